/* cuda_run.c: one run on a CUDA device: arrays in, versions chosen, launches, arrays out. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "cuda_internal.h"

static const pd_plan *const plan = &pd_the_plan;

typedef struct {
    void *const *outputs; /* the caller's */
    void **inputs, **results; /* where kernels read and write */
    void *stream;
} pd_call;

static char *mirror(const pd_context *c, int64_t staged) {
    return ((pd_cuda *)c->place)->pinned + (staged - c->staging_offset);
}

static int32_t take_inputs(pd_context *c, const void *const *inputs, const pd_call *call) {
    pd_device *d = c->program->place;
    const int64_t *dims = c->dims, *strides = c->strides;
    for (int32_t i = 0; i < plan->input_count; dims += plan->inputs[i].rank, strides += plan->inputs[i++].rank) {
        const pd_io *io = &plan->inputs[i];
        int64_t bytes = pd_dense_bytes(io, dims), item = pd_item_bytes[io->dtype], dense[PD_MAX_RANK];
        call->inputs[i] = (void *)inputs[i];
        if (c->staged[i] < 0) continue;
        uint64_t to = (uint64_t)(uintptr_t)(c->arena + c->staged[i]);
        call->inputs[i] = (void *)(uintptr_t)to;
        pd_dense_strides(io->rank, dims, item, dense);
        int is_dense = pd_differing_axis(io->rank, dims, strides, dense) < 0;
        if (c->places[i] != PD_ON_HOST && !is_dense && bytes)
            return pd_fail(PD_INPUT, "input '%s' is in device memory and not dense", io->name);
        if (!bytes) continue;
        c->copied_bytes += bytes;
        if (c->places[i] == PD_ON_HOST) {
            char *from = mirror(c, c->staged[i]);
            if (is_dense) memcpy(from, inputs[i], (size_t)bytes);
            else pd_copy_strided(from, inputs[i], io->rank, dims, strides, item);
            TRY(cuMemcpyHtoDAsync_v2(to, from, (size_t)bytes, call->stream), io->name);
        } else {
            TRY(cuMemcpyDtoDAsync_v2(to, (uint64_t)(uintptr_t)inputs[i], (size_t)bytes, call->stream), io->name);
        }
    }
    return PD_OK;
}

static int holds(const int64_t *v, const pd_condition *n) {
    int64_t a = v[n->left], b = v[n->right];
    return n->relation == '=' ? a == b : n->relation == '<' ? a <= b : b ? a % b == 0 : a == 0;
}

static int fits(const pd_context *c, const pd_version *n) {
    const pd_device *d = c->program->place;
    int all = c->values[n->smem] <= d->shared_limit && (!n->arch || n->arch == d->arch);
    for (int32_t j = 0; j < n->conditions && all; j++) all = holds(c->values, &plan->conditions[n->first_condition + j]);
    return all;
}

/* Makes a version ready to be launched with the context's sizes: its kernels, its workspace, its symbols. */
static int32_t prepare(pd_context *c, int32_t k, const pd_version *n) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    const int64_t *v = c->values;
    int64_t bytes = v[n->workspace];
    int32_t at = x->first[k];
    if (bytes > x->workspace_bytes) {
        char what[64];
        snprintf(what, sizeof what, "%" PRId64 " bytes of workspace", bytes);
        if (x->workspace) TRY(cuMemFree_v2(x->workspace), what); /* it waits for who uses it */
        x->workspace = 0;
        x->workspace_bytes = 0;
        TRY(cuMemAlloc_v2(&x->workspace, (size_t)bytes), what);
        x->workspace_bytes = bytes;
    }
    for (const pd_version *last = n + n->after; n <= last; n++) {
        int32_t code = pd_cuda_load(d, n->kernel);
        if (code != PD_OK) return code;
        if (v[n->grid] > INT_MAX)
            return pd_fail(PD_OVERFLOW, "%s needs %" PRId64 " blocks", plan->launches[k].label, v[n->grid]);
        for (int32_t m = n->first_map; m < n->first_map + n->maps; m++, at++) {
            x->parameters[at] = x->maps + (int64_t)m * MAP_BYTES;
            x->map_addresses[m] = 0;
        }
        for (int32_t b = 0; b < n->buffers; b++, at++) x->parameters[at] = &x->values[at];
        for (int32_t s = 0; s < n->symbols; s++, at++) {
            x->parameters[at] = &x->values[at];
            x->values[at] = v[plan->launch_symbols[n->first_symbol + s]];
        }
    }
    return PD_OK;
}

