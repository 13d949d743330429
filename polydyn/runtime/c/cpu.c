/* cpu.c: runs a program on the CPU: the arena, the threads and the launch loop. */
#define _GNU_SOURCE
#include <errno.h>
#include <inttypes.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>

#include "internal.h"

/* The CPU part of a context. */
typedef struct {
    int64_t *symbols; /* of the chosen candidates, gathered from values */
    int64_t *tasks, *threads, *wave_threads;
    int64_t *pieces;  /* per launch: pieces that each thread's tasks are divided into */
    int64_t *ahead;   /* per wave: estimated nanoseconds for one thread to run it and everything after it */
    int64_t *starts;  /* per launch of a parallel wave, threads + 1 values: the first task of each thread */
    pd_part *parts;   /* of the current wave */
    void **arguments; /* of the current wave, gathered from buffers */
    int64_t most_threads;
} pd_cpu;

static const pd_plan *const plan = &pd_the_plan;
const int64_t pd_arena_align = 64;
#define HUGE_PAGE (2 << 20)

/* Linux gives a process the AMX tile state only on request (arch/x86, xstate). */
#if defined(__linux__) && defined(__AMX_TILE__)
#include <sys/syscall.h>
#include <unistd.h>
#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18
static int32_t ask_for_tiles(void) {
    if (!syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA)) return PD_OK;
    return pd_fail(PD_USAGE, "the system refuses this process the matrix unit (AMX): %s. Compile for cpu:avx512, or allow"
                             " arch_prctl(ARCH_REQ_XCOMP_PERM), which Linux has from 5.16 on", strerror(errno));
}
#else
static int32_t ask_for_tiles(void) { return PD_OK; } /* the emulation needs no permission */
#endif

int32_t pd_place_program(pd_program *p) {
    int32_t code = plan->amx ? ask_for_tiles() : PD_OK;
    return code != PD_OK ? code : (p->place = pd_pool_new()) ? PD_OK : PD_MEMORY;
}
void pd_displace_program(pd_program *p) {
    if (!p->borrowed) pd_pool_free(p->place);
}

PD_EXPORT void pd_borrow_threads(pd_program *p, const pd_program *lender) {
    pd_displace_program(p);
    p->place = lender->place;
    p->borrowed = 1;
}

int32_t pd_place_context(pd_context *c) {
    pd_cpu *x = c->place = calloc(1, sizeof *x);
    if (!x) return pd_fail(PD_MEMORY, "out of memory");
    x->symbols = calloc((size_t)plan->launch_symbol_count + 1, sizeof *x->symbols);
    x->tasks = calloc((size_t)plan->launch_count + 1, sizeof *x->tasks);
    x->threads = calloc((size_t)plan->launch_count + 1, sizeof *x->threads);
    x->wave_threads = calloc((size_t)plan->wave_count + 1, sizeof *x->wave_threads);
    x->pieces = calloc((size_t)plan->launch_count + 1, sizeof *x->pieces);
    x->ahead = calloc((size_t)plan->wave_count + 1, sizeof *x->ahead);
    x->starts = calloc((size_t)plan->launch_count + 1, ((size_t)c->threads + 1) * sizeof *x->starts);
    x->parts = calloc((size_t)plan->launch_count + 1, sizeof *x->parts);
    x->arguments = calloc((size_t)plan->launch_buffer_count + 1, sizeof *x->arguments);
    int sized = x->symbols && x->tasks && x->threads && x->wave_threads && x->pieces && x->ahead && x->starts;
    return sized && x->parts && x->arguments ? PD_OK : pd_fail(PD_MEMORY, "out of memory");
}

void pd_displace_context(pd_context *c) {
    pd_cpu *x = c->place;
    free(c->arena);
    if (!x) return;
    free(x->symbols);
    free(x->tasks);
    free(x->threads);
    free(x->wave_threads);
    free(x->pieces);
    free(x->ahead);
    free(x->starts);
    free(x->parts);
    free(x->arguments);
    free(x);
}

/* Uses huge pages if the system provides them: they save a third of the time that a large tensor takes to pass the
 * caches. */
