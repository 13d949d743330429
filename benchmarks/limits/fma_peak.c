/* Peak of fp32 fused multiply-adds: argv[1] threads, each with enough independent accumulators to hide the latency.
   Prints GFLOP/s of all threads together, the best of several rounds. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#if defined(__AVX512F__)
#define LANES 16
#elif defined(__AVX__)
#define LANES 8
#else
#define LANES 4
#endif
typedef float vec __attribute__((vector_size(LANES * sizeof(float))));

enum { CHAINS = 12, STEPS = 1 << 22, ROUNDS = 7 };
static pthread_barrier_t gate;
static volatile float sink;

static void chains(void)
{
    /* Unequal starts: equal chains would be computed once. */
    vec a0 = {0}, a1 = {1}, a2 = {2}, a3 = {3}, a4 = {4}, a5 = {5};
    vec a6 = {6}, a7 = {7}, a8 = {8}, a9 = {9}, aa = {10}, ab = {11};
    vec x, y;
    for (int i = 0; i < LANES; i++) { x[i] = 0.5f; y[i] = 0.25f; }
    for (int s = 0; s < STEPS; s++) {
        /* The compiler cannot see what the empty statement does to x and y, so no step can be folded into another. */
        __asm__ volatile("" : "+x"(x), "+x"(y));
        a0 = a0 * x + y; a1 = a1 * x + y; a2 = a2 * x + y; a3 = a3 * x + y;
        a4 = a4 * x + y; a5 = a5 * x + y; a6 = a6 * x + y; a7 = a7 * x + y;
        a8 = a8 * x + y; a9 = a9 * x + y; aa = aa * x + y; ab = ab * x + y;
    }
    vec all = a0 + a1 + a2 + a3 + a4 + a5 + a6 + a7 + a8 + a9 + aa + ab;
    sink = all[0];
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

/* Each thread reads the clock itself: on a busy machine the main thread would start its clock too late. */
struct span { double start[ROUNDS], end[ROUNDS]; };

static void *worker(void *argument)
{
    struct span *mine = argument;
    for (int r = 0; r < ROUNDS; r++) {
        pthread_barrier_wait(&gate);
        mine->start[r] = now();
        chains();
        mine->end[r] = now();
    }
    return 0;
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    double best = 1e30;
    pthread_t *ids = calloc(threads, sizeof *ids);
    struct span *spans = calloc(threads, sizeof *spans);
    if (!ids || !spans) return 1;
    pthread_barrier_init(&gate, 0, threads);
    for (int t = 0; t < threads; t++)
        if (pthread_create(&ids[t], 0, worker, &spans[t])) return 1;
    for (int t = 0; t < threads; t++) pthread_join(ids[t], 0);
    for (int r = 0; r < ROUNDS; r++) {
        double first = 1e30, last = 0;
        for (int t = 0; t < threads; t++) {
            if (spans[t].start[r] < first) first = spans[t].start[r];
            if (spans[t].end[r] > last) last = spans[t].end[r];
        }
        if (last - first < best) best = last - first;
    }
    printf("%.3f\n", 2.0 * LANES * CHAINS * STEPS * threads / best * 1e-9);
    return 0;
}
