/* The pool alone, in launches of known length: pool_chain SECONDS [spin | omp].
 *
 * A task is about 250 ns of dependent multiply-adds. Prints for each kind of run its name and p50, p90, p99 in
 * microseconds: a launch of 10, 100 and 1000 us of one thread, alone as a run; a chain of 84 launches of 10 to 200 us (a
 * BERT-base at small L, 8.16 ms of one thread); 1000 launches with nothing to do; 20 launches of 10 ms. `spin`: with a thread of
 * this process that never yields; `omp`: an OpenMP region before every run, whose threads spin on. Two threads.
 */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define THREADS 2
#define MOST 1000000
#define CHAIN 84

static const int LAYER[] = {150, 60, 50, 10, 200, 200, 10}; /* a BERT layer's launches, microseconds of one thread */
static double per_task = 250;                               /* ns */

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void burn(void *const *buffers, const int64_t *symbols, int64_t begin, int64_t end, void *scratch) {
    (void)symbols, (void)scratch;
    for (int64_t i = begin; i < end; i++) {
        volatile float x = 1;
        float y = (float)i;
        for (int k = 0; k < 240; k++) y = __builtin_fmaf(y, y, y);
        x = y;
        (void)x;
        ((float *)buffers[0])[i & 0xffff] += 1;
    }
}

static int ascending(const void *a, const void *b) {
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

static void *spin(void *argument) {
    for (;;) atomic_fetch_add((_Atomic int *)argument, 1);
    return NULL;
}

static void region(void) {
#pragma omp parallel num_threads(THREADS)
    {
        volatile int x = 0;
        for (int i = 0; i < 5000; i++) x += i;
    }
}

static float results[1 << 16];
static void *buffers[] = {results};

static void launch(pd_pool *pool, int64_t us, int64_t ahead_us) {
    int64_t pieces = us * 1000 / THREADS / PD_PIECE_NS;
    pd_part part = {burn, buffers, NULL, (int64_t)((double)us * 1000 / per_task), pd_max(1, pd_min(PD_PIECES, pieces)), NULL};
    pd_job job = {&part, 1, THREADS, ahead_us * 1000, (char *)results, 64};
    pd_pool_run(pool, &job);
}

static void run(pd_pool *pool, const int *us, int count) {
    int64_t all = 0;
    for (int i = 0; i < count; i++) all += us[i];
    int parallel = pd_pool_acquire(pool, THREADS, (all + count) * 1000); /* of no less than 1 us a launch */
    for (int i = 0; i < count; all -= us[i++]) {
        if (parallel) launch(pool, us[i], all);
        else burn(buffers, NULL, 0, (int64_t)((double)us[i] * 1000 / per_task), NULL);
    }
    if (parallel) pd_pool_release(pool);
}

int main(int count, char **arguments) {
    double seconds = count > 1 ? atof(arguments[1]) : 1;
    int omp = count > 2 && !strcmp(arguments[2], "omp");
    double best = 1e9;
    for (int i = 0; i < 50; i++) {
        int64_t t = now();
        burn(buffers, NULL, 0, 400, NULL);
        t = now() - t;
        if ((double)t / 400 < best) best = (double)t / 400;
    }
    per_task = best;
    static _Atomic int ticks; /* counted until the process ends */
    pthread_t spinner;
    if (count > 2 && !strcmp(arguments[2], "spin")) pthread_create(&spinner, NULL, spin, &ticks);
    static int chain[CHAIN], none[1000], long_ones[20];
    for (int i = 0; i < CHAIN; i++) chain[i] = LAYER[i % 7];
    for (int i = 0; i < 20; i++) long_ones[i] = 10000;
    int ten[] = {10}, hundred[] = {100}, thousand[] = {1000};
    struct {
        const char *name;
        const int *us;
        int count;
    } kinds[] = {{"launch_10us", ten, 1}, {"launch_100us", hundred, 1}, {"launch_1ms", thousand, 1},
                 {"chain", chain, CHAIN}, {"1000_empty", none, 1000}, {"20_of_10ms", long_ones, 20}};
    pd_pool *pool = pd_pool_new();
    static int64_t times[MOST];
    for (size_t k = 0; k < sizeof kinds / sizeof *kinds; k++) {
        int64_t begun = now();
        int n = 0;
        while (n < MOST && (n < 3 || (double)(now() - begun) < seconds * 1e9)) {
            if (omp) region();
            else if (n % 16 == 0) usleep(200); /* a host that does something else now and then */
            int64_t t = now();
            run(pool, kinds[k].us, kinds[k].count);
            times[n++] = now() - t;
        }
        qsort(times, (size_t)n, sizeof *times, ascending);
        printf("%s %.1f %.1f %.1f\n", kinds[k].name, (double)times[n / 2] / 1e3, (double)times[n * 9 / 10] / 1e3,
               (double)times[n * 99 / 100] / 1e3);
    }
    pd_pool_free(pool);
    return 0;
}
