/* internal.h: shared by runtime.c, pool.c and the generated host program. Not part of the C interface. */
#ifndef POLYDYN_INTERNAL_H
#define POLYDYN_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "polydyn.h"

/* opening.c, strided.c: for all programs. runtime.c, indices.c, seen.c: for programs of one part, with cpu.c and pool.c
 * on the CPU and cuda.c on a CUDA device. sequence.h: for programs of several parts. */

#define PD_EXPORT __attribute__((visibility("default")))

typedef void pd_kernel(void *const *buffers, const int64_t *symbols, int64_t begin, int64_t end, void *scratch);

/* ---- the thread pool (pool.c) ---- */

typedef struct pd_pool pd_pool;

/* The number of the calling thread in its pool; 0 for callers, which belong to no pool. */
extern _Thread_local int32_t pd_thread __attribute__((visibility("hidden")));

/* One launch of a job. Thread t of n runs tasks [starts[t], starts[t+1]), or [T*t/n, T*(t+1)/n) if starts is NULL, in
 * `pieces` nearly equal pieces, which other threads may steal. */
typedef struct {
    pd_kernel *kernel;
    void *const *buffers;
    const int64_t *symbols;
    int64_t tasks, pieces;
    const int64_t *starts;
} pd_part;

/* One parallel region: the launches of a wave, which are independent of each other. `ahead_ns`: the estimated time of
 * one thread for it and everything after it in the run. */
typedef struct {
    const pd_part *parts;
    int64_t count;
    int64_t threads;
    int64_t ahead_ns;
    char *scratch;
    int64_t scratch_stride;
} pd_job;

pd_pool *pd_pool_new(void);
void pd_pool_free(pd_pool *pool);
/* Acquires the pool for one run of `threads` threads. `work_ns`: the estimated time of one thread. Returns 0 if another
 * run has the pool or the caller may use only one core; the caller must then run alone. */
int pd_pool_acquire(pd_pool *pool, int64_t threads, int64_t work_ns);
void pd_pool_release(pd_pool *pool);
/* Runs the job. The pool must be acquired if job->threads > 1. The caller is thread 0. */
void pd_pool_run(pd_pool *pool, const pd_job *job);

/* Operations per additional thread of a launch; with fewer, a join costs more than it saves. */
#define PD_WORK_PER_THREAD 32768
/* A thread's tasks are divided into at most PD_PIECES pieces of at least PD_PIECE_NS: claiming one costs 5 to 50 ns. */
#define PD_PIECES 8
#define PD_PIECE_NS 5000
/* The throughput of a core. Approximate values, only used to choose piece lengths and when waking a thread pays off. */
#define PD_FLOPS_PER_NS 64
#define PD_BYTES_PER_NS 16
/* The most bytes that an operation accesses: an int64, read and written. A launch may name a table and read only little
 * of it. */
#define PD_BYTES_PER_FLOP 16

/* ---- subscripts (indices.c) ---- */

/* Returns the first position among data[first], data[first + step], ... below `count` whose integer is outside [low,
 * high), and stores the integer in `found`. Returns -1 if there is none. */
int64_t pd_outside(const void *data, int64_t first, int64_t count, int64_t step, int32_t dtype, int64_t low, int64_t high,
                   int64_t *found);

/* ---- the program as data (generated) ---- */

/* All sizes are in one array of values `v`: the symbols, then PD_SPECIALS, then the free strides of inputs and outputs
 * in elements (pd_io.strided for each), then everything computed from them. Every `value` below is an index into it. */

/* The special values after the symbols: `nth`; for a device, the shared memory that a block may use in bytes, the
 * compute capability whose specific instructions may be used (0: none), and a bit mask of features that kernels must
 * not use. */
enum { PD_NTH, PD_SHARED, PD_ARCH, PD_LACKING, PD_SPECIALS };

typedef struct {
    int32_t input, axis; /* v[i] is the size of this input along this axis */
    const char *symbol;
} pd_source;

typedef struct {
    int32_t input, axis, value;
    const char *text, *message;
} pd_dim_check; /* the input's dim must be v[value] for the reason in message */

