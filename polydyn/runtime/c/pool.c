/* pool.c: threads that execute launches in pieces and avoid the core of the caller (docs/adr/0026-threads.md).
 *
 * Every worker has one state word. The caller posts a job by changing IDLE to POSTED; a worker joins by changing it to
 * RUNNING and leaves by changing it to IDLE. So the job's description never changes while a worker reads it, and the
 * caller never waits for a worker that has not joined. The work does not depend on who joins: every thread has a range
 * of pieces, one word [next, end). Its owner takes pieces from the front; other threads that have none left take them
 * from the end.
 *
 * A core can be lost at any time to another process or to threads of another library. A worker that finds itself on the
 * caller's core moves to another one, or sleeps if it is not allowed to move. A caller that waits for a worker without
 * a core moves it to its own core and sleeps until it is done. A worker without work spins for SPIN_NS and then sleeps
 * on its word.
 *
 * A run takes the whole pool or none of it: a second concurrent caller runs its launches alone, on its own core.
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

#define SPIN_NS 200000     /* longer than most host work between two launches */
#define HOP_NS 200000      /* minimum time between two moves of a worker away from the caller */
#define JOIN_NS 10000      /* interval at which the caller checks whether the worker it waits for has a core */
#define WAKE_RUN_NS 20000  /* shorter runs wake no worker: waking takes 2 to 5 us, and the worker as long to start */
#define WAKE_NS 200000     /* remaining work, and minimum interval, for waking workers during a run */

enum { relaxed = memory_order_relaxed, acquire = memory_order_acquire, release = memory_order_release,
       acq_rel = memory_order_acq_rel };

/* A test replaces these system calls (tests/c/pool_hammer.c). */
#ifndef PD_POOL_SEAM
#define PD_AT(point) ((void)0)
#define PD_CORE() sched_getcpu()
#define PD_ALLOWED(mask) sched_getaffinity(0, sizeof *(mask), mask)
#define PD_PIN(thread, mask) pthread_setaffinity_np(thread, sizeof *(mask), mask)
#define PD_USED(clock, time) clock_gettime(clock, time)
#define PD_LOOK_NS 10000000 /* maximum age of the mask of cores that the caller may use */
#endif

/* WAITED: running, and the caller sleeps until it is done. */
enum { IDLE, POSTED, RUNNING, WAITED, ASLEEP, QUIT };

typedef struct {
    _Alignas(64) _Atomic uint32_t state;
    int64_t id, hopped; /* hopped: when it last moved away from the caller */
    struct pd_pool *pool;
    pthread_t thread;
} worker;

/* Unclaimed pieces [next, end); next is in the upper half. */
typedef struct {
    _Alignas(64) _Atomic uint64_t pieces;
} range;

struct pd_pool {
    range ranges[PD_MAX_THREADS];
    pd_job job;
    _Atomic int busy, core, moves; /* core: the caller's, -1: unknown; moves: whether threads can be moved */
    int64_t count, cores;          /* number of workers; number of cores that the caller may use */
    int64_t looked, woken;         /* when the caller's mask was read; when workers were woken */
    pthread_t caller;              /* the owner of the mask */
    void *(*work)(void *);         /* the loop of a thread, in the library that frees the pool */
    pthread_mutex_t moving;        /* guards `allowed` and its copies, the workers' masks */
    cpu_set_t allowed;
    worker *workers[PD_MAX_THREADS];
    pd_pool *previous, *next;
};

_Thread_local int32_t pd_thread;

/* All pools, so that a forked child can discard its parent's threads. */
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

static int64_t nanoseconds(const struct timespec *t) { return (int64_t)t->tv_sec * 1000000000 + t->tv_nsec; }

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return nanoseconds(&t);
}

static void futex_wait(_Atomic uint32_t *word, uint32_t value) {
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
}

static void futex_wake(_Atomic uint32_t *word) { syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0); }

