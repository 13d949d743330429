/* polydyn.h: the C interface of a compiled program (docs/adr/0001-abi.md).
 *
 * A program's library is self-contained: link or dlopen it, give it the weights, and call it.
 *
 *     pd_program *program; pd_context *context;
 *     if (pd_open("weights.bin", NULL, 0, size, &program)) puts(pd_error());
 *     pd_context_new(program, threads, &context);
 *     pd_shapes(context, inputs, NULL, output_dims); checks the call, sizes everything
 *     pd_run(context, input_data, output_data);      computes
 *
 * A program is immutable and may be used by many threads; a context serves one call at a time. Every function that
 * returns int32_t returns PD_OK or an error code; pd_error() then says what is wrong and what to do.
 *
 * Where data decide the size of an output, pd_shapes gives PD_LATE for it and pd_run takes NULL for the output, which lies
 * in the context's memory afterwards:
 *
 *     const float *found = pd_result(context, 0, dims);      its sizes and its elements, until the next call
 */
#ifndef POLYDYN_H
#define POLYDYN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PD_ABI_VERSION 6
#define PD_MAX_RANK 16
#define PD_MAX_THREADS 256
#define PD_SHAPES_SEEN 4096
#define PD_LATE (-1) /* in the dims that pd_shapes gives: a size that data decide */

enum { PD_OK = 0, PD_INPUT = 1, PD_OVERFLOW = 2, PD_MEMORY = 3, PD_WEIGHTS = 4, PD_USAGE = 5 };

/* Element types, in the order of DTYPES in schedules/expr.py. */
enum {
    PD_FLOAT16, PD_BFLOAT16, PD_FLOAT32, PD_FLOAT64, PD_INT8, PD_INT16, PD_INT32, PD_INT64,
    PD_UINT8, PD_UINT16, PD_UINT32, PD_UINT64, PD_BOOL,
    PD_FLOAT8_E4M3FN, PD_FLOAT8_E4M3FNUZ, PD_FLOAT8_E5M2, PD_FLOAT8_E5M2FNUZ, PD_FLOAT8_E8M0FNU, PD_FLOAT4_E2M1FN,
    PD_INT4, PD_UINT4, PD_INT2, PD_UINT2 /* these ten: one byte an element, its low bits */
};

typedef struct pd_program pd_program;
typedef struct pd_context pd_context;

/* The shape of a caller's array: `rank` sizes, strides in bytes (any sign; NULL: dense row-major), PD_<dtype>. */
typedef struct {
    const int64_t *shape;
    const int64_t *strides;
    int32_t dtype;
    int32_t rank;
} pd_tensor;

/* An input or output of the program, `shape` as text for people. The strides of its first `strided` axes are free: such
 * an array is used where it lies when they are positive multiples of the element and the axes behind are dense. */
typedef struct {
    const char *name;
    const char *shape;
    int32_t dtype;
    int32_t rank;
    int32_t strided;
} pd_io;

/* One launch as the last pd_shapes planned it. */
typedef struct {
    const char *label;
    const char *kernel;
    int64_t tasks, work, flops, bytes, threads;
} pd_launch_info;

int32_t pd_abi_version(void);

/* Opens the program. Weights come from `bytes` bytes at `offset` of the file `path` (mapped, never copied), or, when
 * path is NULL, from `memory` + offset, which must be 64-byte aligned and outlive the program. In an artifact the
 * weights are the first member of the zip, at offset 4096. Of a program of several parts pd_weight_bytes(NULL) is the size of
 * the head of its weights, which says how many bytes follow; its parts are libraries among them. */
int32_t pd_open(const char *path, const void *memory, int64_t offset, int64_t bytes, pd_program **program);

/* Stops the threads and unmaps the weights. Free all contexts first. */
void pd_close(pd_program *program);

/* From now on the program runs on the threads of `lender`, which is closed after it: programs that run in turn need no
 * threads of their own. Both are of the same ABI; nothing runs meanwhile. Not on a device. */
void pd_borrow_threads(pd_program *program, const pd_program *lender);

