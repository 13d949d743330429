/* Read bandwidth of memory: argv[1] threads, each sums its share of an array far larger than the caches.
   Prints GB/s (1e9 bytes) of all threads together, the best of several rounds. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef uint64_t vec __attribute__((vector_size(64)));

enum { ROUNDS = 7 };
static const size_t BYTES = (size_t)512 << 20;
static pthread_barrier_t gate;
static volatile uint64_t sink;

struct share { const vec *first; size_t count; };

static void sum(const struct share *s)
{
    vec a = {0}, b = {0}, c = {0}, d = {0};
    for (size_t i = 0; i + 4 <= s->count; i += 4) {
        a += s->first[i]; b += s->first[i + 1]; c += s->first[i + 2]; d += s->first[i + 3];
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
    for (int r = 0; r < ROUNDS; r++) {
        pthread_barrier_wait(&gate);
        sum(argument);
        pthread_barrier_wait(&gate);
    }
    return 0;
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    size_t count = BYTES / sizeof(vec) / threads / 4 * 4;
    double best = 1e30;
    vec *memory = aligned_alloc(64, BYTES);
    struct share *shares = calloc(threads, sizeof *shares);
    pthread_t id;
    if (!memory || !shares) return 1;
    memset(memory, 1, BYTES);
    pthread_barrier_init(&gate, 0, threads + 1);
    for (int t = 0; t < threads; t++) {
        shares[t] = (struct share){memory + t * count, count};
        if (pthread_create(&id, 0, worker, &shares[t])) return 1;
    }
    for (int r = 0; r < ROUNDS; r++) {
        pthread_barrier_wait(&gate);
        double start = now();
        pthread_barrier_wait(&gate);
        double seconds = now() - start;
        if (seconds < best) best = seconds;
    }
    printf("%.3f\n", (double)count * sizeof(vec) * threads / best * 1e-9);
    return 0;
}
