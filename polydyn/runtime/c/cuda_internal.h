/* cuda_internal.h: shared by the files that run a program on a CUDA device: the driver's functions, a program and a
 * context on the device, and a call. */
#ifndef POLYDYN_CUDA_INTERNAL_H
#define POLYDYN_CUDA_INTERNAL_H

#include <pthread.h>

#include "internal.h"
#include "polydyn_cuda.h"

static const pd_plan *const plan = &pd_the_plan;

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
/* Since CUDA 11.4. Older drivers run programs, but bind no calls and keep no graphs. */
#define GRAPHS(X)                                                                                                     \
    X(cuGraphCreate, (void **, uint32_t))                                                                             \
    X(cuGraphAddKernelNode, (void **, void *, void *const *, size_t, const pd_kernel_node *))                         \
    X(cuGraphAddMemcpyNode, (void **, void *, void *const *, size_t, const pd_copy_node *, void *))                   \
    X(cuGraphInstantiateWithFlags, (void **, void *, uint64_t))                                                       \
    X(cuGraphLaunch, (void *, void *))                                                                                \
    X(cuGraphExecDestroy, (void *))                                                                                   \
    X(cuGraphDestroy, (void *))

/* CUDA_KERNEL_NODE_PARAMS_v1 and CUDA_MEMCPY3D of cuda.h. A copy of bytes has height and depth 1. */
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

/* For launches that begin before the previous one has ended: since CUDA 11.8 and 12.3, on sm_90 and newer. */
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
/* Of CUDA: a function attribute (virtual architecture); a launch attribute, a port and an edge type for early launches. */
enum { PTX_VERSION = 5, BEGINS_EARLY = 6, EARLY_PORT = 1, EARLY_TYPE = 1, EARLY_ARCH = 90 };

/* The device part of a program. */
typedef struct {
    pd_driver cuda;
    pd_encode *cuTensorMapEncodeTiled; /* NULL if the driver does not support tensor maps */
    pd_encode_pixels *cuTensorMapEncodeIm2col;
    int graphs;                        /* whether the driver has all of GRAPHS */
    int32_t arch;                      /* architecture whose specific instructions may be used, or 0 */
    int64_t lacking;                   /* bit mask of features that kernels must not use */
    void *context;
    pd_cuda_image image;
    void *user;
    pthread_mutex_t loading;
    const void **images; /* the loaded images and their modules */
    void **modules;
    int32_t loaded;
    void **functions; /* per kernel; NULL if not yet loaded */
    char *early;      /* per loaded kernel: whether it may begin before the previous launch has ended */
    int overlap;      /* whether the driver has all of OVERLAP and the caller allows it */
    uint64_t weights;
    int64_t shared_limit;
    int32_t generation; /* number of CUcontexts lost so far */
    int ready;
} pd_device;

/* A run recorded as a graph. */
typedef struct {
    void *graph;    /* a CUgraphExec; NULL if there is nothing to do */
    int64_t nodes;
    int64_t copied; /* bytes that a replay moves without computing */
} pd_recorded;

typedef struct pd_keeper pd_keeper; /* cuda_kept.c */
typedef struct pd_nodes pd_nodes;   /* cuda_nodes.c */

/* The device part of a context. The end of the arena, from staging_offset on, is mirrored in pinned memory. */
typedef struct {
    int32_t generation;
    void *stream, *done;
    int busy; /* whether a run may be in progress; `done` is recorded at its end */
    char *pinned, *found; /* found: the words of all device checks of the last run, with the sizes it had then: */
    int64_t pinned_bytes, found_bytes;
    int64_t *word_counts; /* per device check: the number of words, 0 if it was not needed; the size of the axis */
    int unread; /* whether a run that was not waited for checked indices and its result is unread */
    uint64_t counters; /* PD_COUNTERS words that are 0 between launches, followed by: */
    uint64_t workspace; /* scratch memory of the current kernel and those that follow it in its launch */
    int64_t workspace_bytes;
    int32_t next;     /* the first launch with no choice yet for these sizes */
    int32_t recalled; /* whether the choices for these sizes were remembered */
    int64_t *remembered, remembered_count; /* the last few, see cuda_choose.c */
    int64_t choices; /* number of launches chosen so far */
    int64_t *values;  /* parameters of all launches: addresses, then symbols */
    void **parameters;
    int32_t *first; /* per launch: index of its first parameter */
    char *maps;     /* of all candidates; map_addresses: the addresses they were encoded for, 0 if not yet encoded */
    uint64_t *map_addresses;
    int recorded;        /* whether `bound` is a graph of a whole call with `inputs` and `outputs` */
    pd_recorded bound;
    const void **inputs;
    void **outputs;
    pd_keeper *keeper; /* the graphs of runs */
    int replayed;      /* whether the last run was one of them */
} pd_cuda;

/* Stores an error message: the meaning of a CUresult, the call that returned it, and its object. Returns PD_DEVICE. */
int32_t pd_cuda_say(const pd_device *d, int32_t result, const char *where, const char *what);

