/* internal.h: what runtime.c, pool.c and the generated host program share. Not part of the C interface. */
#ifndef POLYDYN_INTERNAL_H
#define POLYDYN_INTERNAL_H

#include <stddef.h>
#include <stdint.h>

#include "polydyn.h"

/* opening.c, strided.c: any program. runtime.c, indices.c, seen.c: one of one part; cpu.c and pool.c: on the CPU, cuda.c: on a
 * CUDA device. sequence.h has what runs several parts. */

#define PD_EXPORT __attribute__((visibility("default")))

typedef void pd_kernel(void *const *buffers, const int64_t *symbols, int64_t begin, int64_t end, void *scratch);

/* ---- the thread pool (pool.c) ---- */

typedef struct pd_pool pd_pool;

/* Of the calling thread: its number in its pool; 0: it is none of a pool's, as every caller. */
extern _Thread_local int32_t pd_thread __attribute__((visibility("hidden")));

/* One launch of a job: thread t of n has tasks [starts[t], starts[t+1]), without starts [T*t/n, T*(t+1)/n), in `pieces`
 * nearly equal parts, which other threads may take from it. */
typedef struct {
    pd_kernel *kernel;
    void *const *buffers;
    const int64_t *symbols;
    int64_t tasks, pieces;
    const int64_t *starts;
} pd_part;

/* One parallel region: the launches of a wave, which know nothing of each other. `ahead_ns`: a guess of how long one
 * thread would take for it and for what follows in the run. */
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
/* Takes the pool for one run of `threads` threads; `work_ns`: a guess of how long one thread would take. 0 when another
 * run has it, or when the caller may use one core only: then run alone. */
int pd_pool_acquire(pd_pool *pool, int64_t threads, int64_t work_ns);
void pd_pool_release(pd_pool *pool);
/* Runs the job; the pool must be acquired when job->threads > 1. The caller is thread 0. */
void pd_pool_run(pd_pool *pool, const pd_job *job);

/* A launch gets another thread for every so many operations: below that a join costs more than it saves. */
#define PD_WORK_PER_THREAD 32768
/* A thread's tasks come in at most so many pieces, none below so many nanoseconds: a claim costs 5 to 50. */
#define PD_PIECES 8
#define PD_PIECE_NS 5000
/* What a core does in a nanosecond: round numbers, which only say how long a piece is and when it pays to wake. */
#define PD_FLOPS_PER_NS 64
#define PD_BYTES_PER_NS 16
/* And what an operation touches at most: an int64, read and written. A launch may name a table of which it reads little. */
#define PD_BYTES_PER_FLOP 16

/* ---- subscripts (indices.c) ---- */

/* The position of the first of the integers data[first], data[first + step], ... below `count` that lies outside
 * [low, high); it goes to `found`. -1 when there is none. */
int64_t pd_outside(const void *data, int64_t first, int64_t count, int64_t step, int32_t dtype, int64_t low, int64_t high,
                   int64_t *found);

/* ---- the program as data (generated) ---- */

/* All sizes live in one array of values `v`: the symbols, then PD_SPECIALS, then the free strides of inputs and outputs in
 * elements (pd_io.strided of each), then everything that is computed from them. Behind `nth`: what a device allows.
 * Every `value` below is a position in it. */

/* Behind the symbols: `nth`; of a device the shared memory that a block may have, in bytes, and the compute capability whose
 * own instructions may be used, 0: none's, and the features that kernels do without, a bit for each. */
enum { PD_NTH, PD_SHARED, PD_ARCH, PD_LACKING, PD_SPECIALS };

typedef struct {
    int32_t input, axis; /* v[i] is the size of this input along this axis */
    const char *symbol;
} pd_source;

typedef struct {
    int32_t input, axis, value;
    const char *text, *message;
} pd_dim_check; /* the input's dim must be v[value], because of message */

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
    int32_t index;  /* input or output number, or slot */
    int64_t offset; /* of a constant in the weights */
} pd_buffer;

typedef struct {
    int32_t first, count; /* sizes of the tenants in slot_values */
} pd_slot;

typedef struct {
    int32_t output, buffer, bytes; /* an output that is an input or a constant: copied */
} pd_copy;

typedef struct {
    int32_t launch, buffer, dtype; /* the buffer is scanned before this launch; launch_count: behind all of them */
    int32_t count, size, offset;   /* of v[count] integers each one meant plus v[offset] lies in [-v[size], v[size]) */
    int32_t first, step;           /* the integers meant */
    const char *message;
} pd_index_check;

/* Launch `launch` of a device program only looks for indices outside their axis. It says of every PD_SPAN of them in one
 * word what the first offender is (cuda_indices.c). */
typedef struct {
    int32_t launch, buffer, words; /* it writes v[words] words to the buffer */
    int32_t reader;                /* the first launch that reads the indices, -1: not known */
    int32_t input;                 /* which is scanned instead when it is in host memory; -1: none */
    int32_t size;                  /* of the axis, a value */
    int32_t first, step;           /* the integers meant */
    const char *message;
} pd_device_check;