typedef struct {
    int32_t left, right, relation; /* '=', '<' (less or equal), '%' (multiple of) */
    const char *text, *message;
} pd_guard;

typedef struct {
    int32_t value;
    const char *text;
} pd_sign_check; /* v[value] is a dim, so it must not be negative */

enum { PD_INPUT_ROLE, PD_OUTPUT_ROLE, PD_CONSTANT_ROLE, PD_INTERMEDIATE_ROLE };

typedef struct {
    int32_t role;
    int32_t index;  /* number of the input, output or slot */
    int64_t offset; /* of a constant in the weights */
} pd_buffer;

typedef struct {
    int32_t first, count; /* sizes of the tenants in slot_values */
} pd_slot;

typedef struct {
    int32_t output, buffer, bytes; /* an output that is an input or a constant, and is copied */
} pd_copy;

typedef struct {
    int32_t launch, buffer, dtype; /* the buffer is checked before this launch; launch_count: after all launches */
    int32_t count, size, offset;   /* of v[count] integers, each one selected plus v[offset] in [-v[size], v[size]) */
    int32_t first, step;           /* the selected integers */
    const char *message;
} pd_index_check;

/* Launch `launch` of a device program only checks indices. For each PD_SPAN of them it writes one word that describes
 * the first one out of range (cuda_indices.c). */
typedef struct {
    int32_t launch, buffer, words; /* it writes v[words] words to the buffer */
    int32_t reader;                /* the first launch that reads the indices; -1: unknown */
    int32_t input;                 /* the input that is checked on the host instead if it is in host memory; -1: none */
    int32_t size;                  /* value: the size of the axis */
    int32_t first, step;           /* the selected integers */
    const char *message;
} pd_device_check;

typedef struct {
    pd_kernel *kernel; /* NULL: it runs on a device */
    const char *name;
    int32_t begins; /* on a device: whether its threads call pd_grid_begin before they access memory */
} pd_named_kernel;

/* A step of the program, which launches one of its candidates. */
typedef struct {
    const char *label;
    int32_t elements, work, flops, bytes, copied; /* values; without elements there is nothing to do */
    int32_t skip_input, skip_output;              /* skipped if these are at the same address; -1: never */
    int32_t candidates, first_candidate;          /* indices into candidates, including those that follow a candidate */
    int32_t choice;            /* v[choice] is the candidate, -1: none can run; choice -1: the first one */
    int (*choose)(int64_t *v); /* evaluates choice and candidate; 1: int64 overflow. NULL: pd_plan.plan does */
    /* on a device: indices into pd_plan.touches; -1: it may access everything */
    int32_t touches, first_touch;
} pd_launch_entry;

/* A kernel with its arguments. On a device, tasks are blocks and scratch is shared memory of a block. */
typedef struct {
    int32_t kernel;
    int32_t buffers, first_buffer; /* into launch_buffers; -1 there: the workspace, -2: its counters */
    int32_t symbols, first_symbol; /* into launch_symbols */
    int32_t tasks, scratch;        /* values */
    /* on a device: */
    int32_t threads, workspace; /* per block; value: bytes */
    int32_t maps, first_map;    /* into maps; these parameters precede the buffers */
    int32_t after;              /* this many of the next candidates are launched after it */
} pd_candidate;

/* A tensor map over a buffer: a view that begins v[offset] bytes into it. */
typedef struct {
    int32_t buffer, type, rank, offset; /* type: a CUtensorMapDataType */
    int32_t first_size; /* into map_sizes: dims (innermost first), outer strides in bytes, corners */
    uint32_t box[5];    /* in im2col mode: channels and pixels */
    uint32_t steps[3];  /* in im2col mode: along w, h and d; else 0 */
} pd_tensor_map;

typedef struct {
    int32_t first, count; /* launches that run in parallel */
} pd_wave;

