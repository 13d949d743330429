/* runtime.c: programs, contexts, checks, memory. The program itself is data, pd_the_plan; cpu.c or cuda.c runs it. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

#define EXPORT PD_EXPORT
#define fail pd_fail
#define LARGE 65536 /* bytes of a block that is worth a page of its own */

static const pd_plan *const plan = &pd_the_plan;
/* ---- programs ---- */

EXPORT int32_t pd_open(const char *path, const void *memory, int64_t offset, int64_t bytes, pd_program **out) {
    *out = NULL;
    if (bytes < plan->weight_bytes)
        return fail(PD_WEIGHTS, "the program needs %" PRId64 " bytes of weights, %" PRId64 " were given",
                    plan->weight_bytes, bytes);
    pd_program *p = calloc(1, sizeof *p);
    int32_t code = p && (p->log = pd_log_new()) ? pd_place_program(p) : PD_MEMORY;
    if (code != PD_OK) {
        if (p) pd_log_free(p->log);
        free(p);
        return code == PD_MEMORY ? fail(code, "out of memory") : code;
    }
    code = pd_find_weights(p, path, memory, offset, bytes);
    if (code == PD_OK && plan->weight_bytes) code = pd_check_seal(p, path, plan->weight_bytes);
    p->constants = p->weights;
    if (code != PD_OK) pd_close(p);
    else *out = p;
    return code;
}

EXPORT void pd_close(pd_program *p) {
    if (!p) return;
    pd_displace_program(p);
    pd_unmap_weights(p);
    pd_log_free(p->log);
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
    pd_displace_context(c);
    free(c->dims);
    free(c->strides);
    free(c->output_strides);
    free(c->given);
    free(c->places);
    free(c->staged);
    free(c->values);
    free(c->remembered);
    free(c->buffers);
    free(c);
}

/* Sizes and selections of the last few calls: the key (dims, strides), then the results of `evaluate`. */
#define PD_REMEMBERED 8

static int32_t remembered_words(void) {
    return 2 * plan->input_dim_count + plan->value_count + plan->input_count + plan->output_dim_count;
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
    c->places = zeros(plan->input_count + plan->output_count, sizeof *c->places);
    c->staged = zeros(plan->input_count + plan->output_count, sizeof *c->staged);
    c->values = zeros(plan->value_count, sizeof *c->values);
    c->remembered = zeros(PD_REMEMBERED * remembered_words(), sizeof *c->remembered);
    c->buffers = zeros(plan->buffer_count, sizeof *c->buffers);
    int all = c->dims && c->strides && c->output_strides && c->given && c->places && c->staged && c->values &&
              c->remembered && c->buffers;
    int32_t code = all ? pd_place_context(c) : fail(PD_MEMORY, "out of memory");
    if (code != PD_OK) {
        pd_context_free(c);
        return code;
    }
    *out = c;
    return PD_OK;
}

EXPORT int64_t pd_arena_bytes(const pd_context *c) { return c->arena_bytes; }
EXPORT int64_t pd_copied_bytes(const pd_context *c) { return c->copied_bytes; }
EXPORT int64_t pd_evaluations(const pd_context *c) { return c->evaluations; }

/* ---- pd_shapes: checks ---- */

