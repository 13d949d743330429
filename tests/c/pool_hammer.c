/* Hammers the pool where a test decides what the system answers: pool_hammer MODE SEED LAUNCHES [fork].
 *
 * Several callers run random jobs on shared pools and on short-lived ones of their own. Every task must run exactly once,
 * compute what it computes alone, and keep its thread's scratch to itself. Prints how often workers were moved, and the
 * threads that ran pieces of another's range. MODE:
 *
 *     plain    the system's own answers, random delays
 *     lost     no worker ever seems to have a core: the caller moves every one that it waits for
 *     crowded  workers often find themselves on the caller's core
 *     refused  threads may not be moved (as under seccomp), workers are often on the caller's core
 *     blind    not even the mask can be read
 *     masks    the caller's mask changes all the time, often to one core
 */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define CORES 6 /* that the test pretends there are */

enum { PLAIN, LOST, CROWDED, REFUSED, BLIND, MASKS };
static const char *const MODES[] = {"plain", "lost", "crowded", "refused", "blind", "masks"};
static int mode;
static _Atomic uint64_t seed;
static _Atomic long pins, refusals, pulls;

static uint64_t draw(void) { /* splitmix64, one sequence for all threads: the order differs from run to run anyway */
    uint64_t z = atomic_fetch_add(&seed, 0x9e3779b97f4a7c15u);
    z = (z ^ (z >> 30)) * 0xbf58476d1ce4e5b9u;
    z = (z ^ (z >> 27)) * 0x94d049bb133111ebu;
    return z ^ (z >> 31);
}

static void test_at(const char *point) {
    uint64_t r = draw();
    if (point[0] == 'p') atomic_fetch_add(&pulls, 1);
    if (r % 16 == 0) sched_yield();
    if (r % 61 == 0 || (mode == LOST && point[0] == 'c' && r % 7 == 0)) usleep((unsigned)(r >> 32) % 150);
}

static int test_core(void) { return mode == PLAIN || mode == LOST ? sched_getcpu() : (int)(draw() % 2); }

static int test_allowed(cpu_set_t *mask) {
    if (mode == BLIND) return errno = ENOSYS, -1;
    CPU_ZERO(mask);
    uint64_t r = draw();
    for (int c = 0; c < CORES; c++)
        if (mode != MASKS || (r >> c) % 2) CPU_SET(c, mask);
    if (!CPU_COUNT(mask)) CPU_SET(r % CORES, mask);
    return 0;
}

static int test_pin(pthread_t thread, const cpu_set_t *mask) {
    if (!CPU_COUNT(mask)) abort(); /* nobody asks for that */
    atomic_fetch_add(mode == REFUSED || mode == BLIND ? &refusals : &pins, 1);
    if (mode == REFUSED || mode == BLIND) return EPERM;
    return pthread_setaffinity_np(thread, sizeof *mask, mask), 0; /* cores that are not there are refused: no matter */
}

static int test_used(clockid_t clock, struct timespec *time) {
    if (mode == LOST) return *time = (struct timespec){0}, 0;
    return clock_gettime(clock, time);
}

#define PD_POOL_SEAM
#define PD_AT(point) test_at(point)
#define PD_CORE() test_core()
#define PD_ALLOWED(mask) test_allowed(mask)
#define PD_PIN(thread, mask) test_pin(thread, mask)
#define PD_USED(clock, time) test_used(clock, time)
#define PD_LOOK_NS 50000
#include "pool.c"

#define MOST_TASKS 700
#define MOST_PARTS 4
#define THREADS 9
#define SCRATCH 256

typedef struct {
    uint64_t *results; /* by task */
    _Atomic int *runs; /* by task */
    int64_t salt;
} output;

static uint64_t value(int64_t salt, int64_t task) {
    uint64_t z = (uint64_t)(salt * 1000003 + task) * 0x9e3779b97f4a7c15u;
    return z ^ (z >> 29);
}

static void fill(void *const *buffers, const int64_t *symbols, int64_t begin, int64_t end, void *scratch) {
    output *o = buffers[0];
    uint64_t *own = scratch;
    for (int64_t task = begin; task < end; task++) {
        for (int i = 0; i < SCRATCH / 8; i++) own[i] = value(o->salt, task) + (uint64_t)i;
        if (draw() % 97 == 0) sched_yield();
        for (int i = 0; i < SCRATCH / 8; i++)
            if (own[i] != value(o->salt, task) + (uint64_t)i) abort(); /* two threads in one scratch */
        o->results[task] = own[0];
        atomic_fetch_add_explicit(&o->runs[task], 1, memory_order_relaxed);
    }
    if (end > symbols[0]) abort();
}