typedef struct {
    int32_t input_count, output_count, symbol_count, value_count, dim_check_count, guard_count, sign_check_count;
    int32_t buffer_count, slot_count, copy_count, launch_count, launch_buffer_count, launch_symbol_count;
    int32_t input_dim_count, output_dim_count, index_check_count, wave_count;
    int32_t kernel_count, candidate_count, map_count, device_check_count;
    int32_t amx; /* whether a kernel uses AMX tiles, which require a permission of the process */
    int64_t weight_bytes;
    const pd_io *inputs, *outputs;
    const pd_source *sources;
    const pd_dim_check *dim_checks;
    const pd_guard *guards;
    const pd_sign_check *sign_checks;
    const pd_buffer *buffers;
    const pd_slot *slots;
    const int32_t *slot_values;
    const pd_copy *copies;
    const pd_launch_entry *launches;
    const pd_named_kernel *kernels; /* each only once */
    const pd_wave *waves;               /* of all launches, in order */
    const pd_index_check *index_checks; /* ordered by launch */
    const int32_t *launch_buffers, *launch_symbols, *output_dims;
    const pd_candidate *candidates;
    const int32_t *touches; /* per launch, on a device: 2 * buffer + whether it is written; without constants */
    const pd_tensor_map *maps;
    const int32_t *map_sizes;
    const pd_device_check *device_checks; /* ordered by launch */
    int (*check)(int64_t *v); /* evaluates what dim checks, guards and output dims need; 1: int64 overflow */
    int (*plan)(int64_t *v);  /* evaluates everything else */
} pd_plan;

extern const pd_plan pd_the_plan __attribute__((visibility("hidden")));

/* ---- waves (waves.c) ---- */

/* Returns the number of threads that a wave uses at values v, at most `threads`. For several launches, also sets
 * `starts` (threads + 1 per launch of the plan) to the first task of each thread. `tasks`, `launch_threads`: per
 * launch, its tasks and the threads it would use alone. */
int64_t pd_plan_wave(const pd_wave *wave, const int64_t *v, int64_t threads, const int64_t *tasks,
                     const int64_t *launch_threads, int64_t *starts);

/* ---- the log of sizes (seen.c), for concurrent use by any number of threads ---- */

typedef struct pd_log pd_log;

pd_log *pd_log_new(void);
void pd_log_free(pd_log *log);
/* Returns the counter for runs with these sizes of the symbols; if the log is full, the counter of all others. */
int64_t *pd_log_runs(pd_log *log, const int64_t *sizes);

/* ---- shared by programs of any number of parts (opening.c) ---- */

__attribute__((format(printf, 2, 3))) int32_t pd_fail(int32_t code, const char *format, ...);
/* Finds the weights: maps a file, or uses memory. */
int32_t pd_find_weights(pd_program *p, const char *path, const void *memory, int64_t offset, int64_t bytes);
void pd_unmap_weights(pd_program *p);

#define PD_SEAL 64 /* bytes of the seal at the end of the weights */
/* Rejects weights of `bytes` bytes whose seal is missing or of another program. `path`: for the message; NULL: memory. */
int32_t pd_check_seal(const pd_program *p, const char *path, int64_t bytes);
/* Rejects a wrong type or rank, and negative sizes. */
int32_t pd_check_tensor(const pd_io *io, const pd_tensor *t);

/* ---- programs and contexts (runtime.c; parts.c for several parts) ---- */

struct pd_program {
    const char *weights;   /* in host memory */
    const char *constants; /* as kernels read them */
    void *map;
    size_t map_bytes;
    pd_log *log;
    void *place; /* data of cpu.c (the pool), cuda.c (the device) or parts.c (the parts) */
    int borrowed; /* whether the pool belongs to another program */
};

struct pd_context {
    pd_program *program;
    int64_t threads;
    int ready;               /* whether the sizes are those of `dims` */
    int64_t *dims;           /* of all inputs, concatenated */
    int64_t *strides;        /* of all inputs, in bytes, concatenated */
    int64_t *output_strides; /* of all outputs, in bytes, concatenated */
    int32_t *given;          /* per output: whether the caller specified its strides; otherwise it is dense */
    int32_t *places;         /* per input, then per output: 0 if kernels can use the caller's array in place */
    int64_t *staged;         /* per input, then per output: offset of its dense copy in the arena; -1: used in place */
    int64_t *values;
    int64_t *remembered; /* PD_REMEMBERED evaluations for dense calls, see runtime.c */
    int64_t remembered_count;
    void **buffers; /* per buffer */
    int64_t scratch_offset, scratch_stride, staging_offset, planned_bytes;
    int64_t evaluations, copied_bytes;
    int64_t *runs; /* the counter for runs with these sizes */
    char *arena;
    int64_t arena_bytes;
    void *place; /* data of cpu.c or cuda.c; parts.c: the sequence */
};