static char *new_arena(size_t bytes) {
    size_t align = bytes >= HUGE_PAGE ? HUGE_PAGE : PD_PAGE;
    char *arena = aligned_alloc(align, (bytes + align - 1) / align * align);
#ifdef MADV_HUGEPAGE
    if (arena && align == HUGE_PAGE) madvise(arena, bytes, MADV_HUGEPAGE);
#endif
    return arena;
}

/* Estimates the nanoseconds that one thread takes for a launch. */
static int64_t launch_ns(const pd_launch_entry *l, const int64_t *v) {
    int64_t most = v[l->flops] < INT64_MAX / PD_BYTES_PER_FLOP ? v[l->flops] * PD_BYTES_PER_FLOP : INT64_MAX;
    return pd_max(pd_max(v[l->flops] / PD_FLOPS_PER_NS, pd_min(v[l->bytes], most) / PD_BYTES_PER_NS), 0);
}

int64_t pd_place_scratch(pd_context *c) {
    pd_cpu *x = c->place;
    const int64_t *v = c->values;
    int64_t most = 0;
    for (int32_t k = 0; k < plan->launch_count; k++) {
        const pd_candidate *n = pd_chosen(c, k);
        x->tasks[k] = n ? v[n->tasks] : 0;
        int64_t threads = pd_min(pd_min(c->threads, x->tasks[k]), 1 + v[plan->launches[k].work] / PD_WORK_PER_THREAD);
        x->threads[k] = pd_max(threads, 1);
        if (!n) continue;
        for (int32_t s = n->first_symbol; s < n->first_symbol + n->symbols; s++)
            x->symbols[s] = v[plan->launch_symbols[s]];
        most = pd_max(most, v[n->scratch]);
    }
    return most;
}

/* Computes the number of threads and pieces for each wave and launch at these sizes. */
static void share_out(pd_context *c) {
    pd_cpu *x = c->place;
    const int64_t *v = c->values;
    x->most_threads = 1;
    for (int32_t w = 0; w < plan->wave_count; w++) {
        x->wave_threads[w] = pd_plan_wave(&plan->waves[w], c->values, c->threads, x->tasks, x->threads, x->starts);
        x->most_threads = pd_max(x->most_threads, x->wave_threads[w]);
    }
    int64_t ahead = 0;
    for (int32_t w = plan->wave_count; w-- > 0; x->ahead[w] = ahead)
        for (int32_t k = plan->waves[w].first; k < plan->waves[w].first + plan->waves[w].count; k++) {
            int64_t ns = launch_ns(&plan->launches[k], v);
            x->pieces[k] = pd_max(1, pd_min(PD_PIECES, ns / x->threads[k] / PD_PIECE_NS));
            ahead = pd_min(ahead, INT64_MAX - ns) + ns;
        }
}

int32_t pd_place_sizes(pd_context *c) {
    share_out(c);
    if (c->planned_bytes <= c->arena_bytes) return PD_OK;
    char *arena = new_arena((size_t)c->planned_bytes);
    if (!arena) return pd_fail(PD_MEMORY, "this call needs %" PRId64 " bytes for intermediates", c->planned_bytes);
    free(c->arena);
    c->arena = arena;
    c->arena_bytes = c->planned_bytes;
    return PD_OK;
}

/* ---- pd_run ---- */

