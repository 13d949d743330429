/* cuda_internal.h: what the units of a program on a CUDA device share: the driver's functions, a program and a context on
 * the device, and a call. */
#ifndef POLYDYN_CUDA_INTERNAL_H
#define POLYDYN_CUDA_INTERNAL_H

#include <pthread.h>

#include "internal.h"
#include "polydyn_cuda.h"

#define DRIVER(X)                                                                                                     \
    X(cuCtxPushCurrent_v2, (void *))                                                                                  \
    X(cuCtxPopCurrent_v2, (void **))                                                                                  \
    X(cuCtxGetDevice, (int32_t *))                                                                                    \
    X(cuDeviceGetAttribute, (int32_t *, int32_t, int32_t))                                                            \
    X(cuMemAlloc_v2, (uint64_t *, size_t))                                                                            \
    X(cuMemFree_v2, (uint64_t))                                                                                       \
    X(cuMemHostAlloc, (void **, size_t, uint32_t))                                                                    \
    X(cuMemFreeHost, (void *))                                                                                        \
    X(cuMemcpyHtoD_v2, (uint64_t, const void *, size_t))                                                              \
    X(cuMemcpyHtoDAsync_v2, (uint64_t, const void *, size_t, void *))                                                 \
    X(cuMemcpyDtoHAsync_v2, (void *, uint64_t, size_t, void *))                                                       \
    X(cuMemcpyDtoDAsync_v2, (uint64_t, uint64_t, size_t, void *))                                                     \
    X(cuMemsetD32Async, (uint64_t, uint32_t, size_t, void *))                                                         \
    X(cuModuleLoadData, (void **, const void *))                                                                      \
    X(cuModuleUnload, (void *))                                                                                       \
    X(cuModuleGetFunction, (void **, void *, const char *))                                                           \
    X(cuFuncGetAttribute, (int32_t *, int32_t, void *))                                                               \
    X(cuFuncSetAttribute, (void *, int32_t, int32_t))                                                                 \
    X(cuStreamCreate, (void **, uint32_t))                                                                            \
    X(cuStreamDestroy_v2, (void *))                                                                                   \
    X(cuStreamSynchronize, (void *))                                                                                  \
    X(cuStreamWaitEvent, (void *, void *, uint32_t))                                                                  \
    X(cuStreamIsCapturing, (void *, int32_t *))                                                                       \
    X(cuEventCreate, (void **, uint32_t))                                                                             \
    X(cuEventDestroy_v2, (void *))                                                                                    \
    X(cuEventRecord, (void *, void *))                                                                                \
    X(cuEventSynchronize, (void *))                                                                                   \
    X(cuEventElapsedTime, (float *, void *, void *))                                                                  \
    X(cuGetErrorName, (int32_t, const char **))                                                                       \
    X(cuGetErrorString, (int32_t, const char **))                                                                     \
    X(cuLaunchKernel, (void *, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, uint32_t, void *, void **, \
                       void **))
/* Of CUDA 11.4; older drivers run programs, but bind no calls and keep no graphs. */
#define GRAPHS(X)                                                                                                     \
    X(cuGraphCreate, (void **, uint32_t))                                                                             \
    X(cuGraphAddKernelNode, (void **, void *, void *const *, size_t, const pd_kernel_node *))                         \
    X(cuGraphAddMemcpyNode, (void **, void *, void *const *, size_t, const pd_copy_node *, void *))                   \
    X(cuGraphInstantiateWithFlags, (void **, void *, uint64_t))                                                       \
    X(cuGraphLaunch, (void *, void *))                                                                                \
    X(cuGraphExecDestroy, (void *))                                                                                   \
    X(cuGraphDestroy, (void *))

/* CUDA_KERNEL_NODE_PARAMS_v1 and CUDA_MEMCPY3D of cuda.h; a copy of bytes has height and depth 1. */
typedef struct {
    void *function;
    uint32_t grid[3], block[3], shared;
    void **parameters, **extra;
} pd_kernel_node;
typedef struct {
    size_t x, y, z, lod;
    uint32_t kind; /* CU_MEMORYTYPE_HOST, CU_MEMORYTYPE_DEVICE */
    void *host;
    uint64_t device;
    void *array, *reserved;
    size_t pitch, height;
} pd_copy_side;
typedef struct {
    pd_copy_side from, to;
    size_t bytes, height, depth;
} pd_copy_node;

/* What lets a launch begin before the one it follows has ended: of CUDA 11.8 and 12.3, on sm_90 and newer. */
#define OVERLAP(X)                                                                                                    \
    X(cuLaunchKernelEx, (const pd_launch_config *, void *, void **, void **))                                         \
    X(cuGraphAddDependencies_v2, (void *, void *const *, void *const *, const pd_edge *, size_t))

