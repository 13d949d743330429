/* sequence.h: a program of several parts as one run in C (docs/adr/0027-parts.md). frame.c builds these tables from the
 * words that polydyn/program/encoding.py writes; parts.c is the C interface. */
#ifndef POLYDYN_SEQUENCE_H
#define POLYDYN_SEQUENCE_H

#include "internal.h"
#include "polydyn_cuda.h"

/* Memory that grows to the size of its largest tensor; shared by tensors that are never alive at the same time. */
typedef struct {
    char *data;
    int64_t bytes;
    int32_t device; /* whether it is device memory */
} pd_room;

/* A tensor of a call. */
typedef struct {
    char *data;
    int64_t shape[PD_MAX_RANK], strides[PD_MAX_RANK]; /* strides in bytes */
    int64_t given; /* of a result: bytes at `data` that belong to the caller, -1: none */
    int32_t dtype, rank;
    int32_t room;   /* -1: an input, a constant, or computed by Python */
    int32_t result; /* whether it is an output, and is written to the caller's memory if there is any */
    int32_t device; /* whether it is on the device: only parts and bodies read it */
} pd_held;

/* The library of a part or a body, and its program. */
#define PD_CALLS(X)                                                                                                   \
    X(open) X(close) X(weight_bytes) X(abi_version) X(inputs) X(outputs) X(launch_count) X(context_new) X(context_free)  \
    X(shapes) X(run) X(launch) X(error) X(arena_bytes) X(copied_bytes) X(evaluations) X(symbol) X(shapes_seen)
/* NULL in programs to which they do not apply: on the CPU, on a device, or of several parts. */
#define PD_OWN_CALLS(X)                                                                                               \
    X(profile) X(borrow_threads) X(cuda_run) X(cuda_wait) X(cuda_places) X(cuda_stream) X(cuda_room) X(cuda_fetch) \
    X(sequence_of)
struct pd_sequence *pd_sequence_of(pd_context *context);
#define PD_CALL(name) __typeof__(pd_##name) *name;
typedef struct {
    void *library;
    int file; /* the file it was loaded from; -1: loaded by the caller */
    pd_program *program;
    PD_CALLS(PD_CALL)
    PD_OWN_CALLS(PD_CALL)
} pd_model;

/* A model with its own context and memory for the arguments of a call. */
typedef struct {
    const pd_model *model;
    pd_context *context;
    pd_tensor *tensors;
    int64_t *output_dims, *sizes; /* sizes: of inputs that only provide a size */
    const void **from;
    void **to;
    int32_t *ranks; /* of the outputs */
    int32_t *places, *told; /* on a device: where inputs, then outputs are, and where the context assumes them to be */
    int32_t input_count, output_count, launch_count;
    int32_t unread; /* whether it ran on a device and was not waited for */
} pd_unit;

/* A model that a step runs: a program, or `inner`, a sequence of several parts. Pairs: an input of it, and an input (a
 * dim) of the step. `results`: an output, or -1 - an input. Inputs and results of `inner` are its tensors. `direct`:
 * per result 1 if the program writes it to its final place; else it is copied there. `entered`: `inner` has stopped for
 * signals. */
typedef struct {
    pd_unit unit;
    struct pd_sequence *inner;
    int32_t entered, formal_count, captured_count, size_count, result_count;
    const int64_t *formals, *captured, *sizes, *results, *direct;
} pd_body;

/* A tensor carried from iteration to iteration: the value that the next iteration reads, and two rooms between which it
 * alternates. `in_place`: if it grows, its beginning stays in place. `row`: the scan output that has the same rows and
 * stores them, or -1. `stays`: the body returns it unchanged. */
typedef struct {
    pd_held now;
    pd_room rooms[2];
    int32_t at; /* its room; -1: elsewhere */
    int32_t in_place, row, stays;
} pd_carried;

/* Rows of a scan output: row k is at start + k * step. `direct`: in the output itself. `tail`: the shape of a row if
 * there are no iterations. */