static int32_t take_inputs(pd_context *c, const void *const *inputs, void **dense) {
    const int64_t *dims = c->dims, *strides = c->strides;
    for (int32_t i = 0; i < plan->input_count; i++) {
        int64_t item = pd_item_bytes[plan->inputs[i].dtype];
        if ((uintptr_t)inputs[i] % (uintptr_t)item)
            return pd_fail(PD_INPUT, "input '%s' is not aligned to its elements", plan->inputs[i].name);
        dense[i] = (void *)inputs[i];
        if (c->staged[i] >= 0) {
            dense[i] = c->arena + c->staged[i];
            pd_copy_strided(dense[i], inputs[i], plan->inputs[i].rank, dims, strides, item);
            c->copied_bytes += pd_dense_bytes(&plan->inputs[i], dims);
        }
        dims += plan->inputs[i].rank;
        strides += plan->inputs[i].rank;
    }
    return PD_OK;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

/* Makes launch k a part of a job; returns 0 if there is nothing to do. */
static int prepare(pd_context *c, int32_t k, void *const *inputs, void *const *outputs, pd_part *part) {
    const pd_cpu *x = c->place;
    const pd_launch_entry *l = &plan->launches[k];
    const pd_candidate *n = pd_chosen(c, k);
    if (!n || x->tasks[k] <= 0) return 0;
    if (pd_skipped(l, inputs, outputs)) return 0; /* see pd_check_shared */
    c->copied_bytes += c->values[l->copied];
    void **arguments = x->arguments + n->first_buffer;
    for (int32_t b = 0; b < n->buffers; b++) arguments[b] = c->buffers[plan->launch_buffers[n->first_buffer + b]];
    *part = (pd_part){.kernel = plan->kernels[n->kernel].kernel,
                      .buffers = arguments,
                      .symbols = x->symbols + n->first_symbol,
                      .tasks = x->tasks[k],
                      .pieces = x->pieces[k]};
    return 1;
}

/* Runs the parts of wave w in one parallel region. */
static void run_parts(pd_context *c, int32_t w, int64_t count, int64_t threads) {
    const pd_cpu *x = c->place;
    pd_job job = {.parts = x->parts,
                  .count = count,
                  .threads = threads,
                  .ahead_ns = x->ahead[w],
                  .scratch = c->arena + c->scratch_offset,
                  .scratch_stride = c->scratch_stride};
    if (count) pd_pool_run(c->program->place, &job);
}

/* Checks the index tensors that launch k is the first to read; after the last launch, those assigned to the end. `next`
 * is the first check not yet made. */
static int32_t check_indices(const pd_context *c, int32_t k, int32_t *next) {
    int32_t code = PD_OK;
    for (; *next < plan->index_check_count && plan->index_checks[*next].launch == k && code == PD_OK; ++*next)
        code = pd_check_index(c, &plan->index_checks[*next], c->buffers[plan->index_checks[*next].buffer]);
    return code;
}

/* The output of a traced run. */
typedef struct {
    pd_span *spans;
    int64_t room;
    _Atomic int64_t count;
} pd_notes;

/* A launch of a traced run. Its kernel is `note`, which receives this instead of buffers. */
typedef struct {
    pd_kernel *kernel;
    void *const *buffers;
    pd_notes *notes;
    int32_t launch;
} pd_noted;

static void note(void *const *noted, const int64_t *symbols, int64_t begin, int64_t end, void *scratch) {
    const pd_noted *n = (const pd_noted *)noted;
    pd_span span = {.launch = n->launch, .thread = pd_thread, .first = begin, .count = end - begin, .begin = now_ns()};
    n->kernel(n->buffers, symbols, begin, end, scratch);
    span.end = now_ns();
    int64_t at = atomic_fetch_add(&n->notes->count, 1);
    if (at < n->notes->room) n->notes->spans[at] = span;
}

typedef struct {
    void *const *inputs, *const *outputs;
    int parallel;
    int32_t next_check;
    int64_t *nanoseconds; /* per launch; NULL if no times are wanted */
    pd_noted *noted;      /* NULL if no trace is wanted; otherwise `notes` of each is set */
} pd_call;

/* Makes the kernel of launch k record when it runs. */
static void trace(pd_part *part, pd_noted *noted, int32_t k) {
    noted->kernel = part->kernel;
    noted->buffers = part->buffers;
    noted->launch = k;
    part->kernel = note;
    part->buffers = (void *const *)noted;
}

/* Runs one wave. If times are wanted, its launches run one after the other. */
static int32_t run_wave(pd_context *c, int32_t w, pd_call *call) {
    const pd_wave *wave = &plan->waves[w];
    const pd_cpu *x = c->place;
    int64_t count = 0;
    int32_t code = PD_OK;
    for (int32_t k = wave->first; k < wave->first + wave->count && code == PD_OK; k++) {
        int64_t begun = call->nanoseconds ? now_ns() : 0;
        code = check_indices(c, k, &call->next_check);
        if (code != PD_OK || !prepare(c, k, call->inputs, call->outputs, &x->parts[count])) continue;
        if (call->noted) trace(&x->parts[count], &call->noted[k], k);
        if (call->nanoseconds) run_parts(c, w, 1, call->parallel ? x->threads[k] : 1);
        else if (wave->count > 1) x->parts[count].starts = x->starts + k * (c->threads + 1);
        count += !call->nanoseconds;
        if (call->nanoseconds) call->nanoseconds[k] = now_ns() - begun;
    }
    if (code == PD_OK) run_parts(c, w, count, call->parallel ? x->wave_threads[w] : 1);
    return code;
}

static int32_t run(pd_context *c, const void *const *inputs, void *const *outputs, int64_t *nanoseconds,
                   pd_noted *noted) {
    if (!c->ready) return pd_fail(PD_USAGE, "pd_run needs a successful pd_shapes before it");
    void *dense[plan->input_count + 1];
    int32_t code = take_inputs(c, inputs, dense);
    if (code == PD_OK) code = pd_check_shared(c, dense, outputs);
    if (code != PD_OK) return code;
    for (int32_t b = 0; b < plan->buffer_count; b++) {
        const pd_buffer *p = &plan->buffers[b];
        if (p->role == PD_INPUT_ROLE) c->buffers[b] = dense[p->index];
        if (p->role == PD_OUTPUT_ROLE) c->buffers[b] = outputs[p->index];
    }
    const pd_cpu *x = c->place;
    int64_t threads = x->most_threads;
    int parallel = threads > 1 && pd_pool_acquire(c->program->place, threads, x->ahead[0]);
    pd_call call = {.inputs = dense, .outputs = outputs, .parallel = parallel, .nanoseconds = nanoseconds,
                    .noted = noted};
    if (nanoseconds) memset(nanoseconds, 0, (size_t)plan->launch_count * sizeof *nanoseconds);
    for (int32_t w = 0; w < plan->wave_count && code == PD_OK; w++) code = run_wave(c, w, &call);
    if (code == PD_OK) code = check_indices(c, plan->launch_count, &call.next_check);
    if (parallel) pd_pool_release(c->program->place);
    if (code != PD_OK) return code;
    for (int32_t k = 0; k < plan->copy_count; k++) {
        const pd_copy *p = &plan->copies[k];
        if (c->values[p->bytes] <= 0) continue;
        memcpy(outputs[p->output], c->buffers[p->buffer], (size_t)c->values[p->bytes]);
        c->copied_bytes += c->values[p->bytes];
    }
    return PD_OK;
}

PD_EXPORT int32_t pd_run(pd_context *c, const void *const *inputs, void *const *outputs) {
    if (c->ready) pd_count_run(c);
    return run(c, inputs, outputs, NULL, NULL);
}

PD_EXPORT int32_t pd_profile(pd_context *c, const void *const *inputs, void *const *outputs, int64_t *nanoseconds) {
    return run(c, inputs, outputs, nanoseconds, NULL);
}

PD_EXPORT int32_t pd_trace(pd_context *c, const void *const *inputs, void *const *outputs, pd_span *spans, int64_t room,
                           int64_t *count) {
    pd_notes notes = {.spans = spans, .room = room};
    pd_noted *noted = calloc((size_t)plan->launch_count + 1, sizeof *noted);
    if (!noted) return pd_fail(PD_MEMORY, "out of memory");
    for (int32_t k = 0; k < plan->launch_count; k++) noted[k].notes = &notes;
    int32_t code = run(c, inputs, outputs, NULL, noted);
    free(noted);
    *count = notes.count;
    return code;
}

void pd_place_info(const pd_context *c, int32_t k, pd_launch_info *info) {
    const pd_cpu *x = c->place;
    const pd_candidate *n = pd_chosen(c, k);
    info->kernel = plan->kernels[(n ? n : &plan->candidates[plan->launches[k].first_candidate])->kernel].name;
    info->tasks = x->tasks[k];
    info->threads = x->threads[k];
}
