/* polydyn.h: the C interface of a compiled program (docs/adr/0001-abi.md).
 *
 * The library of a program is self-contained: link it or dlopen it, give it the weights, and call it.
 *
 *     pd_program *program; pd_context *context;
 *     if (pd_open("weights.bin", NULL, 0, size, &program)) puts(pd_error());
 *     pd_context_new(program, threads, &context);
 *     pd_shapes(context, inputs, NULL, output_dims); checks the call and computes all sizes
 *     pd_run(context, input_data, output_data);      computes
 *
 * A program is immutable and may be used by many threads. A context serves one call at a time. Every function that
 * returns int32_t returns PD_OK or an error code; pd_error() then returns a message that says what is wrong and what to
 * do.
 *
 * If the size of an output depends on the data, pd_shapes returns PD_LATE for it and pd_run takes NULL for the output.
 * The context then allocates it:
 *
 *     const float *found = pd_result(context, 0, dims);      its sizes and elements, valid until the next call
 */
#ifndef POLYDYN_H
#define POLYDYN_H

#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#define PD_ABI_VERSION 7
#define PD_MAX_RANK 16
#define PD_MAX_THREADS 256
#define PD_SHAPES_SEEN 4096
#define PD_LATE (-1) /* in the dims that pd_shapes returns: a size that depends on the data */

enum { PD_OK = 0, PD_INPUT = 1, PD_OVERFLOW = 2, PD_MEMORY = 3, PD_WEIGHTS = 4, PD_USAGE = 5 };

/* Element types, in the order of DTYPES in schedules/expr.py. */
enum {
    PD_FLOAT16, PD_BFLOAT16, PD_FLOAT32, PD_FLOAT64, PD_INT8, PD_INT16, PD_INT32, PD_INT64,
    PD_UINT8, PD_UINT16, PD_UINT32, PD_UINT64, PD_BOOL,
    PD_FLOAT8_E4M3FN, PD_FLOAT8_E4M3FNUZ, PD_FLOAT8_E5M2, PD_FLOAT8_E5M2FNUZ, PD_FLOAT8_E8M0FNU, PD_FLOAT4_E2M1FN,
    PD_INT4, PD_UINT4, PD_INT2, PD_UINT2 /* these ten: one byte per element, in its low bits */
};

typedef struct pd_program pd_program;
typedef struct pd_context pd_context;

/* A caller's array: `rank` sizes; strides in bytes (any sign; NULL: dense row-major); PD_<dtype>. */
typedef struct {
    const int64_t *shape;
    const int64_t *strides;
    int32_t dtype;
    int32_t rank;
} pd_tensor;

/* An input or output of the program. `shape`: readable text. The strides of its first `strided` axes are free: such an
 * array is used in place if they are positive multiples of the element size and the remaining axes are dense. */
typedef struct {
    const char *name;
    const char *shape;
    int32_t dtype;
    int32_t rank;
    int32_t strided;
} pd_io;

/* One launch, as planned by the last pd_shapes. */
typedef struct {
    const char *label;
    const char *kernel;
    int64_t tasks, work, flops, bytes, threads;
} pd_launch_info;

int32_t pd_abi_version(void);

/* Opens the program. The weights are the `bytes` bytes at `offset` of the file `path` (mapped, never copied), or, if
 * path is NULL, at `memory` + offset, which must be 64-byte aligned and outlive the program. In an artifact, the
 * weights are the first member of the zip, at offset 4096. For a program of several parts, pd_weight_bytes(NULL) is the
 * size of the head of its weights, which contains the total size; the libraries of the parts are in the weights.
 * PD_WEIGHTS: the weights are of another program than this library, or cut off. Their digest of 16 bytes is compared,
 * but not computed: see pd_verify_weights. */
int32_t pd_open(const char *path, const void *memory, int64_t offset, int64_t bytes, pd_program **program);

/* Reads all weights and compares their digest, about 4 s per GB. PD_WEIGHTS: they are damaged. */
int32_t pd_verify_weights(const pd_program *program);

/* Stops the threads and unmaps the weights. Free all contexts first. */
void pd_close(pd_program *program);

/* Makes the program run on the threads of `lender`, which must be closed after it: programs that run in turn need no
 * threads of their own. Both must have the same ABI, and neither may be running. Not on a device. */
