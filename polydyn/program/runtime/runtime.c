/* runtime.c: programs, contexts, checks, memory and the launch loop. The program itself is data: pd_the_plan. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

#include "internal.h"

#define EXPORT __attribute__((visibility("default")))
#define ALIGN 64

struct pd_program {
    pd_pool *pool;
    const char *weights;
    void *map;
    size_t map_bytes;
};

struct pd_context {
    pd_program *program;
    int64_t threads;
    int ready;              /* the sizes are those of `dims` */
    int64_t *dims;          /* of all inputs, one after the other */
    int64_t *strides;       /* in bytes, alike */
    int64_t *output_strides; /* in bytes, of all outputs, one after the other */
    int32_t *given;         /* per output: its strides are the caller's, else dense */
    int64_t *staged;        /* per input: offset of its dense copy in the arena, -1: used in place */
    int64_t *values;
    int64_t *symbols;       /* per launch, gathered from values */
    int64_t *launch_threads, *wave_threads;
    int64_t *starts;        /* per launch, threads + 1 of them: which tasks of a launch in a wave each thread runs */
    pd_part *parts;         /* of the wave that runs */
    void **buffers;         /* per buffer */
    void **arguments;       /* per launch, gathered from buffers */
    int64_t scratch_offset, scratch_stride, planned_bytes;
    int64_t most_threads;   /* of any launch */
    int64_t evaluations, copied_bytes;
    char *arena;
    int64_t arena_bytes;
};

static const pd_plan *const plan = &pd_the_plan;
static const char *const dtype_names[] = {"float16", "bfloat16", "float32", "float64", "int8",   "int16", "int32",
                                          "int64",   "uint8",    "uint16",  "uint32",  "uint64", "bool"};

/* ---- errors ---- */

static _Thread_local char error_text[1024];

__attribute__((format(printf, 2, 3))) static int32_t fail(int32_t code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(error_text, sizeof error_text, format, list);
    va_end(list);
    return code;
}

EXPORT const char *pd_error(void) { return error_text; }
EXPORT int32_t pd_abi_version(void) { return PD_ABI_VERSION; }

/* ---- programs ---- */

static int32_t map_weights(pd_program *p, const char *path, int64_t offset, int64_t bytes) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return fail(PD_WEIGHTS, "cannot open weights %s: %s", path, strerror(errno));
    struct stat s;
    if (fstat(file, &s) || offset < 0 || bytes < 0 || offset > s.st_size || bytes > s.st_size - offset) {
        close(file);
        return fail(PD_WEIGHTS, "%s is shorter than the weights that should be in it; is it truncated?", path);
    }
    int64_t before = offset % sysconf(_SC_PAGESIZE);
    p->map_bytes = (size_t)(before + bytes);
    p->map = mmap(NULL, p->map_bytes, PROT_READ, MAP_PRIVATE, file, offset - before);
    int problem = errno;
    close(file);
    if (p->map == MAP_FAILED) {
        p->map = NULL;
        return fail(PD_WEIGHTS, "cannot map weights %s: %s", path, strerror(problem));
    }
    p->weights = (const char *)p->map + before;
    return PD_OK;
}

EXPORT int32_t pd_open(const char *path, const void *memory, int64_t offset, int64_t bytes, pd_program **out) {
    *out = NULL;
    if (bytes < plan->weight_bytes)
        return fail(PD_WEIGHTS, "the program needs %" PRId64 " bytes of weights, %" PRId64 " were given",
                    plan->weight_bytes, bytes);
    pd_program *p = calloc(1, sizeof *p);
    if (!p || !(p->pool = pd_pool_new())) {
        free(p);
        return fail(PD_MEMORY, "out of memory");
    }
    int32_t code = PD_OK;
    if (!path) p->weights = (const char *)memory + offset;
    else if (bytes) code = map_weights(p, path, offset, bytes);
    if (code == PD_OK && (uintptr_t)p->weights % ALIGN)
        code = fail(PD_WEIGHTS, "weights must be aligned to %d bytes", ALIGN);
    if (code != PD_OK) pd_close(p);
    else *out = p;
    return code;
}

EXPORT void pd_close(pd_program *p) {
    if (!p) return;
    pd_pool_free(p->pool);
    if (p->map) munmap(p->map, p->map_bytes);
    free(p);
}

EXPORT const pd_io *pd_inputs(const pd_program *p, int32_t *count) {
    (void)p;
    *count = plan->input_count;
    return plan->inputs;
}