/* CUlaunchAttribute, CUlaunchConfig, CUgraphEdgeData of cuda.h. */
typedef struct {
    int32_t id, pad, value, rest[15];
} pd_launch_attribute;
typedef struct {
    uint32_t grid[3], block[3], shared;
    void *stream;
    const pd_launch_attribute *attributes;
    uint32_t count;
} pd_launch_config;
typedef struct {
    uint8_t from_port, to_port, type, reserved[5];
} pd_edge;

#define MEMBER(name, parameters) int32_t (*name) parameters;
typedef struct {
    DRIVER(MEMBER)
    GRAPHS(MEMBER)
    OVERLAP(MEMBER)
} pd_driver;

enum { PD_COUNTERS = 1024 };
enum { MAP_BYTES = 128, MAP_ALIGN = 64, MAP_RANK = 5, SWIZZLE_128B = 3, PROMOTE_256B = 3 };
typedef int32_t pd_encode(void *map, int32_t dtype, uint32_t rank, void *address, const uint64_t *dims,
                          const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                          int32_t interleave, int32_t swizzle, int32_t promotion, int32_t fill);

typedef int32_t pd_encode_pixels(void *map, int32_t dtype, uint32_t rank, void *address, const uint64_t *dims,
                                 const uint64_t *strides, const int32_t *lower, const int32_t *upper, uint32_t channels,
                                 uint32_t pixels, const uint32_t *element_strides, int32_t interleave, int32_t swizzle,
                                 int32_t promotion, int32_t fill);

enum { NON_BLOCKING = 1, NO_TIMING = 2, MAX_DYNAMIC_SHARED = 8, CARVE_OUT = 9, SHARED_OPT_IN = 97, ALIGNED = 16 };
enum { OUT_OF_MEMORY = 2, NOT_SUPPORTED = 801 };
/* The kernel's virtual architecture; the launch attribute, the port and the type of an edge of a launch that begins early. */
enum { PTX_VERSION = 5, BEGINS_EARLY = 6, EARLY_PORT = 1, EARLY_TYPE = 1, EARLY_ARCH = 90 };

/* What a program has on the device. */
typedef struct {
    pd_driver cuda;
    pd_encode *cuTensorMapEncodeTiled; /* NULL: the driver is older than tensor maps */
    pd_encode_pixels *cuTensorMapEncodeIm2col;
    int graphs;                        /* the driver has all of GRAPHS */
    int32_t arch;                      /* whose own instructions may be used, 0: none's */
    int64_t lacking;                   /* features that kernels do without, a bit for each */
    void *context;
    pd_cuda_image image;
    void *user;
    pthread_mutex_t loading;
    const void **images; /* those that are loaded, and what they became */
    void **modules;
    int32_t loaded;
    void **functions; /* per kernel, NULL: not yet loaded */
    char *early;      /* per kernel that is loaded: it may begin before the launch that it follows has ended */
    int overlap;      /* the driver has all of OVERLAP, and nobody has said no */
    uint64_t weights;
    int64_t shared_limit;
    int32_t generation; /* counts the CUcontexts it has lost */
    int ready;
} pd_device;

/* A run as a graph. */
typedef struct {
    void *graph;    /* a CUgraphExec, NULL: there is nothing to do */
    int64_t nodes;
    int64_t copied; /* bytes that a replay moves without computing */
} pd_recorded;

typedef struct pd_keeper pd_keeper; /* cuda_kept.c */
typedef struct pd_nodes pd_nodes;   /* cuda_nodes.c */

/* What a context has beyond its sizes. The arena's end, from staging_offset on, has a mirror in pinned memory. */
typedef struct {
    int32_t generation;
    void *stream, *done;
    int busy; /* a run may not have ended; `done` is recorded at its end */
    char *pinned, *found; /* found: the words of all device checks of the last run, as it had sizes then: */
    int64_t pinned_bytes, found_bytes;
    int64_t *word_counts; /* per device check: how many words, 0 when it was not needed; the size of the axis */
    int unread; /* a run that was not waited for looked for wrong indices, and nobody has read what it found */
    uint64_t counters; /* PD_COUNTERS words that are 0 between launches, and behind them: */
    uint64_t workspace; /* of the one kernel, and those after it, that uses it at a time */
    int64_t workspace_bytes;
    int32_t next;     /* the first launch that is not chosen for these sizes */
    int32_t recalled; /* the choices of these sizes were remembered */
    int64_t *remembered, remembered_count; /* the last few, see cuda_choose.c */
    int64_t choices; /* launches that were chosen */
    int64_t *values;  /* of all launches' parameters: addresses, then symbols */
    void **parameters;
    int32_t *first; /* of a launch's parameters */
    char *maps;     /* of all candidates, and the addresses they are of, 0: none yet */
    uint64_t *map_addresses;
    int recorded;        /* the graph is a whole call on these arrays of the caller */
    pd_recorded bound;
    const void **inputs;
    void **outputs;
    pd_keeper *keeper; /* the graphs of runs */
    int replayed;      /* the last run was one of them */
} pd_cuda;

/* Says what a CUresult means, where it came up, and about what; PD_DEVICE. */
int32_t pd_cuda_say(const pd_device *d, int32_t result, const char *where, const char *what);