typedef struct {
    pd_held row; /* shape and type of the first row */
    pd_room room;
    char *start;
    int64_t step, capacity; /* capacity: in rows; -1: none yet */
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
    const int64_t *reads; /* with `counts`: whether the body reads the iteration number and the condition */
    int32_t carried_count, row_count, slice_count, counts;
    int32_t phase, going, plain, steady; /* plain: no result is copied; steady: same shapes as before */
    int32_t device; /* whether carried tensors, and rows whose number is known, stay on the device */
    int64_t number, k, trips;
    uint8_t condition, answer; /* input and output condition of the body, which may write one before it reads the other */
} pd_loop;

enum {
    PD_PART, PD_PYTHON, PD_BRANCH, PD_ITERATE, PD_NON_ZERO, PD_SUPPRESS, PD_UNIQUE,
    PD_SIZES, PD_COMMON, PD_COUNT, PD_RESHAPE, PD_BROADCAST, PD_SLICE, PD_UNSQUEEZE, PD_SQUEEZE, PD_PADS,
    PD_SCALES
};

/* A part computes `outputs` from `inputs` and the sizes `dims`. A step also sets `symbols`, indices into values. */
typedef struct {
    const int64_t *inputs, *outputs, *symbols; /* -1: a missing input of a step */
    const int64_t *const *dims;                /* expressions, see pd_value_of */
    pd_unit *unit;
    pd_body *bodies;
    pd_loop *loop;
    pd_room *scratch;
    const char *label, *origin; /* of a step: a description, and its node; NULL: a part */
    const char *name; /* of the tensor whose elements are sizes; or the reason why two sizes are equal */
    int32_t kind, input_count, output_count, dim_count, symbol_count;
    int32_t setting; /* boxes have centers; 0 in a shape is a size; PD_UNIQUE: sorted + 2 * (1 + axis) */
} pd_stage;

enum { PD_STOP_PYTHON = -1, PD_STOP_MEMORY = -2, PD_STOP_SIGNALS = -3 };

/* The size of a tensor along an axis is that of symbol `value`, or must be `dim`, written as `text` in input `name`. */
typedef struct {
    int32_t tensor, axis, value;
    const int64_t *dim;
    const char *name, *text;
} pd_size;

/* A condition that no part checks: '=', '<' (less or equal), '%' (multiple of). */
typedef struct {
    const int64_t *left, *right;
    int32_t relation;
    const char *text, *message;
} pd_late_guard;

/* polydyn/runtime/sequence.py depends on the first members. */
typedef struct pd_sequence {
    pd_held *tensors;
    int64_t *values; /* of symbols */
    int64_t *times;  /* nanoseconds of every launch and every step in order; NULL if not wanted */
    int64_t waits;   /* how often it has waited for a device */
    int32_t asks;    /* whether it stops for results without memory of the caller; else it uses the context's memory */
    int32_t at, begun, lacks; /* the next or failed stage; the last one started; the tensor without memory */
    char text[1024];
    pd_room *rooms;
    pd_size *sources, *checks;
    pd_late_guard *guards;
    pd_stage *stages;
    pd_unit **units;
    pd_loop **loops;
    const pd_unit *device; /* one of the units on a device, whose stream all of them use, or NULL */
    void *stream;
    int32_t pending; /* whether a run on the device was not waited for */
    int32_t count, tensor_count, room_count, value_count, source_count, check_count, guard_count, unit_count, loop_count;
    void *memory; /* of all these tables, see frame.c */
} pd_sequence;

/* Runs the stages from `at` on. If `at` is 0 and `begun` is -1, it first reads and checks the sizes of the inputs.
 * Returns PD_OK after all stages; an error code, with `text`; PD_STOP_PYTHON: Python must run stage `at`;
 * PD_STOP_MEMORY: `lacks` needs memory for its shape; PD_STOP_SIGNALS: a long loop, pending signals should be handled.
 * After a stop, call it again to continue. */
int32_t pd_sequence_run(pd_sequence *s);
/* Reads and checks the sizes of the inputs. */
int32_t pd_take_sizes(pd_sequence *s);
/* Computes the shapes of a part's results. */
int32_t pd_part_shapes(pd_sequence *s, const pd_stage *g);

/* Evaluates an expression: words in postfix order, up to PD_END; / is floor division, and x / 0 is 0. */
enum { PD_END, PD_NUMBER, PD_SYMBOL, PD_PLUS, PD_TIMES, PD_OVER, PD_LEAST, PD_MOST };
#define PD_EXPRESSION_DEPTH 32
int64_t pd_value_of(const int64_t *words, const int64_t *values);

