/* Read bandwidth: argv[1] threads, each sums its share of an array of argv[2] KiB, repeatedly; by default the array
   is far larger than the caches, so that the bandwidth is memory's. A share is read from end to end, or alternately at 4 or 16 positions,
   which use more prefetchers. Prints GB/s (1e9 bytes) of all threads together, the best of all rounds. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t vec __attribute__((vector_size(64)));

enum { EACH = 7, ROUNDS = 3 * EACH };
static const size_t streams_of[ROUNDS / EACH] = {1, 4, 16};
static const size_t ENOUGH = (size_t)512 << 20; /* bytes that a round reads at least */
static size_t passes;
static pthread_barrier_t gate;
static volatile uint64_t sink;

/* Each thread reads the clock itself: on a busy machine the main thread would start its clock too late. */
struct share { const vec *first; size_t count; double start[ROUNDS], end[ROUNDS]; };

static void sum(const struct share *s, size_t streams)
{
    vec a = {0}, b = {0}, c = {0}, d = {0};
    size_t length = s->count / streams;
    for (size_t i = 0; streams == 1 && i < length; i += 4) {
        a += s->first[i]; b += s->first[i + 1]; c += s->first[i + 2]; d += s->first[i + 3];
    }
    for (size_t i = 0; streams > 1 && i < length; i += 4)
        for (size_t k = 0; k < streams; k++) {
            const vec *at = s->first + k * length + i;
            a += at[0]; b += at[1]; c += at[2]; d += at[3];
        }
    vec all = a + b + c + d;
    sink = all[0] + all[7];
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec + 1e-9 * t.tv_nsec;
}

static void *worker(void *argument)
{
    struct share *mine = argument;
    for (int r = 0; r < ROUNDS; r++) {
        pthread_barrier_wait(&gate);
        mine->start[r] = now();
        for (size_t p = 0; p < passes; p++) {
            sum(mine, streams_of[r / EACH]);
            __asm__ volatile("" : : : "memory"); /* every pass reads again */
        }
        mine->end[r] = now();
    }
    return 0;
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    size_t bytes = argc > 2 ? (size_t)atol(argv[2]) << 10 : ENOUGH;
    size_t count = bytes / sizeof(vec) / threads / 64 * 64;
    double best = 1e30;
    vec *memory = aligned_alloc(64, bytes);
    struct share *shares = calloc(threads, sizeof *shares);
    pthread_t *ids = calloc(threads, sizeof *ids);
    if (!memory || !shares || !ids) return 1;
    memset(memory, 1, bytes);
    passes = (ENOUGH + bytes - 1) / bytes;
    pthread_barrier_init(&gate, 0, threads);
    for (int t = 0; t < threads; t++) {
        shares[t] = (struct share){.first = memory + t * count, .count = count};
        if (pthread_create(&ids[t], 0, worker, &shares[t])) return 1;
    }
    for (int t = 0; t < threads; t++) pthread_join(ids[t], 0);
    for (int r = 0; r < ROUNDS; r++) {
        double first = 1e30, last = 0;
        for (int t = 0; t < threads; t++) {
            if (shares[t].start[r] < first) first = shares[t].start[r];
            if (shares[t].end[r] > last) last = shares[t].end[r];
        }
        if (last - first < best) best = last - first;
    }
    printf("%.3f\n", (double)count * sizeof(vec) * threads * passes / best * 1e-9);
    return 0;
}