static int turn(worker *w, uint32_t from, uint32_t to) {
    return atomic_compare_exchange_strong_explicit(&w->state, &from, to, acq_rel, acquire);
}

static void put(worker *w, uint32_t state) {
    if (atomic_exchange_explicit(&w->state, state, acq_rel) == ASLEEP) futex_wake(&w->state);
}

/* ---- cores ---- */

/* Returns 1, or 0 if the system refuses; it is then not asked again. */
static int pin(pd_pool *p, pthread_t thread, const cpu_set_t *mask) {
    if (!atomic_load_explicit(&p->moves, relaxed)) return 0;
    if (!PD_PIN(thread, mask)) return 1;
    atomic_store_explicit(&p->moves, 0, relaxed);
    return 0;
}

/* Moves the calling worker to any core but this one; later the system may move it freely. */
static int hop(worker *w, int core) {
    pd_pool *p = w->pool;
    pthread_mutex_lock(&p->moving);
    cpu_set_t others = p->allowed;
    if (core >= 0) CPU_CLR(core, &others);
    int moved = CPU_COUNT(&others) && pin(p, pthread_self(), &others);
    pin(p, pthread_self(), &p->allowed);
    pthread_mutex_unlock(&p->moving);
    w->hopped = now_ns();
    return moved;
}

/* Whether the worker is on another core than the caller, or has just moved to one. */
static int out_of_the_way(worker *w) {
    int core = PD_CORE();
    if (core < 0 || core != atomic_load_explicit(&w->pool->core, relaxed)) return 1;
    return now_ns() >= w->hopped + HOP_NS && hop(w, core);
}

/* Reads which cores the caller may use; the workers may use the same. */
static void look(pd_pool *p) {
    int64_t t = now_ns();
    pthread_t caller = pthread_self();
    if (p->looked && t < p->looked + PD_LOOK_NS && pthread_equal(caller, p->caller)) return;
    p->looked = t;
    p->caller = caller;
    cpu_set_t mask;
    if (PD_ALLOWED(&mask)) {
        p->cores = PD_MAX_THREADS; /* unknown */
        atomic_store_explicit(&p->moves, 0, relaxed);
        return;
    }
    p->cores = CPU_COUNT(&mask);
    if (CPU_EQUAL(&mask, &p->allowed)) return;
    pthread_mutex_lock(&p->moving);
    p->allowed = mask;
    for (int64_t i = 0; i < p->count; i++) pin(p, p->workers[i]->thread, &mask);
    pthread_mutex_unlock(&p->moving);
}

/* Gives the worker that the caller waits for the caller's core; the caller then sleeps until it is done. */
static void pull(pd_pool *p, worker *w) {
    int core = PD_CORE();
    cpu_set_t here;
    CPU_ZERO(&here);
    if (core >= 0) CPU_SET(core, &here);
    int moved = core >= 0 && pin(p, w->thread, &here);
    PD_AT("pulled");
    if (turn(w, RUNNING, WAITED) || !moved) return;
    pthread_mutex_lock(&p->moving); /* it finished in the meantime and does not know that it was moved */
    pin(p, w->thread, &p->allowed);
    pthread_mutex_unlock(&p->moving);
}

/* ---- pieces ---- */

/* Returns the begin of part i when n is split into `parts` nearly equal parts: n*i/parts without computing n*i. */
static inline int64_t cut(int64_t n, int64_t i, int64_t parts) { return n / parts * i + n % parts * i / parts; }

/* Returns the first task of thread t in a launch. */
static inline int64_t start(const pd_part *p, int64_t t, int64_t threads) {
    return p->starts ? p->starts[t] : cut(p->tasks, t, threads);
}

/* Claims a piece of a range; returns -1 if none is left. */
static int64_t claim(range *r, int tail) {
    uint64_t word = atomic_load_explicit(&r->pieces, relaxed);
    for (;;) {
        uint32_t next = (uint32_t)(word >> 32), end = (uint32_t)word;
        if (next >= end) return -1;
        uint64_t rest = tail ? word - 1 : word + (UINT64_C(1) << 32);
        if (atomic_compare_exchange_weak_explicit(&r->pieces, &word, rest, relaxed, relaxed))
            return tail ? end - 1 : next;
    }
}