void pd_borrow_threads(pd_program *program, const pd_program *lender);

const pd_io *pd_inputs(const pd_program *program, int32_t *count);
const pd_io *pd_outputs(const pd_program *program, int32_t *count);
int64_t pd_weight_bytes(const pd_program *program);
int32_t pd_launch_count(const pd_program *program);

/* Creates a context with `threads` threads, including the caller's (1 <= threads <= PD_MAX_THREADS). */
int32_t pd_context_new(pd_program *program, int32_t threads, pd_context **context);
void pd_context_free(pd_context *context);

/* Checks the inputs (in the program's order): dtype, rank, every dim, every guard. Then computes all sizes, grows the
 * arena, and writes the dims of all outputs, concatenated, to `output_dims`. Cheap if shapes and strides are those of
 * the context's last call. `output_strides`: NULL if all outputs will be dense row-major; else for each output NULL
 * (dense) or its strides in bytes, free on its first `strided` axes. A size that depends on the data is PD_LATE. */
int32_t pd_shapes(pd_context *context, const pd_tensor *inputs, const int64_t *const *output_strides,
                  int64_t *output_dims);

/* Computes the outputs. Inputs and outputs must have the shapes and strides passed to pd_shapes and be aligned to their
 * elements. An output must not overlap any other array, with one exception: an output that begins with the elements of
 * an input (a growing cache) may have that input's address and strides; those elements are then not copied. PD_INPUT:
 * an index tensor contains an index out of range; the outputs are then partly written. For an output with a PD_LATE
 * size, pass NULL in `outputs` and see pd_result. */
int32_t pd_run(pd_context *context, const void *const *inputs, void *const *outputs);

/* After pd_run: returns the dims of an output and its dense elements, in the context's memory until its next call.
 * NULL: they are in the caller's array, or there are none. */
const void *pd_result(const pd_context *context, int32_t output, int64_t *dims);

/* As pd_run; also measures the time of every launch (and of every host step, if there are any) in nanoseconds. Launches
 * that pd_run runs in parallel run one by one here. */
int32_t pd_profile(pd_context *context, const void *const *inputs, void *const *outputs, int64_t *nanoseconds);

/* Thread `thread` (0: the caller) works on `count` tasks of a launch, from task `first`; times in nanoseconds of
 * CLOCK_MONOTONIC. */
typedef struct {
    int32_t launch, thread;
    int64_t first, count, begin, end;
} pd_span;

/* As pd_run; also records when each thread worked on what: at most `room` spans, in no particular order. *count: the
 * total number. Not on a device, nor for several parts. */
int32_t pd_trace(pd_context *context, const void *const *inputs, void *const *outputs, pd_span *spans, int64_t room,
                 int64_t *count);

int32_t pd_launch(const pd_context *context, int32_t launch, pd_launch_info *info);

/* Returns the bytes of the context's arena: intermediates, scratch, copies of strided inputs. Never shrinks. */
int64_t pd_arena_bytes(const pd_context *context);

/* Returns the bytes that the context's calls have moved without computing: copies of parts into concatenations (except
 * those skipped because the part was already there), of strided inputs into the arena, and of inputs and constants to
 * outputs. */
int64_t pd_copied_bytes(const pd_context *context);

/* Returns how often the context computed its sizes (calls with new shapes or strides). */
int64_t pd_evaluations(const pd_context *context);

/* Returns the name of symbol k, that is, of a size that is unknown before a call; NULL if there are fewer. For a
 * program of several parts, this and pd_shapes_seen refer to its first part. */
const char *pd_symbol(const pd_program *program, int32_t k);

/* Returns the sizes of all pd_run calls in all contexts (pd_profile is not counted). Writes at most `room` rows, in no
 * particular order, each with the size of every symbol in order and the number of runs; returns how many rows there
 * are. Only the first PD_SHAPES_SEEN different shapes have a row; runs with other shapes are counted in `others`. May
 * be called from any thread. */
int64_t pd_shapes_seen(const pd_program *program, int64_t *rows, int64_t room, int64_t *others);

/* Returns the message of the last failed call on this thread. */
const char *pd_error(void);

#ifdef __cplusplus
}
#endif
#endif