EXPORT const pd_io *pd_outputs(const pd_program *p, int32_t *count) {
    (void)p;
    *count = plan->output_count;
    return plan->outputs;
}

EXPORT int64_t pd_weight_bytes(const pd_program *p) {
    (void)p;
    return plan->weight_bytes;
}

EXPORT int32_t pd_launch_count(const pd_program *p) {
    (void)p;
    return plan->launch_count;
}

/* ---- contexts ---- */

EXPORT void pd_context_free(pd_context *c) {
    if (!c) return;
    free(c->dims);
    free(c->strides);
    free(c->output_strides);
    free(c->given);
    free(c->staged);
    free(c->values);
    free(c->symbols);
    free(c->launch_threads);
    free(c->wave_threads);
    free(c->starts);
    free(c->parts);
    free(c->buffers);
    free(c->arguments);
    free(c->arena);
    free(c);
}

static void *zeros(int32_t count, size_t size) { return calloc((size_t)count + 1, size); }

EXPORT int32_t pd_context_new(pd_program *program, int32_t threads, pd_context **out) {
    *out = NULL;
    if (threads < 1 || threads > PD_MAX_THREADS)
        return fail(PD_USAGE, "threads is %d, it must be 1 to %d", threads, PD_MAX_THREADS);
    pd_context *c = calloc(1, sizeof *c);
    if (!c) return fail(PD_MEMORY, "out of memory");
    c->program = program;
    c->threads = threads;
    c->dims = zeros(plan->input_dim_count, sizeof *c->dims);
    c->strides = zeros(plan->input_dim_count, sizeof *c->strides);
    c->output_strides = zeros(plan->output_dim_count, sizeof *c->output_strides);
    c->given = zeros(plan->output_count, sizeof *c->given);
    c->staged = zeros(plan->input_count, sizeof *c->staged);
    c->values = zeros(plan->value_count, sizeof *c->values);
    c->symbols = zeros(plan->launch_symbol_count, sizeof *c->symbols);
    c->launch_threads = zeros(plan->launch_count, sizeof *c->launch_threads);
    c->wave_threads = zeros(plan->wave_count, sizeof *c->wave_threads);
    c->starts = zeros(plan->launch_count, ((size_t)threads + 1) * sizeof *c->starts);
    c->parts = zeros(plan->launch_count, sizeof *c->parts);
    c->buffers = zeros(plan->buffer_count, sizeof *c->buffers);
    c->arguments = zeros(plan->launch_buffer_count, sizeof *c->arguments);
    if (!c->dims || !c->strides || !c->output_strides || !c->given || !c->staged || !c->values || !c->symbols ||
        !c->launch_threads || !c->wave_threads || !c->starts || !c->parts || !c->buffers || !c->arguments) {
        pd_context_free(c);
        return fail(PD_MEMORY, "out of memory");
    }
    *out = c;
    return PD_OK;
}

EXPORT int64_t pd_arena_bytes(const pd_context *c) { return c->arena_bytes; }
EXPORT int64_t pd_copied_bytes(const pd_context *c) { return c->copied_bytes; }
EXPORT int64_t pd_evaluations(const pd_context *c) { return c->evaluations; }

/* ---- pd_shapes: checks ---- */

static int32_t check_tensor(int32_t i, const pd_tensor *t) {
    const pd_io *io = &plan->inputs[i];
    if (t->dtype != io->dtype) {
        int known = t->dtype >= 0 && t->dtype <= PD_BOOL;
        return fail(PD_INPUT, "input '%s' is %s, the program takes %s", io->name,
                    known ? dtype_names[t->dtype] : "of an unknown type", dtype_names[io->dtype]);
    }
    if (t->rank != io->rank)
        return fail(PD_INPUT, "input '%s' has %d axes, the program takes %d: %s", io->name, t->rank, io->rank,
                    io->shape);
    for (int32_t a = 0; a < t->rank; a++)
        if (t->shape[a] < 0) return fail(PD_INPUT, "input '%s': axis %d is negative", io->name, a);
    return PD_OK;
}

static int32_t check_dims(const pd_context *c) {
    const int64_t *v = c->values, *dims = c->dims;
    int32_t first[plan->input_count + 1];
    first[0] = 0;
    for (int32_t i = 0; i < plan->input_count; i++) first[i + 1] = first[i] + plan->inputs[i].rank;
    for (int32_t k = 0; k < plan->dim_check_count; k++) {
        const pd_dim_check *d = &plan->dim_checks[k];
        int64_t got = dims[first[d->input] + d->axis];
        if (got != v[d->value])
            return fail(PD_INPUT,
                        "input '%s' of shape %s: axis %d is %" PRId64 ", but %s is %" PRId64 " in this call%s%s",
                        plan->inputs[d->input].name, plan->inputs[d->input].shape, d->axis, got, d->text, v[d->value],
                        d->message[0] ? "\n  because: " : "", d->message);
    }
    return PD_OK;
}