/* ---- the choice of versions ----
 *
 * All values follow from the symbols, `nth` and the callers' strides, which come first: the last few choices are
 * remembered by them, with all values. */

#define REMEMBERED 8

static int64_t key_words(void) {
    int64_t words = plan->symbol_count + 1;
    for (int32_t i = 0; i < plan->input_count; i++) words += plan->inputs[i].strided;
    for (int32_t o = 0; o < plan->output_count; o++) words += plan->outputs[o].strided;
    return words;
}

int64_t pd_cuda_remembered_words(void) { return REMEMBERED * ((int64_t)plan->value_count + plan->launch_count); }

/* The k-th of the remembered choices: values, then the versions of launches. */
static int64_t *remembered(const pd_cuda *x, int64_t k) {
    return x->remembered + k % REMEMBERED * ((int64_t)plan->value_count + plan->launch_count);
}

/* Takes back all values and versions of the context's sizes; 0 when they are not remembered. */
static int recall(pd_context *c) {
    pd_cuda *x = c->place;
    size_t key = (size_t)key_words() * sizeof *c->values, all = (size_t)plan->value_count * sizeof *c->values;
    for (int64_t k = 0; k < pd_min(x->remembered_count, REMEMBERED); k++) {
        const int64_t *from = remembered(x, k);
        if (memcmp(c->values, from, key)) continue;
        memcpy(c->values, from, all);
        for (int32_t n = 0; n < plan->launch_count; n++) x->version[n] = (int32_t)from[plan->value_count + n];
        return 1;
    }
    return 0;
}

/* Keeps values and versions in place of the oldest ones. */
static void remember(pd_context *c) {
    pd_cuda *x = c->place;
    int64_t *to = remembered(x, x->remembered_count++);
    memcpy(to, c->values, (size_t)plan->value_count * sizeof *to);
    for (int32_t n = 0; n < plan->launch_count; n++) to[plan->value_count + n] = x->version[n];
}

/* The version of launch k that takes the least time of those that fit, the first of equals; -1: none fits. */
static int32_t best(const pd_context *c, const pd_launch_entry *l) {
    const pd_version *all = &plan->versions[l->first_version];
    int32_t found = -1;
    for (int32_t i = 0; i < l->versions; i += 1 + all[i].after)
        if (fits(c, &all[i]) && (found < 0 || c->values[all[i].estimate] < c->values[all[found].estimate])) found = i;
    return found;
}

/* Chooses the version of launch k for the context's sizes; launches are chosen in order. */
static int32_t choose(pd_context *c, int32_t k) {
    const pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    const pd_launch_entry *l = &plan->launches[k];
    if (!k) x->recalled = recall(c);
    if (!x->recalled) {
        if (l->choose(c->values))
            return pd_fail(PD_OVERFLOW, "the sizes of this call overflow 64 bits in %s", l->label);
        x->version[k] = c->values[l->tasks] > 0 ? best(c, l) : -1;
        if (x->version[k] < 0 && c->values[l->tasks] > 0)
            return pd_fail(PD_INPUT, "no version of %s runs at this size, with %" PRId64 " bytes of shared memory",
                           l->label, d->shared_limit);
        x->choices++;
    }
    int32_t code = x->version[k] < 0 ? PD_OK : prepare(c, k, &plan->versions[l->first_version + x->version[k]]);
    if (code != PD_OK) return code;
    x->next = k + 1;
    if (x->next == plan->launch_count && !x->recalled) remember(c);
    return PD_OK;
}