static int32_t check_dims(const pd_context *c) {
    const int64_t *v = c->values, *dims = c->dims;
    int32_t first[plan->input_count + 1];
    first[0] = 0;
    for (int32_t i = 0; i < plan->input_count; i++) first[i + 1] = first[i] + plan->inputs[i].rank;
    for (int32_t k = 0; k < plan->dim_check_count; k++) {
        const pd_dim_check *d = &plan->dim_checks[k];
        int64_t got = dims[first[d->input] + d->axis];
        if (got == v[d->value]) continue;
        if (d->text[strspn(d->text, "0123456789")] == 0) /* a constant of the model */
            return fail(PD_INPUT,
                        "input '%s' of shape %s: axis %d is %" PRId64 ", but the model was exported for %s only\n"
                        "  remedy: pass an array of this size, or compile with symbols= to name the axis",
                        plan->inputs[d->input].name, plan->inputs[d->input].shape, d->axis, got, d->text);
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
    int64_t dense[PD_MAX_RANK], *value = c->values + plan->symbol_count + PD_SPECIALS;
    const int64_t *dims = c->dims, *strides = c->strides;
    for (int32_t i = 0; i < plan->input_count; dims += plan->inputs[i].rank, strides += plan->inputs[i++].rank) {
        const pd_io *io = &plan->inputs[i];
        if (pd_dense_strides(io->rank, dims, pd_item_bytes[io->dtype], dense))
            return fail(PD_OVERFLOW, "the size of input '%s' overflows 64 bits", io->name);
        c->staged[i] = !c->places[i] && pd_usable(io, dims, strides, dense) ? -1 : 0;
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
    v[plan->symbol_count + PD_NTH] = c->threads;
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
    c->evaluations++;
    return PD_OK;
}

/* ---- pd_shapes: remembered evaluations ---- */

/* The parts of an evaluation, in the order in which they are stored; the first two are its key. */
#define PARTS 5
typedef struct { int64_t *data; size_t bytes; } part;

static void parts_of(const pd_context *c, part p[PARTS]) {
    size_t word = sizeof(int64_t), dims = (size_t)plan->input_dim_count * word;
    p[0] = (part){c->dims, dims};
    p[1] = (part){c->strides, dims};
    p[2] = (part){c->values, (size_t)plan->value_count * word};
    p[3] = (part){c->staged, (size_t)plan->input_count * word};
    p[4] = (part){c->output_strides, (size_t)plan->output_dim_count * word};
}

/* Whether all outputs are dense and no array must be copied first. */
static int is_plain(const pd_context *c) {
    int32_t other = 0;
    for (int32_t o = 0; o < plan->output_count; o++) other |= c->given[o];
    for (int32_t i = 0; i < plan->input_count + plan->output_count; i++) other |= c->places[i];
    return !other;
}

/* Restores the evaluation for these shapes and strides; returns 0 if it is not remembered. */
static int recall(pd_context *c) {
    part p[PARTS];
    parts_of(c, p);
    int64_t most = pd_min(c->remembered_count, PD_REMEMBERED);
    for (int64_t k = 0; k < most; k++) {
        const char *at = (const char *)(c->remembered + k * remembered_words());
        if (memcmp(at, p[0].data, p[0].bytes) || memcmp(at + p[0].bytes, p[1].data, p[1].bytes)) continue;
        for (int32_t i = 0; i < PARTS; at += p[i++].bytes) memcpy(p[i].data, at, p[i].bytes);
        return 1;
    }
    return 0;
}

/* Stores an evaluation in place of the oldest one. */
static void remember(pd_context *c) {
    part p[PARTS];
    parts_of(c, p);
    char *at = (char *)(c->remembered + c->remembered_count++ % PD_REMEMBERED * remembered_words());
    for (int32_t i = 0; i < PARTS; at += p[i++].bytes) memcpy(at, p[i].data, p[i].bytes);
}

/* ---- pd_shapes: memory ---- */

/* Reserves `bytes` at the end of the arena; returns -1 if sizes overflow. Large blocks begin with a page: a load waits
 * for stores in flight whose addresses have the same last 12 bits, and tensors that begin alike are accessed at
 * different offsets. */
static int64_t reserve(int64_t *end, int64_t bytes) {
    int64_t at = *end, padded;
    if (bytes >= LARGE && __builtin_add_overflow(at, PD_PAGE - 1, &at)) return -1;
    if (bytes >= LARGE) at = at / PD_PAGE * PD_PAGE;
    if (bytes < 0 || __builtin_add_overflow(bytes, pd_arena_align - 1, &padded)) return -1;
    if (__builtin_add_overflow(at, padded / pd_arena_align * pd_arena_align, end)) return -1;
    return at;
}

int64_t pd_output_bytes(const pd_context *c, int32_t o) {
    int64_t first = pd_first_axis(plan->outputs, o), dims[PD_MAX_RANK];
    for (int32_t a = 0; a < plan->outputs[o].rank; a++) dims[a] = c->values[plan->output_dims[first + a]];
    return pd_dense_bytes(&plan->outputs[o], dims); /* settle_strides has checked that it does not overflow */
}

static int32_t lay_out(pd_context *c) {
    const int64_t *v = c->values;
    int64_t end = 0, most, stride = 0, bad = 0, slots[plan->slot_count + 1];
    for (int32_t s = 0; s < plan->slot_count; s++) {
        int64_t bytes = 0;
        for (int32_t k = 0; k < plan->slots[s].count; k++)
            bytes = pd_max(bytes, v[plan->slot_values[plan->slots[s].first + k]]);
        bad |= slots[s] = reserve(&end, bytes);
    }
    bad |= reserve(&stride, pd_place_scratch(c));
    c->scratch_stride = stride;
    if (bad < 0 || __builtin_mul_overflow(stride, c->threads, &most)) return fail(PD_OVERFLOW, "sizes overflow");
    bad |= c->scratch_offset = reserve(&end, most);
    c->staging_offset = end;
    const int64_t *dims = c->dims;
    for (int32_t i = 0; i < plan->input_count; dims += plan->inputs[i++].rank) {
        if (c->staged[i] < 0) continue;
        bad |= c->staged[i] = reserve(&end, pd_dense_bytes(&plan->inputs[i], dims));
    }
    for (int32_t o = 0; o < plan->output_count; o++) {
        if (!c->places[plan->input_count + o]) continue;
        bad |= c->staged[plan->input_count + o] = reserve(&end, pd_output_bytes(c, o));
    }
    if (bad < 0) return fail(PD_OVERFLOW, "the sizes of this call overflow 64 bits");
    c->planned_bytes = end;
    int32_t code = pd_place_sizes(c);
    if (code != PD_OK) return code;
    for (int32_t b = 0; b < plan->buffer_count; b++) {
        const pd_buffer *p = &plan->buffers[b];
        if (p->role == PD_INTERMEDIATE_ROLE) c->buffers[b] = c->arena + slots[p->index];
        if (p->role == PD_CONSTANT_ROLE) c->buffers[b] = (void *)(c->program->constants + p->offset);
    }
    return PD_OK;
}

/* Copies the shapes and strides of a call into the context; returns 1 if they are new. */
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
            /* an overflow here is detected by lay_out or belongs to an empty tensor */
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
    for (int32_t i = 0; i < plan->input_count && code == PD_OK; i++) code = pd_check_tensor(&plan->inputs[i], &inputs[i]);
    if (code != PD_OK) return code;
    if (take(c, inputs, output_strides) || !ready) {
        int plain = is_plain(c);
        if (!plain || !recall(c)) {
            code = evaluate(c);
            if (code == PD_OK && plain) remember(c);
        }
        if (code == PD_OK) code = lay_out(c);
        if (code == PD_OK) c->runs = pd_log_runs(c->program->log, c->values);
    }
    if (code != PD_OK) return code;
    for (int32_t k = 0; k < plan->output_dim_count; k++) output_dims[k] = c->values[plan->output_dims[k]];
    c->ready = 1;
    return PD_OK;
}

EXPORT const void *pd_result(const pd_context *c, int32_t output, int64_t *dims) {
    int32_t first = pd_first_axis(plan->outputs, output);
    for (int32_t a = 0; a < plan->outputs[output].rank; a++) dims[a] = c->values[plan->output_dims[first + a]];
    return NULL;
}

/* ---- the candidate of a launch ---- */

const pd_candidate *pd_chosen(const pd_context *c, int32_t k) {
    const pd_launch_entry *l = &plan->launches[k];
    int64_t row = l->choice < 0 ? 0 : c->values[l->choice];
    return c->values[l->elements] <= 0 || row < 0 ? NULL : &plan->candidates[l->first_candidate + row];
}

/* ---- checks during a run ---- */

int32_t pd_check_shared(const pd_context *c, void *const *inputs, void *const *outputs) {
    for (int32_t k = 0; k < plan->launch_count; k++) {
        const pd_launch_entry *l = &plan->launches[k];
        if (c->values[l->elements] <= 0 || !pd_skipped(l, inputs, outputs)) continue;
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

int32_t pd_check_index(const pd_context *c, const pd_index_check *p, const void *data) {
    if (p->launch < plan->launch_count && c->values[plan->launches[p->launch].elements] <= 0) return PD_OK;
    int64_t found = 0, size = c->values[p->size], offset = c->values[p->offset];
    int64_t low = -size - offset, high = size - offset; /* no overflow: sizes are small enough */
    int64_t at = pd_outside(data, p->first, c->values[p->count], p->step, p->dtype, low, high, &found);
    if (at < 0) return PD_OK;
    return fail(PD_INPUT, "%s, here %" PRId64 ": element %" PRId64 " is %" PRId64, p->message, size, at, found);
}

EXPORT int32_t pd_launch(const pd_context *c, int32_t k, pd_launch_info *info) {
    if (!c->ready) return fail(PD_USAGE, "pd_launch needs a successful pd_shapes before it");
    if (k < 0 || k >= plan->launch_count) return fail(PD_USAGE, "there is no launch %d", k);
    const pd_launch_entry *l = &plan->launches[k];
    const int64_t *v = c->values;
    *info = (pd_launch_info){.label = l->label,
                             .work = v[l->work],
                             .flops = v[l->flops],
                             .bytes = v[l->bytes]};
    pd_place_info(c, k, info);
    return PD_OK;
}