/* Returns the bytes of output o if it is dense. */
int64_t pd_output_bytes(const pd_context *c, int32_t o);
/* Rejects an output that begins at the address of its input but has other strides. */
int32_t pd_check_shared(const pd_context *c, void *const *inputs, void *const *outputs);
/* Whether a launch only copies an input to where it already is. */
static inline int pd_skipped(const pd_launch_entry *l, void *const *inputs, void *const *outputs) {
    return l->skip_input >= 0 && inputs[l->skip_input] == outputs[l->skip_output];
}
/* Returns the candidate chosen for launch k and the context's sizes; NULL: there is nothing to do, or none can run. */
const pd_candidate *pd_chosen(const pd_context *c, int32_t k);
/* PD_INPUT if integers at `data` are outside the axis of an index check. */
int32_t pd_check_index(const pd_context *c, const pd_index_check *check, const void *data);

/* Counts one more run with the context's sizes. */
static inline void pd_count_run(const pd_context *c) { __atomic_fetch_add(c->runs, 1, __ATOMIC_RELAXED); }

/* ---- where a program runs: cpu.c or cuda.c ---- */

extern const int64_t pd_arena_align; /* bytes: alignment of everything in the arena; the arena itself is page-aligned */
#define PD_PAGE 4096
int32_t pd_place_program(pd_program *p);
void pd_displace_program(pd_program *p);
int32_t pd_place_context(pd_context *c);
void pd_displace_context(pd_context *c); /* frees the arena too */
/* Called after every evaluation of new sizes: returns the bytes of scratch per thread in the arena. */
int64_t pd_place_scratch(pd_context *c);
/* Called next: grows the arena to planned_bytes; resets the choices of launches. */
int32_t pd_place_sizes(pd_context *c);
/* Fills in the kernel, tasks and threads of a launch. */
void pd_place_info(const pd_context *c, int32_t k, pd_launch_info *info);

/* ---- arrays with strides in bytes (strided.c) ---- */

extern const int64_t pd_item_bytes[]; /* by PD_<dtype> */
/* Computes the strides of a dense row-major array; returns 1 if its size overflows. */
int pd_dense_strides(int32_t rank, const int64_t *dims, int64_t item, int64_t *strides);
/* Whether kernels can use an array in place: it is empty, or its strides are positive multiples of the element on the
 * first io->strided axes and dense on the rest. */
int pd_usable(const pd_io *io, const int64_t *dims, const int64_t *strides, const int64_t *dense);
/* Returns the size of a dense array in bytes. It must not overflow. */
int64_t pd_dense_bytes(const pd_io *io, const int64_t *dims);
/* Returns the first axis of more than one element along which strides a and b differ, or -1. */
int32_t pd_differing_axis(int32_t rank, const int64_t *dims, const int64_t *a, const int64_t *b);
/* Returns the position of the first axis of input or output i among the axes of all. */
int32_t pd_first_axis(const pd_io *ios, int32_t i);
/* Copies a non-empty strided array of rank >= 1 to a dense row-major one. */
void pd_copy_strided(char *to, const char *from, int32_t rank, const int64_t *dims, const int64_t *strides,
                     int64_t item);

/* ---- arithmetic of the generated evaluation; `o` accumulates overflow ---- */

#define PD_ADD(a, b, r) (o |= __builtin_add_overflow((a), (b), (r)))
#define PD_MUL(a, b, r) (o |= __builtin_mul_overflow((a), (b), (r)))

/* Floor division; x / 0 is 0, because an empty tensor has no elements to address. */
static inline int64_t pd_floordiv(int64_t a, int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return a == INT64_MIN ? INT64_MAX : -a;
    int64_t q = a / b;
    return q - (q * b != a && (a < 0) != (b < 0));
}

static inline int64_t pd_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pd_max(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