/* Runs a piece of the tasks of thread `owner`. The pieces of a job's launches are numbered consecutively. */
static void run_piece(const pd_job *job, int64_t owner, int64_t piece, char *scratch) {
    const pd_part *p = job->parts;
    for (; piece >= p->pieces; p++) piece -= p->pieces;
    int64_t first = start(p, owner, job->threads), count = start(p, owner + 1, job->threads) - first;
    int64_t begin = first + cut(count, piece, p->pieces), end = first + cut(count, piece + 1, p->pieces);
    PD_AT("claimed");
    if (begin < end) p->kernel(p->buffers, p->symbols, begin, end, scratch);
}

/* Runs thread t's pieces, then unclaimed pieces of the others. */
static void share(pd_pool *p, int64_t t) {
    const pd_job *job = &p->job;
    char *scratch = job->scratch + t * job->scratch_stride;
    for (int64_t i = 0; i < job->threads; i++) {
        int64_t owner = t + i < job->threads ? t + i : t + i - job->threads;
        for (int64_t piece; (piece = claim(&p->ranges[owner], i > 0)) >= 0;) run_piece(job, owner, piece, scratch);
    }
}

/* ---- workers ---- */

/* Waits for a job, joins it and returns RUNNING; or returns QUIT. */
static uint32_t await_job(worker *w) {
    int64_t limit = 0;
    for (uint32_t spins = 1;; spins++) {
        uint32_t s = atomic_load_explicit(&w->state, acquire);
        if (s == QUIT) return s;
        if (s == POSTED) {
            uint32_t next = out_of_the_way(w) ? RUNNING : ASLEEP;
            if (turn(w, POSTED, next) && next == RUNNING) return next;
        } else if (s == ASLEEP) {
            futex_wait(&w->state, ASLEEP);
            limit = 0;
        } else if (spins % 64 == 0) {
            int64_t t = now_ns();
            if (!limit) limit = t + SPIN_NS;
            if (t > limit || !out_of_the_way(w)) turn(w, IDLE, ASLEEP);
        }
        relax();
    }
}

static void *work(void *argument) {
    worker *w = argument;
    pd_thread = (int32_t)w->id;
    while (await_job(w) == RUNNING) {
        PD_AT("joined");
        share(w->pool, w->id);
        PD_AT("leaving");
        if (atomic_exchange_explicit(&w->state, IDLE, acq_rel) != WAITED) continue;
        futex_wake(&w->state);
        hop(w, PD_CORE()); /* it was moved to the caller's core, which the caller needs again */
    }
    return NULL;
}

/* ---- pools ---- */

static void before_fork(void) { pthread_mutex_lock(&list_lock); }
static void after_fork_parent(void) { pthread_mutex_unlock(&list_lock); }

static void after_fork_child(void) {
    for (pd_pool *p = list; p; p = p->next) {
        p->count = 0; /* the threads exist only in the parent; their few bytes here are lost */
        atomic_store(&p->busy, 0);
        pthread_mutex_init(&p->moving, NULL);
    }
    pthread_mutex_init(&list_lock, NULL);
}

static void watch_forks(void) { pthread_atfork(before_fork, after_fork_parent, after_fork_child); }

pd_pool *pd_pool_new(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, watch_forks);
    pd_pool *p = aligned_alloc(64, sizeof *p);
    if (!p) return NULL;
    memset(p, 0, sizeof *p);
    p->work = work;
    pthread_mutex_init(&p->moving, NULL);
    atomic_store(&p->core, -1);
    atomic_store(&p->moves, 1);
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
    pthread_mutex_destroy(&p->moving);
    free(p);
}

