/* polydyn_cuda.h: what the C interface of a program for a CUDA device has beyond polydyn.h (docs/adr/0011-cuda-runtime.md).
 *
 * The driver is opened by name, so a program needs no CUDA headers and no CUDA library to be linked or loaded:
 *
 *     pd_open(path, NULL, offset, size, &program);
 *     pd_cuda_open(program, "libcuda.so.1", cu_context, image, user, 0);
 *     pd_context_new(program, multiprocessors, &context);
 *     pd_cuda_places(context, places);                 where inputs and outputs lie
 *     pd_shapes(context, inputs, NULL, output_dims);
 *     pd_cuda_run(context, input_data, output_data, stream, 0, NULL);
 *
 * The CUcontext is the caller's (pycuda's, torch's, the primary one) and is pushed for the time of a call.
 */
#ifndef POLYDYN_CUDA_H
#define POLYDYN_CUDA_H

#include <stdint.h>

#include "polydyn.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PD_DEVICE = 6 }; /* an error code: a driver call failed, see pd_cuda_result */

/* Where an array of a call lies: device memory that kernels use (aligned to 16 bytes), host memory, or device memory that
 * is copied first (inputs only). */
enum { PD_ON_DEVICE, PD_ON_HOST, PD_TO_COPY };

/* The CUresult behind this thread's last PD_DEVICE. */
int32_t pd_cuda_result(void);

/* Gives the image (cubin, or PTX that ends in a zero) that holds a kernel, NULL when there is none. Equal addresses are
 * one module. It must stay where it is until pd_close or pd_cuda_lost. */
typedef const void *(*pd_cuda_image)(void *user, int32_t kernel);

/* Loads the weights into the context; kernels are loaded when they are first launched, through `image`, which may be
 * called from any thread that runs a context. `arch`: the compute capability whose own instructions images have (90 for
 * sm_90a), 0 for none. Again after pd_cuda_lost, before contexts are made. */
int32_t pd_cuda_open(pd_program *program, const char *driver, void *cu_context, pd_cuda_image image, void *user,
                     int32_t arch);

/* Features that no kernel may use because the device does them wrong, a bit for each of polydyn.capability.FEATURES.
 * Before contexts are made; 0 if it is never said. */
void pd_cuda_without(pd_program *program, int64_t features);
/* Whether a launch may begin before the one it follows has ended (programmatic dependent launch), where device and driver can;
 * they may at first. Before pd_cuda_open. */
void pd_cuda_overlap(pd_program *program, int32_t allowed);

/* The name of a kernel, NULL when its number is too large. */
const char *pd_cuda_kernel(const pd_program *program, int32_t kernel);

/* The CUcontext is gone, and all that was in it: nothing is given back, contexts of this program are only freed. */
void pd_cuda_lost(pd_program *program);

/* For each input, then each output: PD_ON_DEVICE ... . Before pd_shapes, when they differ from the last call's. */
void pd_cuda_places(pd_context *context, const int32_t *places);

/* Computes. `stream`: a CUstream, NULL for the context's own. Returns when outputs are there; with `detached`, and no
 * output on the host, when everything is on its way (errors of kernels and wrong indices then appear at a later call, see
 * pd_cuda_wait). A stream that is capturing is refused: the context's memory is other calls' too. Device outputs are aligned
 * to 16 bytes. `nanoseconds`: NULL, or room for the time of every launch. */
int32_t pd_cuda_run(pd_context *context, const void *const *inputs, void *const *outputs, void *stream,
                    int32_t detached, int64_t *nanoseconds);

/* How many CUDA graphs a context keeps, 0 to 64, at first 8: of runs whose sizes, and addresses of arrays on the device, came
 * before. Such a run is one launch. */
int32_t pd_cuda_keep(pd_context *context, int32_t most);
/* How many bytes they may take together, at first 64 MiB, a node being counted as 16 KiB: the driver does not tell. A run
 * of more nodes is not recorded. */
int32_t pd_cuda_keep_bytes(pd_context *context, int64_t most);

/* Graphs that are kept now, and their nodes; runs so far that were recorded, that were one launch, and for which
 * the device had no memory or no graphs (that context then keeps none), or whose graph would be too large. */
void pd_cuda_graphs(const pd_context *context, int64_t counts[5]);

/* Records what pd_cuda_run on these arrays would do as a CUDA graph, without computing: versions are chosen, kernels loaded,
 * memory made, once. Arrays in device memory stay where they are; those in host memory are read and written by each
 * replay. The record lasts until the context is used for another call or freed. Needs a driver of CUDA 11.4. */
int32_t pd_cuda_record(pd_context *context, const void *const *inputs, void *const *outputs);

/* Computes once more what was recorded; `stream` and `detached` as for pd_cuda_run. */
int32_t pd_cuda_replay(pd_context *context, void *stream, int32_t detached);

/* Gives the record's graph back before the context goes. */
void pd_cuda_release(pd_context *context);

/* Waits for the last run that was `detached`; PD_INPUT when an index that it read lies outside its axis. Nobody having
 * asked, the next run of the context says so and does nothing else. */
int32_t pd_cuda_wait(pd_context *context);

/* How many launches of all runs had their version chosen; the others had sizes of one of the last few calls. */
int64_t pd_cuda_choices(const pd_context *context);

/* The context's own stream. */
void *pd_cuda_stream(const pd_context *context);

/* Memory of the device that other contexts use too, on `stream`: waits for the stream, and makes `*memory`, which has `*has`
 * bytes, one of at least `bytes` bytes; what was in it is gone. bytes 0: gives it back. */
int32_t pd_cuda_room(const pd_context *context, void *stream, void **memory, int64_t *has, int64_t bytes);

/* Copies from the device to host memory behind all that is on `stream`, and waits for it. */
int32_t pd_cuda_fetch(const pd_context *context, void *stream, void *to, const void *from, int64_t bytes);

/* pd_launch tells, after a run, the kernel that was chosen, its blocks (`tasks`) and the threads of a block. */

#ifdef __cplusplus
}
#endif
#endif