const pd_io *pd_inputs(const pd_program *program, int32_t *count);
const pd_io *pd_outputs(const pd_program *program, int32_t *count);
int64_t pd_weight_bytes(const pd_program *program);
int32_t pd_launch_count(const pd_program *program);

/* A context with `threads` threads, the caller's included (1 <= threads <= PD_MAX_THREADS). */
int32_t pd_context_new(pd_program *program, int32_t threads, pd_context **context);
void pd_context_free(pd_context *context);

/* Checks the inputs (in the program's order): dtype, rank, every dim, every guard. Then evaluates all sizes, grows
 * the arena, and writes the outputs' dims one after the other to `output_dims`. Cheap when shapes and strides are those
 * of the context's last call. `output_strides`: NULL when all outputs will be dense row-major; else for each output
 * NULL (dense) or its strides in bytes, free on its first `strided` axes. A size that data decide is PD_LATE. */
int32_t pd_shapes(pd_context *context, const pd_tensor *inputs, const int64_t *const *output_strides,
                  int64_t *output_dims);

/* Computes. Inputs and outputs have the shapes and strides given to pd_shapes, aligned to their elements. An output
 * overlaps no other array, with one exception: an output that begins with the elements of an input (a cache that grows)
 * may begin at that input's address with the same strides; then those elements are not copied. PD_INPUT:
 * an index tensor holds an index outside its axis; the outputs are then in part written. An output with a PD_LATE size is
 * NULL in `outputs`, see pd_result. */
int32_t pd_run(pd_context *context, const void *const *inputs, void *const *outputs);

/* After pd_run: the dims of an output, and where its elements lie, dense: in the context's memory, until its next call.
 * NULL: they are where the caller wanted them, or there are none. */
const void *pd_result(const pd_context *context, int32_t output, int64_t *dims);

/* pd_run, and the time of every launch in nanoseconds (of every step of the host too, where there are some). Launches that pd_run starts together run one by one here. */
int32_t pd_profile(pd_context *context, const void *const *inputs, void *const *outputs, int64_t *nanoseconds);

/* Thread `thread` (0: the caller) at work on `count` tasks of a launch, from task `first`; nanoseconds of CLOCK_MONOTONIC. */
typedef struct {
    int32_t launch, thread;
    int64_t first, count, begin, end;
} pd_span;

/* pd_run, and when each thread worked on what: at most `room` spans, in no particular order; *count: how many there were.
 * Not on a device, nor of several parts. */
int32_t pd_trace(pd_context *context, const void *const *inputs, void *const *outputs, pd_span *spans, int64_t room,
                 int64_t *count);

int32_t pd_launch(const pd_context *context, int32_t launch, pd_launch_info *info);

/* Bytes of the context's arena: intermediates, scratch, copies of strided inputs. Never shrinks. */
int64_t pd_arena_bytes(const pd_context *context);

/* Bytes that the context's calls have moved without computing: copies of parts into concatenations (not those skipped
 * because the part was there already), of strided inputs into the arena, and of inputs and constants to outputs. */
int64_t pd_copied_bytes(const pd_context *context);

/* How often the context evaluated its sizes (calls with new shapes or strides). */
int64_t pd_evaluations(const pd_context *context);

/* The name of symbol k: a size that is not known before a call; NULL when there are fewer. Of a program of several parts, as
 * pd_shapes_seen: what its first part has. */
const char *pd_symbol(const pd_program *program, int32_t k);

/* The sizes that calls of pd_run had, of all contexts (pd_profile is not counted). Writes at most `room` rows, each the
 * size of every symbol in order and then the number of runs, in no particular order; returns how many rows there are.
 * The first PD_SHAPES_SEEN different shapes have a row; runs with later ones are in `others`. Any thread may ask. */
int64_t pd_shapes_seen(const pd_program *program, int64_t *rows, int64_t room, int64_t *others);

/* What the last failing call on this thread has to say. */
const char *pd_error(void);

#ifdef __cplusplus
}
#endif
#endif
