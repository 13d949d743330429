/* sequence.h: a program of several parts as one run in C (docs/adr/0027-parts.md). frame.c makes these tables from the words
 * that polydyn/program/encoding.py writes, parts.c is the C interface. */
#ifndef POLYDYN_SEQUENCE_H
#define POLYDYN_SEQUENCE_H

#include "internal.h"
#include "polydyn_cuda.h"

/* Memory that grows to the largest tensor in it; tensors that are never there at the same time share one. */
typedef struct {
    char *data;
    int64_t bytes;
    int32_t device; /* it is a device's */
} pd_room;

/* A tensor of a call. */
typedef struct {
    char *data;
    int64_t shape[PD_MAX_RANK], strides[PD_MAX_RANK]; /* strides in bytes */
    int64_t given; /* bytes at `data` that are the caller's, -1: none; only of a result */
    int32_t dtype, rank;
    int32_t room;   /* -1: an input, a constant, or what Python makes */
    int32_t result; /* it is an output, and goes to memory of the caller's where that is given */
    int32_t device; /* it lies on the device: only parts and bodies read it */
} pd_held;

/* The library of a part or a body, and its program. */
#define PD_CALLS(X)                                                                                                   \
    X(open) X(close) X(weight_bytes) X(abi_version) X(inputs) X(outputs) X(launch_count) X(context_new) X(context_free)  \
    X(shapes) X(run) X(launch) X(error) X(arena_bytes) X(copied_bytes) X(evaluations) X(symbol) X(shapes_seen)
/* On the CPU, on a device, or of several parts; else NULL. */
#define PD_OWN_CALLS(X)                                                                                               \
    X(profile) X(borrow_threads) X(cuda_run) X(cuda_wait) X(cuda_places) X(cuda_stream) X(cuda_room) X(cuda_fetch) \
    X(sequence_of)
struct pd_sequence *pd_sequence_of(pd_context *context);
#define PD_CALL(name) __typeof__(pd_##name) *name;
typedef struct {
    void *library;
    int file; /* that it was loaded from, -1: somebody else loaded it */
    pd_program *program;
    PD_CALLS(PD_CALL)
    PD_OWN_CALLS(PD_CALL)
} pd_model;

/* A model with a context that nobody else uses, and room for the arguments of a call. */
typedef struct {
    const pd_model *model;
    pd_context *context;
    pd_tensor *tensors;
    int64_t *output_dims, *sizes; /* sizes: of inputs that only bring one */
    const void **from;
    void **to;
    int32_t *ranks; /* of the outputs */
    int32_t *places, *told; /* on a device: where inputs and then outputs lie, and where the context supposes them */
    int32_t input_count, output_count, launch_count;
    int32_t unread; /* it ran on a device, and nobody has waited for it */
} pd_unit;

/* A model that a step runs: a program, or several parts, `inner`. Pairs: an input of it, and an input (a dim) of the step.
 * `results`: an output, or -1 - an input. Inputs and results of several parts are its tensors. `direct`: per result 1 where the
 * program writes it to its place; else it is copied there. `entered`: `inner` has stopped for signals. */
typedef struct {
    pd_unit unit;
    struct pd_sequence *inner;
    int32_t entered, formal_count, captured_count, size_count, result_count;
    const int64_t *formals, *captured, *sizes, *results, *direct;
} pd_body;

/* What is carried from iteration to iteration: the value that the next one reads, and two rooms that it goes to and fro
 * between. `in_place`: where it grows it keeps its beginning. `row`: the scan output whose row it is too, and lies there; -1.
 * `stays`: the body hands it on as it came. */
typedef struct {
    pd_held now;
    pd_room rooms[2];
    int32_t at; /* the room, -1: elsewhere */
    int32_t in_place, row, stays;
} pd_carried;

/* Rows of a scan output: row k lies at start + k * step. `direct`: that is in the output. `tail`: the shape of a row that
 * no iteration shows. */
typedef struct {
    pd_held row; /* shape and type of the first one */
    pd_room room;
    char *start;
    int64_t step, capacity; /* capacity: in rows, -1: none has come */
    const int64_t *const *tail; /* expressions */
    int32_t tail_rank, axis, backwards, direct;
} pd_rows;

enum { PD_BEGINS, PD_RUNS, PD_HAS_ENDED };