typedef struct {
    pd_kernel *kernel; /* NULL: it runs on a device */
    const char *name;
    int32_t begins; /* on a device: its threads say pd_grid_begin before they touch memory */
} pd_named_kernel;

/* A step of the program: one of its candidates is launched, which is a row of candidates. */
typedef struct {
    const char *label;
    int32_t elements, work, flops, bytes, copied; /* values; without elements there is nothing to do */
    int32_t skip_input, skip_output;              /* skipped when these are at one address; -1: never */
    int32_t candidates, first_candidate;          /* rows, those that are launched after a candidate among them */
    int32_t choice;            /* v[choice] is the row, from the first; -1 there: none may run; choice -1: the first row */
    int (*choose)(int64_t *v); /* evaluates choice and row, 1: int64 overflow; NULL: pd_plan.plan does */
    /* on a device: rows of pd_plan.touches; -1: it may read and write everything */
    int32_t touches, first_touch;
} pd_launch_entry;

/* A kernel with its arguments. On a device tasks are blocks, scratch is shared memory of a block. */
typedef struct {
    int32_t kernel;
    int32_t buffers, first_buffer; /* into launch_buffers, -1 there: the workspace, -2: its counters */
    int32_t symbols, first_symbol; /* into launch_symbols */
    int32_t tasks, scratch;        /* values */
    /* on a device: */
    int32_t threads, workspace; /* of a block; a value: bytes */
    int32_t maps, first_map;    /* into maps; parameters before the buffers */
    int32_t after;              /* so many rows behind this one are launched after it */
} pd_candidate;

/* A tensor map over a buffer: a view that begins v[offset] bytes into it. */
typedef struct {
    int32_t buffer, type, rank, offset; /* type: a CUtensorMapDataType */
    int32_t first_size; /* into map_sizes: values of the dims, innermost first, of the outer strides in bytes, of corners */
    uint32_t box[5];    /* in im2col mode channels and pixels */
    uint32_t steps[3];  /* in im2col mode, along w, h and d; else 0 */
} pd_tensor_map;

typedef struct {
    int32_t first, count; /* launches that run side by side */
} pd_wave;

typedef struct {
    int32_t input_count, output_count, symbol_count, value_count, dim_check_count, guard_count, sign_check_count;
    int32_t buffer_count, slot_count, copy_count, launch_count, launch_buffer_count, launch_symbol_count;
    int32_t input_dim_count, output_dim_count, index_check_count, wave_count;
    int32_t kernel_count, candidate_count, map_count, device_check_count;
    int32_t amx; /* whether a kernel uses the matrix unit, for which a process needs a permission */
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
    const pd_named_kernel *kernels; /* each once */
    const pd_wave *waves;               /* of all launches, in order */
    const pd_index_check *index_checks; /* by launch */
    const int32_t *launch_buffers, *launch_symbols, *output_dims;
    const pd_candidate *candidates;
    const int32_t *touches; /* of a launch, on a device: 2 * buffer + whether it is written; no constants */
    const pd_tensor_map *maps;
    const int32_t *map_sizes;
    const pd_device_check *device_checks; /* by launch */
    int (*check)(int64_t *v); /* what dim checks, guards and output dims need; 1: int64 overflow */
    int (*plan)(int64_t *v);  /* everything else */
} pd_plan;

extern const pd_plan pd_the_plan __attribute__((visibility("hidden")));

/* ---- waves (waves.c) ---- */

/* How many of `threads` threads a wave takes, at the values v. When it has several launches, `starts` (threads + 1 for
 * each launch of the plan) gets which tasks each thread runs; `tasks` and `launch_threads`: of each launch, what it has and
 * what it would take alone. */
int64_t pd_plan_wave(const pd_wave *wave, const int64_t *v, int64_t threads, const int64_t *tasks,
                     const int64_t *launch_threads, int64_t *starts);

/* ---- the log of sizes (seen.c), any number of threads at once ---- */

typedef struct pd_log pd_log;

pd_log *pd_log_new(void);
void pd_log_free(pd_log *log);
/* Where runs with these sizes of the symbols are counted; without room where those of all others are. */
int64_t *pd_log_runs(pd_log *log, const int64_t *sizes);

/* ---- what programs of any number of parts share (opening.c) ---- */

__attribute__((format(printf, 2, 3))) int32_t pd_fail(int32_t code, const char *format, ...);
/* Where the weights are: in a file, which is mapped, or in memory. */
int32_t pd_find_weights(pd_program *p, const char *path, const void *memory, int64_t offset, int64_t bytes);
void pd_unmap_weights(pd_program *p);
/* Refuses another type or rank, and negative sizes. */
int32_t pd_check_tensor(const pd_io *io, const pd_tensor *t);

/* ---- programs and contexts (runtime.c; parts.c: those of several parts) ---- */

struct pd_program {
    const char *weights;   /* in host memory */
    const char *constants; /* where kernels read them */
    void *map;
    size_t map_bytes;
    pd_log *log;
    void *place; /* what cpu.c or cuda.c keeps: the pool, the device; parts.c: the parts */
    int borrowed; /* the pool is another program's */
};