PD_EXPORT int64_t pd_cuda_choices(const pd_context *c) { return ((const pd_cuda *)c->place)->choices; }

/* Encodes a version's tensor maps where the addresses of their buffers have changed. */
static int32_t encode(pd_context *c, const pd_version *n, const char *label) {
    static const int32_t types[] = {6, 9, 7, 8, 0, 1, 4, 5, 0, 1, 2, 3, 0}; /* CUtensorMapDataType of PD_<dtype> */
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    for (int32_t i = n->first_map; i < n->first_map + n->maps; i++) {
        const pd_tensor_map *m = &plan->maps[i];
        uint64_t address = (uint64_t)(uintptr_t)c->buffers[m->buffer] + (uint64_t)c->values[m->offset];
        if (address == x->map_addresses[i]) continue;
        uint64_t sizes[2 * MAP_RANK];
        uint32_t ones[MAP_RANK] = {1, 1, 1, 1, 1};
        for (int32_t s = 0; s < 2 * m->rank - 1; s++) sizes[s] = (uint64_t)c->values[plan->map_sizes[m->first_size + s]];
        if (!d->cuTensorMapEncodeTiled) return pd_fail(PD_USAGE, "the driver has no tensor maps, which %s needs", label);
        int32_t result = d->cuTensorMapEncodeTiled(
            x->maps + (int64_t)i * MAP_BYTES, types[m->dtype], (uint32_t)m->rank, (void *)(uintptr_t)address, sizes,
            sizes + m->rank, m->box, ones, 0, SWIZZLE_128B, PROMOTE_256B, 0);
        if (result) return pd_cuda_say(d, result, "cuTensorMapEncodeTiled", label);
        x->map_addresses[i] = address;
    }
    return PD_OK;
}

static int32_t launch(pd_context *c, int32_t k, const pd_call *call) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    const pd_launch_entry *l = &plan->launches[k];
    int32_t code = k < x->next ? PD_OK : choose(c, k);
    if (code != PD_OK || x->version[k] < 0 || pd_skipped(l, call->inputs, call->results)) return code;
    const pd_version *n = &plan->versions[l->first_version + x->version[k]];
    int32_t at = x->first[k];
    c->copied_bytes += c->values[l->copied];
    for (const pd_version *last = n + n->after; n <= last; at += n->maps + n->buffers + n->symbols, n++) {
        code = encode(c, n, l->label);
        if (code != PD_OK) return code;
        for (int32_t b = 0; b < n->buffers; b++) {
            int32_t buffer = plan->launch_buffers[n->first_buffer + b];
            x->values[at + n->maps + b] = buffer < 0 ? (int64_t)x->workspace : (int64_t)(uintptr_t)c->buffers[buffer];
        }
        if (c->values[n->grid] <= 0) continue;
        TRY(cuLaunchKernel(d->functions[n->kernel], (uint32_t)c->values[n->grid], 1, 1, (uint32_t)n->threads, 1, 1,
                           (uint32_t)c->values[n->smem], call->stream, x->parameters + at, NULL), l->label);
    }
    return PD_OK;
}

/* The integers of a buffer in host memory: a copy of the caller's array, or fetched once the stream has come so far. */
static int32_t fetch(pd_context *c, const pd_index_check *p, void *stream, const void **data) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    const pd_buffer *b = &plan->buffers[p->buffer];
    if (b->role == PD_INPUT_ROLE && c->places[b->index] == PD_ON_HOST) {
        *data = mirror(c, c->staged[b->index]);
        return PD_OK;
    }
    int64_t bytes = c->values[p->count] * pd_item_bytes[p->dtype];
    int32_t code = pd_cuda_pinned(d, &x->indices, &x->index_bytes, bytes);
    *data = x->indices;
    if (code != PD_OK || !bytes) return code;
    uint64_t from = (uint64_t)(uintptr_t)c->buffers[p->buffer];
    TRY(cuMemcpyDtoHAsync_v2(x->indices, from, (size_t)bytes, stream), "fetching indices");
    TRY(cuStreamSynchronize(stream), "waiting for indices");
    return PD_OK;
}

