/* waves.c: distributes the tasks of parallel launches to threads.
 *
 * Every launch uses as many threads as it would use alone. In order of decreasing work, each launch is divided evenly
 * among the threads with the least work so far: large launches use all threads, small ones run in parallel on different
 * threads.
 */
#include <string.h>

#include "internal.h"

/* Returns the thread of 0..n-1 with the least work that is not `taken`; the first of several. */
static int64_t least_loaded(const double *loads, const char *taken, int64_t n) {
    int64_t best = -1;
    for (int64_t t = 0; t < n; t++)
        if (!taken[t] && (best < 0 || loads[t] < loads[best])) best = t;
    return best;
}

static void divide(int64_t tasks, int64_t work, int64_t members, int64_t n, double *loads, int64_t *starts) {
    double cost = tasks ? (double)work / (double)tasks : 0;
    char taken[PD_MAX_THREADS] = {0};
    for (int64_t m = 0; m < members; m++) {
        int64_t t = least_loaded(loads, taken, n), count = tasks / members + (m < tasks % members);
        taken[t] = 1;
        starts[t + 1] = count;
        loads[t] += cost * (double)count;
    }
    for (int64_t t = 0; t < n; t++) starts[t + 1] += starts[t];
}

int64_t pd_plan_wave(const pd_wave *wave, const int64_t *v, int64_t threads, const int64_t *tasks,
                     const int64_t *launch_threads, int64_t *starts) {
    const pd_launch_entry *launches = pd_the_plan.launches;
    int64_t all = 0, work = 0;
    int32_t order[wave->count];
    for (int32_t i = 0; i < wave->count; i++) {
        const pd_launch_entry *l = &launches[wave->first + i];
        int64_t own = tasks[wave->first + i];
        int32_t at = i;
        if (own > 0 && (__builtin_add_overflow(all, own, &all) | __builtin_add_overflow(work, v[l->work], &work)))
            all = work = INT64_MAX / 2;
        for (; at > 0 && v[launches[order[at - 1]].work] < v[l->work]; at--) order[at] = order[at - 1];
        order[at] = wave->first + i;
    }
    int64_t n = pd_max(pd_min(pd_min(threads, all), 1 + work / PD_WORK_PER_THREAD), 1);
    double loads[PD_MAX_THREADS] = {0};
    for (int32_t i = 0; i < wave->count && wave->count > 1; i++) {
        const pd_launch_entry *l = &launches[order[i]];
        int64_t *own = starts + order[i] * (threads + 1);
        memset(own, 0, (size_t)(threads + 1) * sizeof *own);
        divide(pd_max(tasks[order[i]], 0), v[l->work], launch_threads[order[i]], n, loads, own);
    }
    return n;
}