typedef struct {
    pd_body body;
    pd_carried *carried;
    pd_rows *rows;
    pd_held *slices;
    const int64_t *slice_forms; /* pairs: axis, backwards */
    int64_t *slice_steps;
    const int64_t *reads; /* with `counts`: whether the body reads the number of the iteration, and the condition */
    int32_t carried_count, row_count, slice_count, counts;
    int32_t phase, going, plain, steady; /* plain: no result is copied; steady: shapes are those of the iteration before */
    int32_t device; /* what it carries, and rows whose number is known, stay on the device */
    int64_t number, k, trips;
    uint8_t condition, answer; /* what the body reads, and what it says: it may read one behind its write of the other */
} pd_loop;

enum {
    PD_PART, PD_PYTHON, PD_BRANCH, PD_ITERATE, PD_NON_ZERO, PD_SUPPRESS, PD_UNIQUE,
    PD_SIZES, PD_COMMON, PD_COUNT, PD_RESHAPE, PD_BROADCAST, PD_SLICE, PD_UNSQUEEZE, PD_SQUEEZE, PD_PADS,
    PD_SCALES
};

/* A part: `inputs`, then the sizes `dims`, to `outputs`. A step: also to `symbols`, places of values. */
typedef struct {
    const int64_t *inputs, *outputs, *symbols; /* -1: an input that a step does not have */
    const int64_t *const *dims;                /* expressions, see pd_value_of */
    pd_unit *unit;
    pd_body *bodies;
    pd_loop *loop;
    pd_room *scratch;
    const char *label, *origin; /* of a step: what it does of which node, and the node; NULL: a part */
    const char *name; /* of the tensor whose elements are sizes, or why two sizes are equal */
    int32_t kind, input_count, output_count, dim_count, symbol_count;
    int32_t setting; /* boxes are given by their centre; a 0 in a shape is a size; of PD_UNIQUE 1: in order, plus 2 * (1 + axis) */
} pd_stage;

enum { PD_STOP_PYTHON = -1, PD_STOP_MEMORY = -2, PD_STOP_SIGNALS = -3 };

/* The size of a tensor along an axis is that of symbol `value`, or must be `dim`, which is `text` of input `name`. */
typedef struct {
    int32_t tensor, axis, value;
    const int64_t *dim;
    const char *name, *text;
} pd_size;

/* A condition that no part has seen: '=', '<' (less or equal), '%' (multiple of). */
typedef struct {
    const int64_t *left, *right;
    int32_t relation;
    const char *text, *message;
} pd_late_guard;

/* The first members are known to polydyn/runtime/sequence.py. */
typedef struct pd_sequence {
    pd_held *tensors;
    int64_t *values; /* of symbols */
    int64_t *times;  /* nanoseconds of every launch and every step in order; NULL: nobody asks */
    int64_t waits;   /* how often it has waited for a device */
    int32_t asks;    /* it stops where a result has no memory of the caller's; else that is the context's */
    int32_t at, begun, lacks; /* the stage that is next, or failed; the last one begun; the tensor without memory */
    char text[1024];
    pd_room *rooms;
    pd_size *sources, *checks;
    pd_late_guard *guards;
    pd_stage *stages;
    pd_unit **units;
    pd_loop **loops;
    const pd_unit *device; /* one of the units on a device, whose stream all of them use; NULL: there is none */
    void *stream;
    int32_t pending; /* a run on the device that nobody has waited for */
    int32_t count, tensor_count, room_count, value_count, source_count, check_count, guard_count, unit_count, loop_count;
    void *memory; /* of all these tables, see frame.c */
} pd_sequence;

/* Runs the stages from `at` on; from 0 on with `begun` -1 it first takes the sizes of the inputs, and checks them. PD_OK: all
 * have run; an error code, with `text`; PD_STOP_PYTHON: `at` is not for C; PD_STOP_MEMORY: `lacks` needs memory of its
 * shape; PD_STOP_SIGNALS: a long loop, look at signals. Then it goes on when it is called again. */
int32_t pd_sequence_run(pd_sequence *s);
/* The sizes of the inputs, checked. */
int32_t pd_take_sizes(pd_sequence *s);
/* The shapes of a part's results. */
int32_t pd_part_shapes(pd_sequence *s, const pd_stage *g);