static int32_t check_indices(pd_context *c, int32_t k, int32_t *next, void *stream) {
    int32_t code = PD_OK;
    for (; *next < plan->index_check_count && plan->index_checks[*next].launch == k && code == PD_OK; ++*next) {
        const pd_index_check *p = &plan->index_checks[*next];
        const void *data;
        if (c->values[plan->launches[k].tasks] <= 0) continue;
        code = fetch(c, p, stream, &data);
        if (code == PD_OK) code = pd_check_index(c, p, data);
    }
    return code;
}

static int32_t launch_all(pd_context *c, const pd_call *call, void **events) {
    pd_device *d = c->program->place;
    int32_t next = 0, code = PD_OK;
    if (events) TRY(cuEventRecord(events[0], call->stream), "profiling");
    for (int32_t k = 0; k < plan->launch_count && code == PD_OK; k++) {
        code = check_indices(c, k, &next, call->stream);
        if (code == PD_OK) code = launch(c, k, call);
        if (code == PD_OK && events) TRY(cuEventRecord(events[k + 1], call->stream), "profiling");
    }
    return code;
}

static int32_t give_outputs(pd_context *c, const pd_call *call) {
    pd_device *d = c->program->place;
    for (int32_t k = 0; k < plan->copy_count; k++) {
        const pd_copy *p = &plan->copies[k];
        int64_t bytes = c->values[p->bytes];
        if (bytes <= 0) continue;
        uint64_t to = (uint64_t)(uintptr_t)call->results[p->output], from = (uint64_t)(uintptr_t)c->buffers[p->buffer];
        TRY(cuMemcpyDtoDAsync_v2(to, from, (size_t)bytes, call->stream), plan->outputs[p->output].name);
        c->copied_bytes += bytes;
    }
    for (int32_t o = 0; o < plan->output_count; o++) {
        int64_t at = c->staged[plan->input_count + o], bytes = pd_output_bytes(c, o);
        if (c->places[plan->input_count + o] != PD_ON_HOST || !bytes) continue;
        uint64_t from = (uint64_t)(uintptr_t)(c->arena + at);
        TRY(cuMemcpyDtoHAsync_v2(mirror(c, at), from, (size_t)bytes, call->stream), plan->outputs[o].name);
    }
    return PD_OK;
}

static int32_t bind(pd_context *c, const void *const *inputs, const pd_call *call) {
    int32_t code = take_inputs(c, inputs, call);
    for (int32_t o = 0; o < plan->output_count; o++) {
        int64_t at = c->staged[plan->input_count + o];
        int host = c->places[plan->input_count + o] == PD_ON_HOST;
        call->results[o] = host ? c->arena + at : call->outputs[o];
        if (code == PD_OK && !host && (uintptr_t)call->outputs[o] % ALIGNED)
            code = pd_fail(PD_INPUT, "output '%s' is not aligned to %d bytes", plan->outputs[o].name, ALIGNED);
    }
    if (code == PD_OK) code = pd_check_shared(c, call->inputs, call->results);
    for (int32_t b = 0; b < plan->buffer_count; b++) {
        const pd_buffer *p = &plan->buffers[b];
        if (p->role == PD_INPUT_ROLE) c->buffers[b] = call->inputs[p->index];
        if (p->role == PD_OUTPUT_ROLE) c->buffers[b] = call->results[p->index];
    }
    return code;
}