/* Starts workers until there are `count`, or as many as the system allows. Workers block all signals. */
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
        if (pthread_create(&w->thread, NULL, p->work, w)) { /* a borrower of the pool may be unloaded before it */
            free(w);
            break;
        }
        p->workers[p->count++] = w;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* ---- runs ---- */

/* Returns the number of workers for so many threads: at most one for each core besides the caller's, and at most all
 * that were started. */
static int64_t workers_for(const pd_pool *p, int64_t threads) {
    return pd_min(p->count, pd_min(threads, p->cores) - 1);
}

int pd_pool_acquire(pd_pool *p, int64_t threads, int64_t work_ns) {
    if (atomic_exchange_explicit(&p->busy, 1, acquire)) return 0;
    look(p);
    if (p->count < pd_min(threads, p->cores) - 1) grow(p, pd_min(threads, p->cores) - 1);
    atomic_store_explicit(&p->core, PD_CORE(), relaxed);
    int64_t workers = workers_for(p, threads);
    for (int64_t i = 0; i < workers && work_ns >= WAKE_RUN_NS; i++) {
        /* early, so that it is spinning when the first parallel launch starts */
        if (turn(p->workers[i], ASLEEP, IDLE)) futex_wake(&p->workers[i]->state);
    }
    if (workers <= 0) pd_pool_release(p);
    return workers > 0;
}

void pd_pool_release(pd_pool *p) { atomic_store_explicit(&p->busy, 0, release); }

/* Posts the job. Sleeping workers are only woken if much work remains and none was woken recently. */
static void post(pd_pool *p, int64_t workers) {
    int wakes = 0;
    for (int64_t i = 0; i < workers; i++) {
        if (turn(p->workers[i], IDLE, POSTED)) continue;
        if (!wakes) {
            int64_t t = p->job.ahead_ns >= WAKE_NS ? now_ns() : 0;
            wakes = t && t >= p->woken + WAKE_NS ? 1 : -1;
            if (wakes > 0) p->woken = t;
        }
        if (wakes > 0) put(p->workers[i], POSTED);
    }
}

/* Waits until a worker has left the job. */
static void join(pd_pool *p, worker *w) {
    clockid_t clock;
    int64_t limit = 0, before = -1;
    for (uint32_t spins = 1;; spins++) {
        uint32_t s = atomic_load_explicit(&w->state, acquire);
        if (s != RUNNING && s != WAITED) return;
        if (s == WAITED) {
            futex_wait(&w->state, WAITED);
        } else if (spins % 32 == 0) {
            int64_t t = now_ns();
            if (!limit) limit = t + JOIN_NS;
            if (t < limit) continue;
            struct timespec used = {0};
            if (pthread_getcpuclockid(w->thread, &clock) || PD_USED(clock, &used)) used = (struct timespec){0};
            if (before >= 0 && nanoseconds(&used) < before + JOIN_NS / 2) pull(p, w); /* it has no core */
            before = nanoseconds(&used);
            limit = t + JOIN_NS;
        }
        relax();
    }
}

void pd_pool_run(pd_pool *p, const pd_job *job) {
    if (job->threads <= 1) {
        for (const pd_part *q = job->parts; q < job->parts + job->count; q++)
            q->kernel(q->buffers, q->symbols, 0, q->tasks, job->scratch);
        return;
    }
    p->job = *job;
    uint64_t pieces = 0;
    for (const pd_part *q = job->parts; q < job->parts + job->count; q++) pieces += (uint64_t)q->pieces;
    for (int64_t t = 0; t < job->threads; t++)
        atomic_store_explicit(&p->ranges[t].pieces, pieces, relaxed);
    atomic_store_explicit(&p->core, PD_CORE(), relaxed);
    int64_t workers = workers_for(p, job->threads);
    post(p, workers);
    share(p, 0);
    for (int64_t i = 0; i < workers; i++)
        if (!turn(p->workers[i], POSTED, IDLE)) join(p, p->workers[i]);
}
