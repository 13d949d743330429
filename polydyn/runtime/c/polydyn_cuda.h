/* polydyn_cuda.h: the C interface of a program for a CUDA device, in addition to polydyn.h (docs/adr/0011-cuda-
 * runtime.md).
 *
 * The driver is opened by name, so a program needs no CUDA headers and no CUDA library to link or load:
 *
 *     pd_open(path, NULL, offset, size, &program);
 *     pd_cuda_open(program, "libcuda.so.1", cu_context, image, user, 0);
 *     pd_context_new(program, multiprocessors, &context);
 *     pd_cuda_places(context, places);                 where inputs and outputs are
 *     pd_shapes(context, inputs, NULL, output_dims);
 *     pd_cuda_run(context, input_data, output_data, stream, 0, NULL);
 *
 * The CUcontext belongs to the caller (pycuda, torch, or the primary one) and is pushed for the duration of a call.
 */
#ifndef POLYDYN_CUDA_H
#define POLYDYN_CUDA_H

#include <stdint.h>

#include "polydyn.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { PD_DEVICE = 6 }; /* an error code: a driver call failed, see pd_cuda_result */

/* Where an array of a call is: in device memory that kernels use (aligned to 16 bytes), in host memory, or in device
 * memory that is copied first (inputs only). */
enum { PD_ON_DEVICE, PD_ON_HOST, PD_TO_COPY };

/* Returns the CUresult of this thread's last PD_DEVICE. */
int32_t pd_cuda_result(void);

/* Returns the image (cubin, or null-terminated PTX) that contains a kernel; NULL if there is none. Equal addresses are
 * one module. The image must stay there until pd_close or pd_cuda_lost. */
typedef const void *(*pd_cuda_image)(void *user, int32_t kernel);

/* Loads the weights into the context. Kernels are loaded at their first launch through `image`, which may be called
 * from any thread that runs a context. `arch`: the compute capability whose specific instructions the images use (90
 * for sm_90a); 0 for none. Call it again after pd_cuda_lost, before contexts are created. */
int32_t pd_cuda_open(pd_program *program, const char *driver, void *cu_context, pd_cuda_image image, void *user,
                     int32_t arch);

/* Sets the features that no kernel may use because the device computes them incorrectly: a bit for each of
 * polydyn.capability.FEATURES; initially 0. Call before contexts are created. */
void pd_cuda_without(pd_program *program, int64_t features);
/* Sets whether a launch may begin before the previous one has ended (programmatic dependent launch), if device and
 * driver support it; initially allowed. Call before pd_cuda_open. */
void pd_cuda_overlap(pd_program *program, int32_t allowed);

/* Returns the name of a kernel; NULL if the number is too large. */
const char *pd_cuda_kernel(const pd_program *program, int32_t kernel);

/* Declares the CUcontext and everything in it lost: nothing is freed on the device, and contexts of this program may
 * only be freed. */
void pd_cuda_lost(pd_program *program);

/* Sets for each input, then each output, where it is: PD_ON_DEVICE etc. Call before pd_shapes if it differs from the
 * last call. */
void pd_cuda_places(pd_context *context, const int32_t *places);

/* Computes the outputs. `stream`: a CUstream; NULL for the context's own. Returns when the outputs are complete; with
 * `detached`, and without outputs on the host, as soon as all work is issued (errors of kernels and wrong indices are
 * then reported by a later call, see pd_cuda_wait). A capturing stream is rejected, because other calls use the
 * context's memory too. Device outputs must be aligned to 16 bytes. `nanoseconds`: NULL, or room for the time of every
 * launch. */
int32_t pd_cuda_run(pd_context *context, const void *const *inputs, void *const *outputs, void *stream,
                    int32_t detached, int64_t *nanoseconds);

/* Sets how many CUDA graphs a context keeps, 0 to 64, initially 8. A graph is kept for repeated sizes and device
 * addresses; such a run is a single launch. */
int32_t pd_cuda_keep(pd_context *context, int32_t most);
/* Sets how many bytes the graphs may use together, initially 64 MiB. A node is counted as 16 KiB, because the driver
 * does not report its size. A run with too many nodes is not recorded. */
int32_t pd_cuda_keep_bytes(pd_context *context, int64_t most);

/* Returns the number of kept graphs and of their nodes; then the number of runs so far that were recorded; that were a
 * single launch; and that were not recorded, because the device had no memory or does not support graphs (the context
 * then keeps none) or because the graph would be too large. */
void pd_cuda_graphs(const pd_context *context, int64_t counts[5]);

/* Records a pd_cuda_run on these arrays as a CUDA graph without computing. Candidates are chosen, kernels loaded and
 * memory allocated only once. Arrays in device memory must stay in place; those in host memory are read and written by
 * each replay. The record is valid until the context is used for another call or freed. Requires a driver of CUDA 11.4. */
int32_t pd_cuda_record(pd_context *context, const void *const *inputs, void *const *outputs);

/* Computes what was recorded again; `stream` and `detached` as for pd_cuda_run. */
int32_t pd_cuda_replay(pd_context *context, void *stream, int32_t detached);

/* Frees the graph of the record before the context is freed. */
void pd_cuda_release(pd_context *context);

/* Waits for the last `detached` run; PD_INPUT if an index that it read is out of range. If this is not called, the next
 * run of the context reports the error and does nothing else. */
int32_t pd_cuda_wait(pd_context *context);

/* Returns for how many launches of all runs a candidate was chosen; the other launches had the sizes of one of the last
 * few calls. */
int64_t pd_cuda_choices(const pd_context *context);

/* Returns the context's own stream. */
void *pd_cuda_stream(const pd_context *context);

/* Enlarges device memory that other contexts share, on `stream`: waits for the stream, and replaces `*memory` of `*has`
 * bytes by memory of at least `bytes` bytes; its content is lost. bytes 0: frees it. */
int32_t pd_cuda_room(const pd_context *context, void *stream, void **memory, int64_t *has, int64_t bytes);

/* Copies from the device to host memory after all work on `stream`, and waits for it. */
int32_t pd_cuda_fetch(const pd_context *context, void *stream, void *to, const void *from, int64_t bytes);

/* After a run, pd_launch returns the chosen kernel, its number of blocks (`tasks`) and the threads per block. */

#ifdef __cplusplus
}
#endif
#endif