/* The value of an expression: words in postfix order, up to PD_END; / is floor division, by 0 it gives 0. */
enum { PD_END, PD_NUMBER, PD_SYMBOL, PD_PLUS, PD_TIMES, PD_OVER, PD_LEAST, PD_MOST };
#define PD_EXPRESSION_DEPTH 32
int64_t pd_value_of(const int64_t *words, const int64_t *values);

/* ---- words (frame.c) ---- */

/* What follows is read in order: numbers, lists with their length, texts in whole words. */
typedef struct {
    const int64_t *at;
} pd_words;

static inline int64_t pd_next(pd_words *w) { return *w->at++; }
const int64_t *pd_next_list(pd_words *w, int32_t *count);
const char *pd_next_text(pd_words *w);

/* ---- programs and contexts (parts.c, frame.c) ---- */

/* The head of the weights: what the file is, the version of the C interface, bytes of all, and where the words begin. */
typedef struct {
    int64_t magic, abi, bytes, words;
} pd_head;
#define PD_MAGIC INT64_C(0x7374726170796470) /* "pdyparts" */

/* Where an output comes from. */
typedef struct {
    int32_t tensor, late; /* late: some of its dims are not known before a run */
    const int64_t **dims; /* expressions */
} pd_given;

/* A program of several parts: what pd_program.place is. */
typedef struct {
    pd_model *models;
    pd_io *inputs, *outputs;
    pd_given *given; /* of the outputs */
    const int64_t *dense; /* per input: a step reads it, so it must be dense */
    int32_t model_count, input_count, output_count, own_parts, launch_count; /* own_parts: the first models; the rest are bodies */
    int64_t early; /* so many symbols are sizes of inputs, the first ones */
    const int64_t *sequence; /* the words of a sequence */
    void *memory;
} pd_parts;

/* Zeroed memory that is freed with the rest of `memory`. */
void *pd_zeros(void **memory, int64_t count, size_t size);
void pd_free_zeros(void *memory);
/* A sequence of its own, with contexts of so many threads; PD_MEMORY, or why a context cannot be had. */
int32_t pd_sequence_new(const pd_parts *p, const char *weights, int32_t threads, pd_sequence **out);
void pd_sequence_free(pd_sequence *s);
/* Bytes of the rooms. */
int64_t pd_room_bytes(const pd_sequence *s);

/* ---- what the files of the library share ---- */

__attribute__((format(printf, 3, 4))) int32_t pd_refuse(pd_sequence *s, int32_t code, const char *format, ...);
/* At least so many bytes; `kept` of them stay. */
int32_t pd_reserve(pd_sequence *s, pd_room *room, int64_t bytes, int64_t kept);
/* Alike, of a device's memory where `device` says so; nothing stays. */
int32_t pd_reserve_on(pd_sequence *s, pd_room *room, int64_t bytes, int32_t device);
/* Makes `t` a dense tensor of its shape, and gives it memory. */
int32_t pd_place(pd_sequence *s, pd_held *t);
void pd_make_dense(pd_held *t);
int64_t pd_elements(const pd_held *t);
int64_t pd_bytes(const pd_held *t);
void pd_take_shape(pd_held *t, int32_t rank, const int64_t *shape);
void pd_copy_held(const pd_held *from, char *to);
/* Also from the device, where tensors are dense. */
int32_t pd_fetch_held(pd_sequence *s, const pd_held *from, char *to);
void pd_free_rooms(const pd_sequence *s, pd_room *rooms, int64_t count);
void pd_free_loop(const pd_sequence *s, pd_loop *l);
/* Input i of a program. */
void pd_feed(pd_unit *u, int32_t i, const pd_held *t);
void pd_feed_size(pd_unit *u, int32_t i, int64_t size);
/* Its shapes; the program's error goes to `text`. */
int32_t pd_unit_shapes(pd_sequence *s, pd_unit *u);
int32_t pd_unit_run(pd_sequence *s, pd_unit *u);
/* The dims of output o, as pd_unit_shapes has left them. */
const int64_t *pd_unit_dims(const pd_unit *u, int32_t o);

int32_t pd_unique(pd_sequence *s, const pd_stage *g);
int32_t pd_counting_step(pd_sequence *s, const pd_stage *g);
int32_t pd_size_step(pd_sequence *s, const pd_stage *g);
int32_t pd_branch(pd_sequence *s, const pd_stage *g);
int32_t pd_iterate(pd_sequence *s, const pd_stage *g);

#endif