/* Calls the driver; in a function that has the pd_device as `d` and returns an error code. */
#define TRY(call, what)                                                                                               \
    do {                                                                                                              \
        int32_t result_ = d->cuda.call;                                                                               \
        if (result_) return pd_cuda_say(d, result_, #call, what);                                                             \
    } while (0)

/* A call: arrays, and where its work goes. */
typedef struct {
    const void *const *given; /* the caller's inputs */
    void *const *outputs;     /* the caller's */
    void **inputs, **results; /* where kernels read and write */
    void *stream;
    pd_nodes *nodes; /* NULL: work is put on the stream; else it becomes nodes of a graph */
    int behind;      /* what was put on the stream last is a kernel of this call */
} pd_call;

/* Where a copy goes. */
enum { PD_HOST_TO_DEVICE, PD_DEVICE_TO_HOST, PD_DEVICE_TO_DEVICE };

/* Puts a copy, or a kernel of launch k, among the work of a call. */
int32_t pd_cuda_copy(pd_context *c, pd_call *call, int32_t way, void *to, const void *from, int64_t bytes, const char *what);
int32_t pd_cuda_start(pd_context *c, pd_call *call, int32_t k, const pd_candidate *n, void **parameters);
/* Everything between arrays in and arrays out: copies, launches, copies. `events`: NULL, or one before each launch and one
 * behind the last. */
int32_t pd_cuda_issue(pd_context *c, pd_call *call, void **events);

/* Nodes of a graph (cuda_nodes.c): as pd_cuda_copy and pd_cuda_start. Each waits for those that its memory needs. */
int32_t pd_nodes_copy(pd_context *c, pd_nodes *g, int32_t way, void *to, const void *from, int64_t bytes, const char *what);
int32_t pd_nodes_start(pd_context *c, pd_nodes *g, int32_t k, const pd_candidate *n, void **parameters);
/* How many nodes a graph of this run has at most; all launches are chosen. */
int32_t pd_cuda_most_nodes(const pd_context *c);
/* Makes what pd_cuda_issue does a graph; all launches are chosen. */
int32_t pd_cuda_build(pd_context *c, const pd_call *call, pd_recorded *made);
/* Gives the graph back, if there is one; it must not be at work. */
void pd_cuda_destroy(pd_context *c, pd_recorded *made);

/* Graphs of runs (cuda_kept.c). */
pd_keeper *pd_keeper_new(void);
void pd_keeper_free(pd_keeper *keeper);
/* The graph of a run that is about to begin, NULL: it is put on the stream. */
int32_t pd_cuda_kept(pd_context *c, const pd_call *call, const pd_recorded **found);
/* Gives all of them back: memory that they use goes, or the context does. They must not be at work. */
void pd_cuda_drop(pd_context *c);

/* Whether the device's context is gone, and with it what this one had there; PD_USAGE then. */
int pd_cuda_is_lost(const pd_context *c);
int32_t pd_cuda_alive(const pd_context *c);
int32_t pd_cuda_enter(pd_device *d);
/* Room for the choices that a context remembers. */
int64_t pd_cuda_remembered_words(void);
/* The first of a context's values, which all others follow from. */
int64_t pd_cuda_key_words(void);
/* Chooses what launch k takes for the context's sizes, the launches before it being chosen, and makes it ready;
 * `stream` is that of the run. */
int32_t pd_cuda_choose(pd_context *c, int32_t k, void *stream);
/* Loads a kernel, if that was not done before; `shared`: it has shared memory, which then goes before L1 caches. */
int32_t pd_cuda_load(pd_device *d, int32_t kernel, int shared);
/* Device checks of a run (cuda_indices.c). Before it: room for their words; refuses an axis without elements. */
int32_t pd_cuda_ask(pd_context *c);
/* Whether launch k does nothing but look at indices that need not be looked at. */
int pd_cuda_on_host(const pd_context *c, int32_t k);
/* Puts what launch k found on its way to the host. */
int32_t pd_cuda_fetch_found(pd_context *c, int32_t k, pd_call *call);
/* Whether the run looks for wrong indices at all. */
int pd_cuda_checks_indices(const pd_context *c);
/* Once the run has ended: PD_INPUT for a wrong index; the message ends with `when`. */
int32_t pd_cuda_found(const pd_context *c, const char *when);
/* Waits for a run that looked and was not waited for; PD_INPUT when an index of it was wrong, once. */
int32_t pd_cuda_index_status(pd_context *c, const char *when);
/* Takes the context off again; returns `code`. */
int32_t pd_cuda_leave(pd_device *d, int32_t code);
/* Waits for the context's last run, so that its memory may be given back or written by the host. */
void pd_cuda_settle(pd_device *d, pd_cuda *x);
/* Makes pinned memory of at least `bytes`; what was in it is gone. */
int32_t pd_cuda_pinned(pd_device *d, char **memory, int64_t *has, int64_t bytes);

#endif
