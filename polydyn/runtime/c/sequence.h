/* sequence.h: a program of several parts as one run in C (docs/adr/0027-parts.md). polydyn/runtime/sequence.py fills these
 * tables in and has the memory of all that they point to; what lies in rooms is C's. */
#ifndef POLYDYN_SEQUENCE_H
#define POLYDYN_SEQUENCE_H

#include "internal.h"

/* Memory that grows to the largest tensor in it; tensors that are never there at the same time share one. */
typedef struct {
    char *data;
    int64_t bytes;
} pd_room;

/* A tensor of a call. */
typedef struct {
    char *data;
    int64_t shape[PD_MAX_RANK], strides[PD_MAX_RANK]; /* strides in bytes */
    int64_t given; /* bytes at `data` that are the caller's, -1: none yet; only without a room */
    int32_t dtype, rank, room; /* room: -1: a result's, or Python's, memory */
} pd_held;

/* The program of a part or a body, with a context that nobody else uses, and room for the arguments of a call. */
typedef struct {
    pd_context *context;
    int32_t (*shapes)(pd_context *, const pd_tensor *, const int64_t *const *, int64_t *);
    int32_t (*run)(pd_context *, const void *const *, void *const *);
    int32_t (*profile)(pd_context *, const void *const *, void *const *, int64_t *);
    const char *(*error)(void);
    pd_tensor *tensors;
    int64_t *output_dims, *sizes; /* sizes: of inputs that only bring one */
    const void **from;
    void **to;
    int32_t *ranks; /* of the outputs */
    int32_t input_count, output_count, launch_count;
} pd_unit;

/* A model that a step runs: a program, or several parts, `inner`. Pairs: an input of it, and an input (a dim) of the step.
 * `results`: an output, or -1 - an input. Inputs and results of several parts are its tensors. `direct`: per result 1 where the
 * program writes it to its place; else it is copied there. `entered`: `inner` has stopped for signals. */
typedef struct {
    pd_unit unit;
    struct pd_sequence *inner;
    int32_t entered, formal_count, captured_count, size_count, result_count;
    const int32_t *formals, *captured, *sizes, *results, *direct;
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
    const int64_t *tail;
    int32_t tail_rank, axis, backwards, direct;
} pd_rows;

enum { PD_BEGINS, PD_RUNS, PD_HAS_ENDED };

typedef struct {
    pd_body body;
    pd_carried *carried;
    pd_rows *rows;
    pd_held *slices;
    const int32_t *slice_forms; /* pairs: axis, backwards */
    int64_t *slice_steps;
    int32_t carried_count, row_count, slice_count, counts;
    int32_t phase, going, plain, steady; /* plain: no result is copied; steady: shapes are those of the iteration before */
    int64_t number, k, trips;
    uint8_t condition;
} pd_loop;

enum {
    PD_PART, PD_PYTHON, PD_BRANCH, PD_ITERATE, PD_NON_ZERO, PD_SUPPRESS,
    PD_SIZES, PD_COMMON, PD_COUNT, PD_RESHAPE, PD_BROADCAST, PD_SLICE, PD_UNSQUEEZE, PD_SQUEEZE, PD_PADS
};

/* A part: `inputs`, then the sizes `dims`, to `outputs`. A step: also to `symbols`, places of values. */
typedef struct {
    const int32_t *inputs, *outputs, *symbols; /* -1: an input that a step does not have */
    const int64_t *const *dims;                /* expressions, see pd_value_of */
    pd_unit *unit;
    pd_body *bodies;
    pd_loop *loop;
    pd_room *scratch;
    const char *origin; /* its node, NULL: a part */
    const char *name; /* of the tensor whose elements are sizes, or why two sizes are equal */
    int32_t kind, input_count, output_count, dim_count;
    int32_t setting; /* boxes are given by their centre; a 0 in a shape is a size */
} pd_stage;

enum { PD_STOP_PYTHON = -1, PD_STOP_MEMORY = -2, PD_STOP_SIGNALS = -3 };

/* The size of a tensor along an axis is that of symbol `value`, or must be `dim`, which is `text` of input `name`. */
typedef struct {
    int32_t tensor, axis, value;
    const int64_t *dim;
    const char *name, *text;
} pd_size;

typedef struct pd_sequence {
    pd_held *tensors;
    pd_room *rooms;
    int64_t *values; /* of symbols */
    const pd_size *sources, *checks;
    const pd_stage *stages;
    int64_t *times; /* nanoseconds of every launch and every step in order; NULL: nobody asks */
    int32_t source_count, check_count;
    int32_t count, at, begun, lacks; /* the stage that is next, or failed; the last one begun; the tensor without memory */
    char text[1024];
} pd_sequence;

/* Runs the stages from `at` on; from 0 on with `begun` -1 it first takes the sizes of the inputs, and checks them. PD_OK: all have run; an error code, with `text`; PD_STOP_PYTHON: `at` is not for C;
 * PD_STOP_MEMORY: `lacks` needs memory of its shape; PD_STOP_SIGNALS: a long loop, look at signals. Then it goes on when it
 * is called again. */
int32_t pd_sequence_run(pd_sequence *s);

/* The value of an expression: words in postfix order, up to PD_END; / is floor division, by 0 it gives 0. */
enum { PD_END, PD_NUMBER, PD_SYMBOL, PD_PLUS, PD_TIMES, PD_OVER, PD_LEAST, PD_MOST };
#define PD_EXPRESSION_DEPTH 32
int64_t pd_value_of(const int64_t *words, const int64_t *values);

/* ---- what the files of the library share ---- */

__attribute__((format(printf, 3, 4))) int32_t pd_refuse(pd_sequence *s, int32_t code, const char *format, ...);
/* At least so many bytes; `kept` of them stay. */
int32_t pd_reserve(pd_sequence *s, pd_room *room, int64_t bytes, int64_t kept);
/* Makes `t` a dense tensor of its shape, and gives it memory. */
int32_t pd_place(pd_sequence *s, pd_held *t);
void pd_make_dense(pd_held *t);
int64_t pd_elements(const pd_held *t);
int64_t pd_bytes(const pd_held *t);
void pd_take_shape(pd_held *t, int32_t rank, const int64_t *shape);
void pd_copy_held(const pd_held *from, char *to);
void pd_free_rooms(pd_room *rooms, int64_t count);
/* Input i of a program. */
void pd_feed(pd_unit *u, int32_t i, const pd_held *t);
void pd_feed_size(pd_unit *u, int32_t i, int64_t size);
/* Its shapes; the program's error goes to `text`. */
int32_t pd_unit_shapes(pd_sequence *s, pd_unit *u);
int32_t pd_unit_run(pd_sequence *s, pd_unit *u);
/* The dims of output o, as pd_unit_shapes has left them. */
const int64_t *pd_unit_dims(const pd_unit *u, int32_t o);

int32_t pd_counting_step(pd_sequence *s, const pd_stage *g);
int32_t pd_size_step(pd_sequence *s, const pd_stage *g);
int32_t pd_branch(pd_sequence *s, const pd_stage *g);
int32_t pd_iterate(pd_sequence *s, const pd_stage *g);

#endif