/* Calls the driver. For functions that return an error code and have the pd_device as `d`. */
#define TRY(call, what)                                                                                               \
    do {                                                                                                              \
        int32_t result_ = d->cuda.call;                                                                               \
        if (result_) return pd_cuda_say(d, result_, #call, what);                                                             \
    } while (0)

/* A call: its arrays and its stream. */
typedef struct {
    const void *const *given; /* the caller's inputs */
    void *const *outputs;     /* the caller's outputs */
    void **inputs, **results; /* where kernels read and write */
    void *stream;
    pd_nodes *nodes; /* NULL: work is put on the stream; else it becomes nodes of a graph */
    int behind;      /* whether the last item on the stream is a kernel of this call */
} pd_call;

/* The direction of a copy. */
enum { PD_HOST_TO_DEVICE, PD_DEVICE_TO_HOST, PD_DEVICE_TO_DEVICE };

/* Adds a copy, or a kernel of launch k, to the work of a call. */
int32_t pd_cuda_copy(pd_context *c, pd_call *call, int32_t way, void *to, const void *from, int64_t bytes, const char *what);
int32_t pd_cuda_start(pd_context *c, pd_call *call, int32_t k, const pd_candidate *n, void **parameters);
/* Issues all work of a call: copies, launches, copies. `events`: NULL, or one before each launch and one after the
 * last. */
int32_t pd_cuda_issue(pd_context *c, pd_call *call, void **events);

/* Nodes of a graph (cuda_nodes.c): as pd_cuda_copy and pd_cuda_start. Each waits for the nodes that its memory depends
 * on. */
int32_t pd_nodes_copy(pd_context *c, pd_nodes *g, int32_t way, void *to, const void *from, int64_t bytes, const char *what);
int32_t pd_nodes_start(pd_context *c, pd_nodes *g, int32_t k, const pd_candidate *n, void **parameters);
/* Returns the maximum number of nodes in a graph of this run. All launches must be chosen. */
int32_t pd_cuda_most_nodes(const pd_context *c);
/* Builds a graph of what pd_cuda_issue does. All launches must be chosen. */
int32_t pd_cuda_build(pd_context *c, const pd_call *call, pd_recorded *made);
/* Frees the graph, if there is one. It must not be running. */
void pd_cuda_destroy(pd_context *c, pd_recorded *made);

/* Graphs of runs (cuda_kept.c). */
pd_keeper *pd_keeper_new(void);
void pd_keeper_free(pd_keeper *keeper);
/* Finds or records the graph of a run that is about to begin; NULL: the run is put on the stream. */
int32_t pd_cuda_kept(pd_context *c, const pd_call *call, const pd_recorded **found);
/* Frees all graphs, because memory that they use or the context is about to be freed. They must not be running. */
void pd_cuda_drop(pd_context *c);

/* Whether the device's context is lost, and this context's device memory with it; the error is PD_USAGE. */
int pd_cuda_is_lost(const pd_context *c);
int32_t pd_cuda_alive(const pd_context *c);
int32_t pd_cuda_enter(pd_device *d);
/* Returns the size in words of the choices that a context remembers. */
int64_t pd_cuda_remembered_words(void);
/* Returns how many of a context's first values determine all others. */
int64_t pd_cuda_key_words(void);
/* Chooses a candidate of launch k for the context's sizes and prepares it. Earlier launches must be chosen. `stream`:
 * of the run. */
int32_t pd_cuda_choose(pd_context *c, int32_t k, void *stream);
/* Loads a kernel if it is not loaded yet. `shared`: it uses shared memory, which is preferred to L1 cache. */
int32_t pd_cuda_load(pd_device *d, int32_t kernel, int shared);
/* Device checks of a run (cuda_indices.c). Before the run: reserves memory for their words; rejects an axis without
 * elements. */
int32_t pd_cuda_ask(pd_context *c);
/* Whether launch k only checks indices that need no check on the device. */
int pd_cuda_on_host(const pd_context *c, int32_t k);
/* Starts copying the result of launch k to the host. */
int32_t pd_cuda_fetch_found(pd_context *c, int32_t k, pd_call *call);
/* Whether the run checks any indices on the device. */
int pd_cuda_checks_indices(const pd_context *c);
/* After the run has ended: PD_INPUT for a wrong index; the message ends with `when`. */
int32_t pd_cuda_found(const pd_context *c, const char *when);
/* Waits for a run that checked indices and was not waited for; reports PD_INPUT for a wrong index once. */
int32_t pd_cuda_index_status(pd_context *c, const char *when);
/* Pops the CUcontext; returns `code`. */
int32_t pd_cuda_leave(pd_device *d, int32_t code);
/* Waits for the context's last run, so that its memory may be freed or written by the host. */
void pd_cuda_settle(pd_device *d, pd_cuda *x);
/* Allocates at least `bytes` of pinned memory; its previous content is lost. */
int32_t pd_cuda_pinned(pd_device *d, char **memory, int64_t *has, int64_t bytes);

#endif
