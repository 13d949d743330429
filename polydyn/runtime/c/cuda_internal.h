/* cuda_internal.h: what cuda.c, cuda_choose.c, cuda_indices.c and cuda_run.c share: the driver's functions, a program and
 * a context on the device. */
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
    X(cuModuleLoadData, (void **, const void *))                                                                      \
    X(cuModuleUnload, (void *))                                                                                       \
    X(cuModuleGetFunction, (void **, void *, const char *))                                                           \
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
/* Of CUDA 11.4; older drivers run programs, but bind no calls. */
#define GRAPHS(X)                                                                                                     \
    X(cuStreamBeginCapture_v2, (void *, int32_t))                                                                     \
    X(cuStreamEndCapture, (void *, void **))                                                                          \
    X(cuGraphGetNodes, (void *, void **, size_t *))                                                                   \
    X(cuGraphInstantiateWithFlags, (void **, void *, uint64_t))                                                       \
    X(cuGraphLaunch, (void *, void *))                                                                                \
    X(cuGraphExecDestroy, (void *))                                                                                   \
    X(cuGraphDestroy, (void *))
#define MEMBER(name, parameters) int32_t (*name) parameters;
typedef struct {
    DRIVER(MEMBER)
    GRAPHS(MEMBER)
} pd_driver;

enum { MAP_BYTES = 128, MAP_ALIGN = 64, MAP_RANK = 5, SWIZZLE_128B = 3, PROMOTE_256B = 3 };
typedef int32_t pd_encode(void *map, int32_t dtype, uint32_t rank, void *address, const uint64_t *dims,
                          const uint64_t *strides, const uint32_t *box, const uint32_t *element_strides,
                          int32_t interleave, int32_t swizzle, int32_t promotion, int32_t fill);

typedef int32_t pd_encode_pixels(void *map, int32_t dtype, uint32_t rank, void *address, const uint64_t *dims,
                                 const uint64_t *strides, const int32_t *lower, const int32_t *upper, uint32_t channels,
                                 uint32_t pixels, const uint32_t *element_strides, int32_t interleave, int32_t swizzle,
                                 int32_t promotion, int32_t fill);

enum { NON_BLOCKING = 1, NO_TIMING = 2, MAX_DYNAMIC_SHARED = 8, CARVE_OUT = 9, SHARED_OPT_IN = 97, ALIGNED = 16 };
enum { CAPTURE_THREAD_LOCAL = 1, NOT_SUPPORTED = 801 };

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
    uint64_t weights;
    int64_t shared_limit;
    int32_t generation; /* counts the CUcontexts it has lost */
    int ready;
} pd_device;

/* What a context has beyond its sizes. The arena's end, from staging_offset on, has a mirror in pinned memory. */
typedef struct {
    int32_t generation;
    void *stream, *done;
    int busy; /* a run may not have ended; `done` is recorded at its end */
    char *pinned, *found; /* found: the words of all device checks of the last run, as it had sizes then: */
    int64_t pinned_bytes, found_bytes;
    int64_t *word_counts; /* per device check: how many words, 0 when it was not needed; the size of the axis */
    int unread; /* a run that was not waited for looked for wrong indices, and nobody has read what it found */
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
    int recorded;           /* the graph is a whole call on these arrays of the caller */
    void *graph;            /* a CUgraphExec, NULL: there is nothing to do */
    int64_t recorded_bytes; /* that a replay moves without computing */
    const void **inputs;
    void **outputs;
} pd_cuda;

/* Says what a CUresult means, where it came up, and about what; PD_DEVICE. */
int32_t pd_cuda_say(const pd_device *d, int32_t result, const char *where, const char *what);

/* Calls the driver; in a function that has the pd_device as `d` and returns an error code. */
#define TRY(call, what)                                                                                               \
    do {                                                                                                              \
        int32_t result_ = d->cuda.call;                                                                               \
        if (result_) return pd_cuda_say(d, result_, #call, what);                                                             \
    } while (0)

int32_t pd_cuda_enter(pd_device *d);
/* Room for the choices that a context remembers. */
int64_t pd_cuda_remembered_words(void);
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
int32_t pd_cuda_fetch_found(pd_context *c, int32_t k, void *stream);
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