/* Random splits of `tasks` among the threads, some of them empty. */
static void split(int64_t tasks, int64_t threads, int64_t *starts) {
    starts[0] = 0;
    for (int64_t t = 1; t < threads; t++) starts[t] = starts[t - 1] + (int64_t)(draw() % (uint64_t)(tasks - starts[t - 1] + 1));
    starts[threads] = tasks;
}

static int run_job(pd_pool *pool, output *outputs, char *scratch) {
    pd_part parts[MOST_PARTS];
    int64_t starts[MOST_PARTS][THREADS + 1], sizes[MOST_PARTS];
    void *buffers[MOST_PARTS][1];
    int64_t threads = 1 + (int64_t)(draw() % THREADS), count = 1 + (int64_t)(draw() % MOST_PARTS);
    for (int64_t k = 0; k < count; k++) {
        output *o = &outputs[k];
        sizes[k] = draw() % 3 ? (int64_t)(draw() % MOST_TASKS) : (int64_t)(draw() % 4);
        o->salt = (int64_t)(draw() % 1000);
        for (int64_t i = 0; i < sizes[k]; i++) o->results[i] = 0, atomic_store(&o->runs[i], 0);
        buffers[k][0] = o;
        split(sizes[k], threads, starts[k]);
        parts[k] = (pd_part){fill, buffers[k], &sizes[k], sizes[k], 1 + (int64_t)(draw() % 9), draw() % 2 ? starts[k] : NULL};
    }
    int64_t ahead = draw() % 2 ? WAKE_NS : 0;
    int parallel = threads > 1 && pd_pool_acquire(pool, threads, ahead);
    pd_job job = {parts, count, parallel ? threads : 1, ahead, scratch, SCRATCH};
    pd_pool_run(pool, &job);
    if (parallel) pd_pool_release(pool);
    for (int64_t k = 0; k < count; k++)
        for (int64_t i = 0; i < sizes[k]; i++)
            if (atomic_load(&outputs[k].runs[i]) != 1 || outputs[k].results[i] != value(outputs[k].salt, i)) {
                fprintf(stderr, "launch %ld task %ld of %ld ran %d times\n", (long)k, (long)i, (long)sizes[k],
                        atomic_load(&outputs[k].runs[i]));
                return 1;
            }
    return 0;
}

static pd_pool *shared[2];
static long launches;

static void *call(void *argument) {
    output outputs[MOST_PARTS];
    for (int k = 0; k < MOST_PARTS; k++)
        outputs[k] = (output){malloc(MOST_TASKS * 8), calloc(MOST_TASKS, sizeof(_Atomic int)), 0};
    char *scratch = aligned_alloc(64, THREADS * SCRATCH);
    uintptr_t wrong = 0;
    pd_pool *of_its_own = NULL;
    for (long i = 0; i < launches && !wrong; i++) {
        pd_pool *pool = shared[draw() % 2];
        if (argument && i % 50 < 10) { /* a program that is closed while others run */
            if (!of_its_own) of_its_own = pd_pool_new();
            pool = of_its_own;
        } else if (of_its_own) {
            pd_pool_free(of_its_own);
            of_its_own = NULL;
        }
        wrong = (uintptr_t)run_job(pool, outputs, scratch);
        if (draw() % 40 == 0) usleep(300); /* workers fall asleep */
    }
    pd_pool_free(of_its_own);
    for (int k = 0; k < MOST_PARTS; k++) free(outputs[k].results), free(outputs[k].runs);
    free(scratch);
    return (void *)wrong;
}

int main(int count, char **arguments) {
    if (count < 4) return 2;
    for (mode = 0; mode < 6 && strcmp(arguments[1], MODES[mode]); mode++) continue;
    if (mode == 6) return 2;
    seed = strtoull(arguments[2], NULL, 0);
    launches = atol(arguments[3]);
    int forks = count > 4 && !strcmp(arguments[4], "fork");
    for (int i = 0; i < 2; i++) shared[i] = pd_pool_new();
    pthread_t callers[3];
    for (uintptr_t i = 0; i < 3; i++) pthread_create(&callers[i], NULL, call, (void *)(i % 2));
    uintptr_t wrong = 0;
    for (int i = 0; forks && i < 5; i++) { /* while the others run */
        usleep(2000);
        pid_t child = fork();
        if (!child) {
            launches = 20;
            _exit(call(NULL) != NULL);
        }
        int status = 0;
        waitpid(child, &status, 0);
        wrong |= (uintptr_t)(status != 0);
    }
    for (int i = 0; i < 3; i++) {
        void *result;
        pthread_join(callers[i], &result);
        wrong |= (uintptr_t)result;
    }
    for (int i = 0; i < 2; i++) pd_pool_free(shared[i]);
    printf("%ld pins, %ld refused, %ld pulls\n", atomic_load(&pins), atomic_load(&refusals), atomic_load(&pulls));
    return wrong != 0;
}