static int32_t check_guards(const int64_t *v) {
    for (int32_t k = 0; k < plan->guard_count; k++) {
        const pd_guard *g = &plan->guards[k];
        int64_t a = v[g->left], b = v[g->right];
        int holds = g->relation == '=' ? a == b : g->relation == '<' ? a <= b : b ? a % b == 0 : a == 0;
        if (!holds)
            return fail(PD_INPUT, "%s\n  rule: %s, here %" PRId64 " and %" PRId64, g->message, g->text, a, b);
    }
    return PD_OK;
}

/* Decides which inputs are used in place, checks the outputs' strides, and sets the values of all free strides. */
static int32_t settle_strides(pd_context *c) {
    int64_t dense[PD_MAX_RANK], *value = c->values + plan->symbol_count + 1;
    const int64_t *dims = c->dims, *strides = c->strides;
    for (int32_t i = 0; i < plan->input_count; dims += plan->inputs[i].rank, strides += plan->inputs[i++].rank) {
        const pd_io *io = &plan->inputs[i];
        if (pd_dense_strides(io->rank, dims, pd_item_bytes[io->dtype], dense))
            return fail(PD_OVERFLOW, "the size of input '%s' overflows 64 bits", io->name);
        c->staged[i] = pd_usable(io, dims, strides, dense) ? -1 : 0;
        for (int32_t a = 0; a < io->strided; a++)
            *value++ = (c->staged[i] < 0 ? strides[a] : dense[a]) / pd_item_bytes[io->dtype];
    }
    int32_t first = 0;
    for (int32_t o = 0; o < plan->output_count; first += plan->outputs[o++].rank) {
        const pd_io *io = &plan->outputs[o];
        int64_t *wanted = c->output_strides + first, out[PD_MAX_RANK];
        for (int32_t a = 0; a < io->rank; a++) out[a] = c->values[plan->output_dims[first + a]];
        if (pd_dense_strides(io->rank, out, pd_item_bytes[io->dtype], dense))
            return fail(PD_OVERFLOW, "the size of output '%s' overflows 64 bits", io->name);
        if (!c->given[o]) memcpy(wanted, dense, (size_t)io->rank * sizeof *dense);
        else if (!pd_usable(io, out, wanted, dense))
            return fail(PD_INPUT, "output '%s' must have positive strides of whole elements, dense from axis %d on",
                        io->name, io->strided);
        for (int32_t a = 0; a < io->strided; a++) *value++ = wanted[a] / pd_item_bytes[io->dtype];
    }
    return PD_OK;
}

static int32_t evaluate(pd_context *c) {
    int64_t *v = c->values;
    const int64_t *dims = c->dims;
    int32_t first = 0;
    for (int32_t i = 0; i < plan->input_count; first += plan->inputs[i++].rank)
        for (int32_t s = 0; s < plan->symbol_count; s++)
            if (plan->sources[s].input == i) v[s] = dims[first + plan->sources[s].axis];
    v[plan->symbol_count] = c->threads;
    if (plan->check(v)) return fail(PD_OVERFLOW, "the sizes of this call overflow 64 bits");
    int32_t code = check_dims(c);
    if (code == PD_OK) code = check_guards(v);
    if (code == PD_OK) code = settle_strides(c);
    if (code != PD_OK) return code;
    if (plan->plan(v)) return fail(PD_OVERFLOW, "the sizes of this call overflow 64 bits");
    for (int32_t k = 0; k < plan->sign_check_count; k++)
        if (v[plan->sign_checks[k].value] < 0)
            return fail(PD_INPUT, "the shapes of this call make %s negative: %" PRId64, plan->sign_checks[k].text,
                        v[plan->sign_checks[k].value]);
    for (int32_t k = 0; k < plan->launch_symbol_count; k++) c->symbols[k] = v[plan->launch_symbols[k]];
    c->most_threads = 1;
    for (int32_t k = 0; k < plan->launch_count; k++) {
        const pd_launch_entry *l = &plan->launches[k];
        int64_t n = pd_min(pd_min(c->threads, v[l->tasks]), 1 + v[l->work] / PD_WORK_PER_THREAD);
        c->launch_threads[k] = pd_max(n, 1);
    }
    for (int32_t w = 0; w < plan->wave_count; w++) {
        c->wave_threads[w] = pd_plan_wave(&plan->waves[w], v, c->threads, c->launch_threads, c->starts);
        c->most_threads = pd_max(c->most_threads, c->wave_threads[w]);
    }
    c->evaluations++;
    return PD_OK;
}

