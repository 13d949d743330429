/* pool.c: a small pool of threads that spin for a while and then sleep.
 *
 * Every worker has one word on a cache line of its own. The caller posts a job by writing POSTED into the words of the
 * workers it needs, works too, and waits until they are IDLE again. A worker takes its share by turning POSTED into
 * RUNNING; shares that no worker has taken when the caller is done with its own the caller takes back, so that a worker
 * without a core holds nobody up. A worker that has waited for SPIN_NS without work sleeps on its word; nobody spins for longer. A run takes the whole pool or none of it: two callers never fight
 * over the same cores, the second runs its launches alone.
 */
#define _GNU_SOURCE
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define SPIN_NS 1000000 /* longer than the host's part of a call, much shorter than what a rival's pool burns */
#define JOIN_SPINS 4000 /* then let a worker that shares the caller's core have it */

enum { IDLE, POSTED, RUNNING, ASLEEP, QUIT };

typedef struct {
    _Alignas(64) _Atomic uint32_t state;
    int64_t id;
    struct pd_pool *pool;
    pthread_t thread;
} worker;

struct pd_pool {
    pd_job job;
    _Atomic int busy;
    int64_t count;
    worker *workers[PD_MAX_THREADS];
    pd_pool *previous, *next;
};

/* All pools, so that a forked child can forget its parent's threads. */
static pthread_mutex_t list_lock = PTHREAD_MUTEX_INITIALIZER;
static pd_pool *list;

static inline void relax(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#else
    __asm__ volatile("" ::: "memory");
#endif
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static void put(worker *w, uint32_t state) {
    if (atomic_exchange_explicit(&w->state, state, memory_order_acq_rel) == ASLEEP) futex_wake(&w->state);
}

/* Where thread t's tasks of a launch begin; T*t/n without T*t. */
static inline int64_t start(const pd_part *p, int64_t t, int64_t threads) {
    return p->starts ? p->starts[t] : p->tasks / threads * t + p->tasks % threads * t / threads;
}

static void share(const pd_job *job, int64_t t) {
    char *scratch = job->scratch + t * job->scratch_stride;
    for (const pd_part *p = job->parts; p < job->parts + job->count; p++) {
        int64_t begin = start(p, t, job->threads), end = start(p, t + 1, job->threads);
        if (begin < end) p->kernel(p->buffers, p->symbols, begin, end, scratch);
    }
}

/* Waits for a share, takes it and returns POSTED; or returns QUIT. */
static uint32_t await_job(worker *w) {
    int64_t limit = 0;
    for (uint32_t spins = 1;; spins++) {
        uint32_t s = atomic_load_explicit(&w->state, memory_order_acquire);
        if (s == QUIT || (s == POSTED && atomic_compare_exchange_strong(&w->state, &s, RUNNING))) return s;
        if (s == ASLEEP) {
            futex_wait(&w->state, ASLEEP);
            limit = 0;
        } else if (spins % 64 == 0) {
            int64_t t = now_ns();
            if (!limit) limit = t + SPIN_NS;
            if (t > limit) {
                uint32_t idle = IDLE;
                atomic_compare_exchange_strong(&w->state, &idle, ASLEEP);
            }
        }
        relax();
    }
}

static void *work(void *argument) {
    worker *w = argument;
    while (await_job(w) == POSTED) {
        share(&w->pool->job, w->id);
        atomic_store_explicit(&w->state, IDLE, memory_order_release);
    }
    return NULL;
}

static void before_fork(void) { pthread_mutex_lock(&list_lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&list_lock); }

static void after_fork_child(void) {
    for (pd_pool *p = list; p; p = p->next) {
        p->count = 0; /* the threads live in the parent only; their few bytes here are lost */
        atomic_store(&p->busy, 0);
    }
    pthread_mutex_init(&list_lock, NULL);
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }

pd_pool *pd_pool_new(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pd_pool *p = calloc(1, sizeof *p);
    if (!p) return NULL;
    pthread_mutex_lock(&list_lock);
    p->next = list;
    if (list) list->previous = p;
    list = p;
    pthread_mutex_unlock(&list_lock);
    return p;
}

void pd_pool_free(pd_pool *p) {
    if (!p) return;
    pthread_mutex_lock(&list_lock);
    if (p->previous) p->previous->next = p->next;
    else list = p->next;
    if (p->next) p->next->previous = p->previous;
    pthread_mutex_unlock(&list_lock);
    for (int64_t i = 0; i < p->count; i++) put(p->workers[i], QUIT);
    for (int64_t i = 0; i < p->count; i++) {
        pthread_join(p->workers[i]->thread, NULL);
        free(p->workers[i]);
    }
    free(p);
}

/* Starts workers until there are `count`, or as many as the system allows. Signals stay with the caller's threads. */
static void grow(pd_pool *p, int64_t count) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (p->count < count) {
        worker *w = aligned_alloc(64, sizeof *w);
        if (!w) break;
        memset(w, 0, sizeof *w);
        w->pool = p;
        w->id = p->count + 1;
        if (pthread_create(&w->thread, NULL, work, w)) {
            free(w);
            break;
        }
        p->workers[p->count++] = w;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

int pd_pool_acquire(pd_pool *p, int64_t threads) {
    if (atomic_exchange_explicit(&p->busy, 1, memory_order_acquire)) return 0;
    if (p->count < threads - 1) grow(p, threads - 1);
    for (int64_t i = 0; i < p->count && i < threads - 1; i++) {
        /* wake it now, so that it spins when the first parallel launch comes */
        uint32_t asleep = ASLEEP;
        if (atomic_load_explicit(&p->workers[i]->state, memory_order_relaxed) == ASLEEP &&
            atomic_compare_exchange_strong(&p->workers[i]->state, &asleep, IDLE))
            futex_wake(&p->workers[i]->state);
    }
    return 1;
}

void pd_pool_release(pd_pool *p) { atomic_store_explicit(&p->busy, 0, memory_order_release); }

void pd_pool_run(pd_pool *p, const pd_job *job) {
    if (job->threads <= 1) {
        for (const pd_part *q = job->parts; q < job->parts + job->count; q++)
            q->kernel(q->buffers, q->symbols, 0, q->tasks, job->scratch);
        return;
    }
    p->job = *job;
    int64_t workers = pd_min(job->threads - 1, p->count); /* fewer when the system gave no more threads */
    for (int64_t i = 0; i < workers; i++) put(p->workers[i], POSTED);
    share(&p->job, 0);
    for (int64_t t = workers + 1; t < job->threads; t++) share(&p->job, t);
    for (int64_t i = 0; i < workers; i++) {
        uint32_t posted = POSTED;
        if (atomic_compare_exchange_strong(&p->workers[i]->state, &posted, IDLE)) share(&p->job, i + 1);
    }
    for (int64_t i = 0; i < workers; i++)
        for (uint32_t spins = 0; atomic_load_explicit(&p->workers[i]->state, memory_order_acquire) == RUNNING; spins++) {
            if (spins < JOIN_SPINS) relax();
            else sched_yield();
        }
}