struct pd_context {
    pd_program *program;
    int64_t threads;
    int ready;               /* the sizes are those of `dims` */
    int64_t *dims;           /* of all inputs, one after the other */
    int64_t *strides;        /* in bytes, alike */
    int64_t *output_strides; /* in bytes, of all outputs, one after the other */
    int32_t *given;          /* per output: its strides are the caller's, else dense */
    int32_t *places;         /* per input, then per output: 0 when kernels can use the caller's array where it is */
    int64_t *staged;         /* per input, then per output: offset of its dense copy in the arena, -1: used in place */
    int64_t *values;
    int64_t *remembered; /* PD_REMEMBERED evaluations of dense calls, see runtime.c */
    int64_t remembered_count;
    void **buffers; /* per buffer */
    int64_t scratch_offset, scratch_stride, staging_offset, planned_bytes;
    int64_t evaluations, copied_bytes;
    int64_t *runs; /* where those with these sizes are counted */
    char *arena;
    int64_t arena_bytes;
    void *place; /* what cpu.c or cuda.c keeps; parts.c: the sequence */
};

/* Bytes of output o, dense. */
int64_t pd_output_bytes(const pd_context *c, int32_t o);
/* Refuses an output that begins where its beginning is, but walks the memory in another way. */
int32_t pd_check_shared(const pd_context *c, void *const *inputs, void *const *outputs);
/* Whether a launch only copies an input to where it is already. */
static inline int pd_skipped(const pd_launch_entry *l, void *const *inputs, void *const *outputs) {
    return l->skip_input >= 0 && inputs[l->skip_input] == outputs[l->skip_output];
}
/* What launch k takes for the context's sizes, once that is chosen; NULL: it has nothing to do, or nothing that may run. */
const pd_candidate *pd_chosen(const pd_context *c, int32_t k);
/* PD_INPUT when the integers of an index check, at `data`, leave their axis. */
int32_t pd_check_index(const pd_context *c, const pd_index_check *check, const void *data);

/* One more run with the context's sizes. */
static inline void pd_count_run(const pd_context *c) { __atomic_fetch_add(c->runs, 1, __ATOMIC_RELAXED); }

/* ---- where a program runs: cpu.c, or cuda.c ---- */

extern const int64_t pd_arena_align; /* bytes: everything in the arena begins at a multiple; the arena itself with a page */
#define PD_PAGE 4096
int32_t pd_place_program(pd_program *p);
void pd_displace_program(pd_program *p);
int32_t pd_place_context(pd_context *c);
void pd_displace_context(pd_context *c); /* the arena too */
/* After every evaluation of new sizes: bytes of scratch that a thread needs in the arena. */
int64_t pd_place_scratch(pd_context *c);
/* Then: makes the arena hold planned_bytes; what launches take is chosen anew. */
int32_t pd_place_sizes(pd_context *c);
/* Fills in a launch's kernel, tasks and threads. */
void pd_place_info(const pd_context *c, int32_t k, pd_launch_info *info);

/* ---- arrays with strides (strided.c), in bytes ---- */

extern const int64_t pd_item_bytes[]; /* by PD_<dtype> */
/* Strides of a dense row-major array; returns 1 when its size overflows. */
int pd_dense_strides(int32_t rank, const int64_t *dims, int64_t item, int64_t *strides);
/* Whether kernels may use an array where it lies: empty, or positive strides of whole elements on the first
 * io->strided axes and dense ones behind. */
int pd_usable(const pd_io *io, const int64_t *dims, const int64_t *strides, const int64_t *dense);
/* The size of a dense array, which must not overflow. */
int64_t pd_dense_bytes(const pd_io *io, const int64_t *dims);
/* The first axis of more than one element along which strides a and b differ, or -1. */
int32_t pd_differing_axis(int32_t rank, const int64_t *dims, const int64_t *a, const int64_t *b);
/* Where the axes of input or output i begin among those of all. */
int32_t pd_first_axis(const pd_io *ios, int32_t i);
/* Makes a dense row-major copy of a non-empty strided array that has an axis. */
void pd_copy_strided(char *to, const char *from, int32_t rank, const int64_t *dims, const int64_t *strides,
                     int64_t item);

/* ---- arithmetic of the generated evaluation; `o` collects overflow ---- */

#define PD_ADD(a, b, r) (o |= __builtin_add_overflow((a), (b), (r)))
#define PD_MUL(a, b, r) (o |= __builtin_mul_overflow((a), (b), (r)))

/* Floor division; x / 0 is 0 (an empty tensor has no elements to address). */
static inline int64_t pd_floordiv(int64_t a, int64_t b) {
    if (b == 0) return 0;
    if (b == -1) return a == INT64_MIN ? INT64_MAX : -a;
    int64_t q = a / b;
    return q - (q * b != a && (a < 0) != (b < 0));
}

static inline int64_t pd_min(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t pd_max(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