/* ---- pd_shapes: memory ---- */

/* Reserves `bytes` at the end of the arena; -1 when sizes overflow. */
static int64_t reserve(int64_t *end, int64_t bytes) {
    int64_t at = *end, padded;
    if (bytes < 0 || __builtin_add_overflow(bytes, ALIGN - 1, &padded)) return -1;
    if (__builtin_add_overflow(at, padded / ALIGN * ALIGN, end)) return -1;
    return at;
}

static int32_t grow_arena(pd_context *c) {
    if (c->planned_bytes <= c->arena_bytes) return PD_OK;
    char *arena = aligned_alloc(ALIGN, (size_t)c->planned_bytes);
    if (!arena) return fail(PD_MEMORY, "this call needs %" PRId64 " bytes for intermediates", c->planned_bytes);
    free(c->arena);
    c->arena = arena;
    c->arena_bytes = c->planned_bytes;
    return PD_OK;
}

static int32_t lay_out(pd_context *c) {
    const int64_t *v = c->values;
    int64_t end = 0, most = 0, stride = 0, bad = 0, slots[plan->slot_count + 1];
    for (int32_t s = 0; s < plan->slot_count; s++) {
        int64_t bytes = 0;
        for (int32_t k = 0; k < plan->slots[s].count; k++)
            bytes = pd_max(bytes, v[plan->slot_values[plan->slots[s].first + k]]);
        bad |= slots[s] = reserve(&end, bytes);
    }
    for (int32_t k = 0; k < plan->launch_count; k++) most = pd_max(most, v[plan->launches[k].scratch]);
    bad |= reserve(&stride, most);
    c->scratch_stride = stride;
    if (bad < 0 || __builtin_mul_overflow(stride, c->threads, &most)) return fail(PD_OVERFLOW, "sizes overflow");
    bad |= c->scratch_offset = reserve(&end, most);
    const int64_t *dims = c->dims;
    for (int32_t i = 0; i < plan->input_count; dims += plan->inputs[i++].rank) {
        if (c->staged[i] < 0) continue;
        bad |= c->staged[i] = reserve(&end, pd_dense_bytes(&plan->inputs[i], dims));
    }
    if (bad < 0) return fail(PD_OVERFLOW, "the sizes of this call overflow 64 bits");
    c->planned_bytes = end;
    int32_t code = grow_arena(c);
    if (code != PD_OK) return code;
    for (int32_t b = 0; b < plan->buffer_count; b++) {
        const pd_buffer *p = &plan->buffers[b];
        if (p->role == PD_INTERMEDIATE_ROLE) c->buffers[b] = c->arena + slots[p->index];
        if (p->role == PD_CONSTANT_ROLE) c->buffers[b] = (void *)(c->program->weights + p->offset);
    }
    return PD_OK;
}

/* Copies the shapes and strides of a call into the context; returns 1 when they are new. */
static int take(pd_context *c, const pd_tensor *inputs, const int64_t *const *output_strides) {
    int changed = 0;
    int64_t *dims = c->dims, *strides = c->strides;
    for (int32_t i = 0; i < plan->input_count; i++) {
        int32_t rank = plan->inputs[i].rank;
        int64_t dense = pd_item_bytes[inputs[i].dtype];
        for (int32_t a = rank; a-- > 0;) {
            int64_t stride = inputs[i].strides ? inputs[i].strides[a] : dense;
            changed |= (dims[a] != inputs[i].shape[a]) | (strides[a] != stride);
            dims[a] = inputs[i].shape[a];
            strides[a] = stride;
            /* an overflow here is found by lay_out or makes an empty tensor */
            dense = (int64_t)((uint64_t)dense * (uint64_t)dims[a]);
        }
        dims += rank;
        strides += rank;
    }
    strides = c->output_strides;
    for (int32_t o = 0; o < plan->output_count; strides += plan->outputs[o++].rank) {
        const int64_t *given = output_strides ? output_strides[o] : NULL;
        changed |= c->given[o] != (given != NULL);
        c->given[o] = given != NULL;
        for (int32_t a = 0; given && a < plan->outputs[o].rank; a++) {
            changed |= strides[a] != given[a];
            strides[a] = given[a];
        }
    }
    return changed;
}

