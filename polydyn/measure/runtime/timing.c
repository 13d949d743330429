/* timing.c: runs kernels of a measuring library like the host program, and times them (measure/cpu_timing.py). */
#include <stdlib.h>
#include <time.h>

#include "internal.h"

extern pd_kernel *const pdt_kernels[]; /* generated: the kernels of this library */

#define EXPORT __attribute__((visibility("default")))

static int64_t now_ns(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

#define LONG_NS 100000 /* a longer run on one thread may lose its core: its processor time counts. Reading that clock
                          takes 0.3 us, too long for short runs. */

#define AHEAD_NS 1000000000 /* as in the middle of a long run: workers are awake and stay awake */

static pd_pool *pool;

/* Runs tasks [0, tasks) of kernel `which` `count` times; writes the nanoseconds of each. Returns 1 if out of memory. */
EXPORT int32_t pdt_time(int32_t which, void *const *buffers, const int64_t *symbols, int64_t tasks, int64_t threads,
                        int64_t scratch, int32_t count, int64_t *nanoseconds) {
    int64_t stride = (scratch + 255) / 256 * 256;
    char *memory = aligned_alloc(256, stride * threads + 256);
    if (!pool) pool = pd_pool_new();
    if (!memory || !pool) return 1;
    pd_part part = {.kernel = pdt_kernels[which], .buffers = buffers, .symbols = symbols, .tasks = tasks, .pieces = 1};
    pd_job job = {.parts = &part,
                  .count = 1,
                  .threads = threads < tasks ? threads : tasks,
                  .ahead_ns = AHEAD_NS,
                  .scratch = memory,
                  .scratch_stride = stride};
    if (job.threads > 1 && !pd_pool_acquire(pool, job.threads, AHEAD_NS)) job.threads = 1;
    for (int32_t i = 0; i < count; i++) {
        int64_t busy = now_ns(CLOCK_THREAD_CPUTIME_ID), start = now_ns(CLOCK_MONOTONIC);
        if (job.threads > 1)
            pd_pool_run(pool, &job);
        else if (tasks > 0)
            part.kernel(buffers, symbols, 0, tasks, memory);
        nanoseconds[i] = now_ns(CLOCK_MONOTONIC) - start;
        if (job.threads <= 1 && nanoseconds[i] > LONG_NS) nanoseconds[i] = now_ns(CLOCK_THREAD_CPUTIME_ID) - busy;
    }
    if (job.threads > 1) pd_pool_release(pool);
    free(memory);
    return 0;
}