static int32_t run(pd_context *c, const void *const *inputs, const pd_call *call, int32_t detached, void **events) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    int host = 0; /* arrays in host memory: pinned memory is written, so the run before must have ended */
    for (int32_t i = 0; i < plan->input_count + plan->output_count; i++) host |= c->places[i] == PD_ON_HOST;
    if (host) pd_cuda_settle(d, x);
    if (x->busy && x->busy != call->stream) TRY(cuStreamWaitEvent(call->stream, x->done, 0), "waiting for the last run");
    int32_t code = bind(c, inputs, call);
    if (code == PD_OK) code = launch_all(c, call, events);
    if (code == PD_OK) code = give_outputs(c, call);
    for (int32_t o = 0; o < plan->output_count; o++) detached &= c->places[plan->input_count + o] != PD_ON_HOST;
    if (code == PD_OK && detached) {
        TRY(cuEventRecord(x->done, call->stream), "ending a run");
        x->busy = call->stream;
        return PD_OK;
    }
    int32_t result = d->cuda.cuStreamSynchronize(call->stream); /* after a failure too: nothing may still be at work */
    x->busy = NULL;
    if (code != PD_OK) return code;
    return result ? pd_cuda_say(d, result, "cuStreamSynchronize", "a kernel of this run failed") : PD_OK;
}

static void deliver(const pd_context *c, void *const *outputs) {
    for (int32_t o = 0; o < plan->output_count; o++) {
        if (c->places[plan->input_count + o] != PD_ON_HOST) continue;
        memcpy(outputs[o], mirror(c, c->staged[plan->input_count + o]), (size_t)pd_output_bytes(c, o));
    }
}

static int32_t times(pd_device *d, void **events, int64_t *nanoseconds) {
    for (int32_t k = 0; k < plan->launch_count; k++) {
        float ms = 0;
        TRY(cuEventElapsedTime(&ms, events[k], events[k + 1]), "profiling");
        nanoseconds[k] = (int64_t)(ms * 1e6f);
    }
    return PD_OK;
}

static int32_t profiled(pd_context *c, const void *const *inputs, const pd_call *call, int64_t *nanoseconds) {
    pd_device *d = c->program->place;
    void *events[plan->launch_count + 1];
    int32_t made = 0, result = 0, code = PD_OK;
    while (made <= plan->launch_count && !result) result = d->cuda.cuEventCreate(&events[made], 0), made += !result;
    if (result) code = pd_cuda_say(d, result, "cuEventCreate", "profiling");
    if (code == PD_OK) code = run(c, inputs, call, 0, events);
    if (code == PD_OK) code = times(d, events, nanoseconds);
    while (made-- > 0) d->cuda.cuEventDestroy_v2(events[made]);
    return code;
}

PD_EXPORT int32_t pd_cuda_run(pd_context *c, const void *const *inputs, void *const *outputs, void *stream,
                              int32_t detached, int64_t *nanoseconds) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    if (!c->ready) return pd_fail(PD_USAGE, "pd_cuda_run needs a successful pd_shapes before it");
    if (!d->ready || x->generation != d->generation) return pd_fail(PD_USAGE, "the context's device was lost");
    void *addresses[plan->input_count + 1], *results[plan->output_count + 1];
    pd_call call = {outputs, addresses, results, stream ? stream : x->stream};
    int32_t code = pd_cuda_enter(d);
    if (code != PD_OK) return code;
    if (!nanoseconds) pd_count_run(c);
    code = nanoseconds ? profiled(c, inputs, &call, nanoseconds) : run(c, inputs, &call, detached, NULL);
    if (code == PD_OK) deliver(c, outputs);
    return pd_cuda_leave(d, code);
}

PD_EXPORT int32_t pd_run(pd_context *c, const void *const *inputs, void *const *outputs) {
    return pd_cuda_run(c, inputs, outputs, NULL, 0, NULL);
}