/* ---- words (frame.c) ---- */

/* Read in order: numbers, lists preceded by their length, texts padded to whole words. */
typedef struct {
    const int64_t *at;
} pd_words;

static inline int64_t pd_next(pd_words *w) { return *w->at++; }
const int64_t *pd_next_list(pd_words *w, int32_t *count);
const char *pd_next_text(pd_words *w);

/* ---- programs and contexts (parts.c, frame.c) ---- */

/* The head of the weights: file type, version of the C interface, total bytes, and the offset of the words. */
typedef struct {
    int64_t magic, abi, bytes, words;
} pd_head;
#define PD_MAGIC INT64_C(0x7374726170796470) /* "pdyparts" */

/* The source of an output. */
typedef struct {
    int32_t tensor, late; /* late: whether some of its dims are unknown before a run */
    const int64_t **dims; /* expressions */
} pd_given;

/* A program of several parts, which pd_program.place points to. */
typedef struct {
    pd_model *models;
    pd_io *inputs, *outputs;
    pd_given *given; /* of the outputs */
    const int64_t *dense; /* per input: whether a step reads it, so that it must be dense */
    int32_t model_count, input_count, output_count, own_parts, launch_count; /* own_parts: the first models; the rest are bodies */
    int64_t early; /* the number of symbols that are sizes of inputs; they come first */
    const int64_t *sequence; /* the words of a sequence */
    void *memory;
} pd_parts;

/* Allocates zeroed memory that is freed with the rest of `memory`. */
void *pd_zeros(void **memory, int64_t count, size_t size);
void pd_free_zeros(void *memory);
/* Creates a sequence with its own contexts of so many threads; PD_MEMORY, or the reason why there is no context. */
int32_t pd_sequence_new(const pd_parts *p, const char *weights, int32_t threads, pd_sequence **out);
void pd_sequence_free(pd_sequence *s);
/* Returns the total bytes of the rooms. */
int64_t pd_room_bytes(const pd_sequence *s);

/* ---- shared by the files of the library ---- */

__attribute__((format(printf, 3, 4))) int32_t pd_refuse(pd_sequence *s, int32_t code, const char *format, ...);
/* Enlarges a room to at least so many bytes; the first `kept` bytes are preserved. */
int32_t pd_reserve(pd_sequence *s, pd_room *room, int64_t bytes, int64_t kept);
/* As pd_reserve, for device memory if `device`; nothing is preserved. */
int32_t pd_reserve_on(pd_sequence *s, pd_room *room, int64_t bytes, int32_t device);
/* Makes `t` a dense tensor of its shape and allocates its memory. */
int32_t pd_place(pd_sequence *s, pd_held *t);
void pd_make_dense(pd_held *t);
int64_t pd_elements(const pd_held *t);
int64_t pd_bytes(const pd_held *t);
void pd_take_shape(pd_held *t, int32_t rank, const int64_t *shape);
void pd_copy_held(const pd_held *from, char *to);
/* Copies a tensor, also from the device, where tensors are dense. */
int32_t pd_fetch_held(pd_sequence *s, const pd_held *from, char *to);
void pd_free_rooms(const pd_sequence *s, pd_room *rooms, int64_t count);
void pd_free_loop(const pd_sequence *s, pd_loop *l);
/* Sets input i of a program. */
void pd_feed(pd_unit *u, int32_t i, const pd_held *t);
void pd_feed_size(pd_unit *u, int32_t i, int64_t size);
/* Computes the shapes of a unit; the program's error goes to `text`. */
int32_t pd_unit_shapes(pd_sequence *s, pd_unit *u);
int32_t pd_unit_run(pd_sequence *s, pd_unit *u);
/* Returns the dims of output o from the last pd_unit_shapes. */
const int64_t *pd_unit_dims(const pd_unit *u, int32_t o);

int32_t pd_unique(pd_sequence *s, const pd_stage *g);
int32_t pd_counting_step(pd_sequence *s, const pd_stage *g);
int32_t pd_size_step(pd_sequence *s, const pd_stage *g);
int32_t pd_branch(pd_sequence *s, const pd_stage *g);
int32_t pd_iterate(pd_sequence *s, const pd_stage *g);

#endif