EXPORT int32_t pd_shapes(pd_context *c, const pd_tensor *inputs, const int64_t *const *output_strides,
                         int64_t *output_dims) {
    int32_t code = PD_OK, ready = c->ready;
    c->ready = 0;
    for (int32_t i = 0; i < plan->input_count && code == PD_OK; i++) code = check_tensor(i, &inputs[i]);
    if (code != PD_OK) return code;
    if (take(c, inputs, output_strides) || !ready) {
        code = evaluate(c);
        if (code == PD_OK) code = lay_out(c);
    }
    if (code != PD_OK) return code;
    for (int32_t k = 0; k < plan->output_dim_count; k++) output_dims[k] = c->values[plan->output_dims[k]];
    c->ready = 1;
    return PD_OK;
}

/* ---- pd_run ---- */

static int32_t take_inputs(pd_context *c, const void *const *inputs, void **dense) {
    const int64_t *dims = c->dims, *strides = c->strides;
    for (int32_t i = 0; i < plan->input_count; i++) {
        int64_t item = pd_item_bytes[plan->inputs[i].dtype];
        if ((uintptr_t)inputs[i] % (uintptr_t)item)
            return fail(PD_INPUT, "input '%s' is not aligned to its elements", plan->inputs[i].name);
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

/* Refuses an output that begins where its beginning is, but walks the memory in another way. */
static int32_t check_shared(const pd_context *c, void *const *inputs, void *const *outputs) {
    for (int32_t k = 0; k < plan->launch_count; k++) {
        const pd_launch_entry *l = &plan->launches[k];
        if (l->skip_input < 0 || c->values[l->tasks] <= 0 || inputs[l->skip_input] != outputs[l->skip_output]) continue;
        const pd_io *input = &plan->inputs[l->skip_input], *output = &plan->outputs[l->skip_output];
        int32_t first = pd_first_axis(plan->inputs, l->skip_input);
        const int64_t *wanted = c->output_strides + pd_first_axis(plan->outputs, l->skip_output);
        int32_t axis = pd_differing_axis(input->rank, c->dims + first, c->strides + first, wanted);
        if (axis >= 0)
            return fail(PD_INPUT, "input '%s' and output '%s' are the same memory, but their strides differ at axis %d",
                        input->name, output->name, axis);
    }
    return PD_OK;
}

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static const pd_named_kernel *kernel_of(const pd_context *c, const pd_launch_entry *l) {
    return &plan->kernels[l->first_kernel + (l->choice < 0 ? 0 : c->values[l->choice])];
}

/* Makes launch k a part of a job; 0 when it has nothing to do. */
static int prepare(pd_context *c, int32_t k, void *const *inputs, void *const *outputs, pd_part *part) {
    const pd_launch_entry *l = &plan->launches[k];
    int64_t tasks = c->values[l->tasks];
    if (tasks <= 0) return 0;
    if (l->skip_input >= 0 && inputs[l->skip_input] == outputs[l->skip_output]) return 0; /* see check_shared */
    c->copied_bytes += c->values[l->copied];
    void **arguments = c->arguments + l->first_buffer;
    for (int32_t b = 0; b < l->buffers; b++) arguments[b] = c->buffers[plan->launch_buffers[l->first_buffer + b]];
    *part = (pd_part){.kernel = kernel_of(c, l)->kernel,
                      .buffers = arguments,
                      .symbols = c->symbols + l->first_symbol,
                      .tasks = tasks};
    return 1;
}

/* Runs c->parts in one parallel region. */
static void run_parts(pd_context *c, int64_t count, int64_t threads) {
    pd_job job = {.parts = c->parts,
                  .count = count,
                  .threads = threads,
                  .scratch = c->arena + c->scratch_offset,
                  .scratch_stride = c->scratch_stride};
    if (count) pd_pool_run(c->program->pool, &job);
}

/* Scans the index tensors that launch k is the first to read; `next` is the first check not yet made. */
static int32_t check_indices(const pd_context *c, int32_t k, int32_t *next) {
    for (; *next < plan->index_check_count && plan->index_checks[*next].launch == k; ++*next) {
        const pd_index_check *p = &plan->index_checks[*next];
        if (c->values[plan->launches[k].tasks] <= 0) continue;
        int64_t found = 0, size = c->values[p->size], offset = c->values[p->offset];
        int64_t low = -size - offset, high = size - offset; /* sizes: far from overflow */
        int64_t at = pd_outside(c->buffers[p->buffer], c->values[p->count], p->dtype, low, high, &found);
        if (at >= 0)
            return fail(PD_INPUT, "%s, here %" PRId64 ": element %" PRId64 " is %" PRId64, p->message, size, at, found);
    }
    return PD_OK;
}

typedef struct {
    void *const *inputs, *const *outputs;
    int parallel;
    int32_t next_check;
    int64_t *nanoseconds; /* per launch; NULL: nobody asks */
} pd_call;

/* One wave; when times are asked for its launches run one after the other. */
static int32_t run_wave(pd_context *c, int32_t w, pd_call *call) {
    const pd_wave *wave = &plan->waves[w];
    int64_t count = 0;
    int32_t code = PD_OK;
    for (int32_t k = wave->first; k < wave->first + wave->count && code == PD_OK; k++) {
        int64_t begun = call->nanoseconds ? now_ns() : 0;
        code = check_indices(c, k, &call->next_check);
        if (code != PD_OK || !prepare(c, k, call->inputs, call->outputs, &c->parts[count])) continue;
        if (call->nanoseconds) run_parts(c, 1, call->parallel ? c->launch_threads[k] : 1);
        else if (wave->count > 1) c->parts[count].starts = c->starts + k * (c->threads + 1);
        count += !call->nanoseconds;
        if (call->nanoseconds) call->nanoseconds[k] = now_ns() - begun;
    }
    if (code == PD_OK) run_parts(c, count, call->parallel ? c->wave_threads[w] : 1);
    return code;
}

static int32_t run(pd_context *c, const void *const *inputs, void *const *outputs, int64_t *nanoseconds) {
    if (!c->ready) return fail(PD_USAGE, "pd_run needs a successful pd_shapes before it");
    void *dense[plan->input_count + 1];
    int32_t code = take_inputs(c, inputs, dense);
    if (code == PD_OK) code = check_shared(c, dense, outputs);
    if (code != PD_OK) return code;
    for (int32_t b = 0; b < plan->buffer_count; b++) {
        const pd_buffer *p = &plan->buffers[b];
        if (p->role == PD_INPUT_ROLE) c->buffers[b] = dense[p->index];
        if (p->role == PD_OUTPUT_ROLE) c->buffers[b] = outputs[p->index];
    }
    int parallel = c->most_threads > 1 && pd_pool_acquire(c->program->pool, c->most_threads);
    pd_call call = {.inputs = dense, .outputs = outputs, .parallel = parallel, .nanoseconds = nanoseconds};
    if (nanoseconds) memset(nanoseconds, 0, (size_t)plan->launch_count * sizeof *nanoseconds);
    for (int32_t w = 0; w < plan->wave_count && code == PD_OK; w++) code = run_wave(c, w, &call);
    if (parallel) pd_pool_release(c->program->pool);
    if (code != PD_OK) return code;
    for (int32_t k = 0; k < plan->copy_count; k++) {
        const pd_copy *p = &plan->copies[k];
        if (c->values[p->bytes] <= 0) continue;
        memcpy(outputs[p->output], c->buffers[p->buffer], (size_t)c->values[p->bytes]);
        c->copied_bytes += c->values[p->bytes];
    }
    return PD_OK;
}

EXPORT int32_t pd_run(pd_context *c, const void *const *inputs, void *const *outputs) {
    return run(c, inputs, outputs, NULL);
}

EXPORT int32_t pd_profile(pd_context *c, const void *const *inputs, void *const *outputs, int64_t *nanoseconds) {
    return run(c, inputs, outputs, nanoseconds);
}

EXPORT int32_t pd_launch(const pd_context *c, int32_t k, pd_launch_info *info) {
    if (!c->ready) return fail(PD_USAGE, "pd_launch needs a successful pd_shapes before it");
    if (k < 0 || k >= plan->launch_count) return fail(PD_USAGE, "there is no launch %d", k);
    const pd_launch_entry *l = &plan->launches[k];
    const int64_t *v = c->values;
    *info = (pd_launch_info){.label = l->label,
                             .kernel = kernel_of(c, l)->name,
                             .tasks = v[l->tasks],
                             .work = v[l->work],
                             .flops = v[l->flops],
                             .bytes = v[l->bytes],
                             .threads = c->launch_threads[k]};
    return PD_OK;
}
