/* cuda_run.c: runs on a CUDA device: inputs, launches, outputs; and bound calls. */
#include <stdio.h>
#include <string.h>

#include "cuda_internal.h"


/* ---- inputs ---- */

static char *mirror(const pd_context *c, int64_t staged) {
    return ((pd_cuda *)c->place)->pinned + (staged - c->staging_offset);
}

/* Returns the bytes of input i that are copied into the arena, or 0. */
static int64_t staged_bytes(const pd_context *c, int32_t i) {
    return c->staged[i] < 0 ? 0 : pd_dense_bytes(&plan->inputs[i], c->dims + pd_first_axis(plan->inputs, i));
}

static int is_dense(const pd_context *c, int32_t i) {
    const pd_io *io = &plan->inputs[i];
    int64_t first = pd_first_axis(plan->inputs, i), dense[PD_MAX_RANK];
    pd_dense_strides(io->rank, c->dims + first, pd_item_bytes[io->dtype], dense);
    return pd_differing_axis(io->rank, c->dims + first, c->strides + first, dense) < 0;
}

/* Fills the pinned mirror of input i if it is in host memory. */
static void fill(const pd_context *c, int32_t i, const void *from) {
    const pd_io *io = &plan->inputs[i];
    int64_t first = pd_first_axis(plan->inputs, i), bytes = staged_bytes(c, i);
    if (!bytes || c->places[i] != PD_ON_HOST) return;
    char *to = mirror(c, c->staged[i]);
    if (is_dense(c, i)) memcpy(to, from, (size_t)bytes);
    else pd_copy_strided(to, from, io->rank, c->dims + first, c->strides + first, pd_item_bytes[io->dtype]);
}

/* Starts the copy of input i to the arena if it needs one. */
static int32_t send(pd_context *c, int32_t i, pd_call *call) {
    const char *name = plan->inputs[i].name;
    int64_t bytes = staged_bytes(c, i);
    if (!bytes) return PD_OK;
    c->copied_bytes += bytes;
    if (c->places[i] == PD_ON_HOST)
        return pd_cuda_copy(c, call, PD_HOST_TO_DEVICE, call->inputs[i], mirror(c, c->staged[i]), bytes, name);
    if (!is_dense(c, i)) return pd_fail(PD_INPUT, "input '%s' is in device memory and not dense", name);
    return pd_cuda_copy(c, call, PD_DEVICE_TO_DEVICE, call->inputs[i], call->given[i], bytes, name);
}

/* ---- launches ---- */

/* Encodes the 128-byte tensor map for an address. `sizes`: its dims, outer strides and corners. */
static int32_t encode_map(const pd_device *d, const pd_tensor_map *m, void *map, uint64_t address, const int64_t *sizes) {
    void *base = (void *)(uintptr_t)address;
    uint64_t unsigned_sizes[2 * MAP_RANK];
    for (int32_t s = 0; s < 2 * m->rank - 1; s++) unsigned_sizes[s] = (uint64_t)sizes[s];
    const uint64_t *strides = unsigned_sizes + m->rank;
    uint32_t steps[MAP_RANK] = {1, 1, 1, 1, 1};
    if (!m->steps[0])
        return d->cuTensorMapEncodeTiled(map, m->type, (uint32_t)m->rank, base, unsigned_sizes, strides, m->box, steps,
                                         0, SWIZZLE_128B, PROMOTE_256B, 0);
    int32_t corners[2 * MAP_RANK], along = m->rank - 2;
    for (int32_t s = 0; s < 2 * along; s++) corners[s] = (int32_t)sizes[2 * m->rank - 1 + s];
    for (int32_t s = 0; s < along; s++) steps[1 + s] = m->steps[s];
    return d->cuTensorMapEncodeIm2col(map, m->type, (uint32_t)m->rank, base, unsigned_sizes, strides, corners,
                                      corners + along, m->box[0], m->box[1], steps, 0, SWIZZLE_128B, PROMOTE_256B, 0);
}

/* Encodes a candidate's tensor maps if the addresses of their buffers have changed. */
static int32_t encode(pd_context *c, const pd_candidate *n, const char *label) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    for (int32_t i = n->first_map; i < n->first_map + n->maps; i++) {
        const pd_tensor_map *m = &plan->maps[i];
        uint64_t address = (uint64_t)(uintptr_t)c->buffers[m->buffer] + (uint64_t)c->values[m->offset];
        if (address == x->map_addresses[i]) continue;
        int64_t sizes[4 * MAP_RANK];
        int32_t count = 2 * m->rank - 1 + (m->steps[0] ? 2 * (m->rank - 2) : 0);
        for (int32_t s = 0; s < count; s++) sizes[s] = c->values[plan->map_sizes[m->first_size + s]];
        if (!d->cuTensorMapEncodeTiled || !d->cuTensorMapEncodeIm2col)
            return pd_fail(PD_USAGE, "the driver has no tensor maps, which %s needs", label);
        int32_t result = encode_map(d, m, x->maps + (int64_t)i * MAP_BYTES, address, sizes);
        if (result) return pd_cuda_say(d, result, m->steps[0] ? "cuTensorMapEncodeIm2col" : "cuTensorMapEncodeTiled", label);
        x->map_addresses[i] = address;
    }
    return PD_OK;
}

int32_t pd_cuda_copy(pd_context *c, pd_call *call, int32_t way, void *to, const void *from, int64_t bytes, const char *what) {
    pd_device *d = c->program->place;
    uint64_t there = (uint64_t)(uintptr_t)to, here = (uint64_t)(uintptr_t)from;
    if (call->nodes) return pd_nodes_copy(c, call->nodes, way, to, from, bytes, what);
    call->behind = 0;
    if (way == PD_HOST_TO_DEVICE) TRY(cuMemcpyHtoDAsync_v2(there, from, (size_t)bytes, call->stream), what);
    if (way == PD_DEVICE_TO_HOST) TRY(cuMemcpyDtoHAsync_v2(to, here, (size_t)bytes, call->stream), what);
    if (way == PD_DEVICE_TO_DEVICE) TRY(cuMemcpyDtoDAsync_v2(there, here, (size_t)bytes, call->stream), what);
    return PD_OK;
}

int32_t pd_cuda_start(pd_context *c, pd_call *call, int32_t k, const pd_candidate *n, void **parameters) {
    pd_device *d = c->program->place;
    if (call->nodes) return pd_nodes_start(c, call->nodes, k, n, parameters);
    pd_launch_attribute early = {.id = BEGINS_EARLY, .value = 1};
    pd_launch_config how = {{(uint32_t)c->values[n->tasks], 1, 1}, {(uint32_t)n->threads, 1, 1},
                            (uint32_t)c->values[n->scratch], call->stream, &early, 1};
    void *function = d->functions[n->kernel];
    const char *label = plan->launches[k].label;
    if (call->behind && d->early[n->kernel]) TRY(cuLaunchKernelEx(&how, function, parameters, NULL), label);
    else TRY(cuLaunchKernel(function, how.grid[0], 1, 1, how.block[0], 1, 1, how.shared, call->stream, parameters, NULL), label);
    call->behind = 1;
    return PD_OK;
}

static int32_t launch(pd_context *c, int32_t k, pd_call *call) {
    pd_cuda *x = c->place;
    const pd_launch_entry *l = &plan->launches[k];
    int32_t code = k < x->next ? PD_OK : pd_cuda_choose(c, k, call->stream);
    const pd_candidate *n = code == PD_OK ? pd_chosen(c, k) : NULL;
    if (!n || pd_skipped(l, call->inputs, call->results)) return code;
    if (pd_cuda_on_host(c, k)) return PD_OK;
    int32_t at = x->first[k];
    c->copied_bytes += c->values[l->copied];
    for (const pd_candidate *last = n + n->after; n <= last; at += n->maps + n->buffers + n->symbols, n++) {
        code = encode(c, n, l->label);
        if (code != PD_OK) return code;
        for (int32_t b = 0; b < n->buffers; b++) {
            int32_t buffer = plan->launch_buffers[n->first_buffer + b];
            x->values[at + n->maps + b] = buffer == -1  ? (int64_t)x->workspace
                                          : buffer == -2 ? (int64_t)x->counters
                                                         : (int64_t)(uintptr_t)c->buffers[buffer];
        }
        if (c->values[n->tasks] > 0) code = pd_cuda_start(c, call, k, n, x->parameters + at);
        if (code != PD_OK) return code;
    }
    return pd_cuda_fetch_found(c, k, call);
}

/* Checks the indices in inputs in host memory; all others are checked on the device. */
static int32_t scan(const pd_context *c) {
    int32_t code = PD_OK;
    for (int32_t i = 0; i < plan->index_check_count && code == PD_OK; i++) {
        const pd_index_check *p = &plan->index_checks[i];
        int32_t input = plan->buffers[p->buffer].index;
        if (c->places[input] == PD_ON_HOST) code = pd_check_index(c, p, mirror(c, c->staged[input]));
    }
    return code;
}

static int32_t launch_all(pd_context *c, pd_call *call, void **events) {
    pd_device *d = c->program->place;
    int32_t code = PD_OK;
    if (events) TRY(cuEventRecord(events[0], call->stream), "profiling");
    for (int32_t k = 0; k < plan->launch_count && code == PD_OK; k++) {
        code = launch(c, k, call);
        if (code == PD_OK && events) TRY(cuEventRecord(events[k + 1], call->stream), "profiling");
        if (events) call->behind = 0;
    }
    return code;
}

/* ---- a run ---- */

static int32_t give_outputs(pd_context *c, pd_call *call) {
    int32_t code = PD_OK;
    for (int32_t k = 0; k < plan->copy_count && code == PD_OK; k++) {
        const pd_copy *p = &plan->copies[k];
        int64_t bytes = c->values[p->bytes];
        if (bytes <= 0) continue;
        code = pd_cuda_copy(c, call, PD_DEVICE_TO_DEVICE, call->results[p->output], c->buffers[p->buffer], bytes,
                            plan->outputs[p->output].name);
        c->copied_bytes += bytes;
    }
    for (int32_t o = 0; o < plan->output_count && code == PD_OK; o++) {
        int64_t at = c->staged[plan->input_count + o], bytes = pd_output_bytes(c, o);
        if (c->places[plan->input_count + o] != PD_ON_HOST || !bytes) continue;
        code = pd_cuda_copy(c, call, PD_DEVICE_TO_HOST, mirror(c, at), c->arena + at, bytes, plan->outputs[o].name);
    }
    return code;
}

int32_t pd_cuda_issue(pd_context *c, pd_call *call, void **events) {
    int32_t code = PD_OK;
    for (int32_t i = 0; i < plan->input_count && code == PD_OK; i++) code = send(c, i, call);
    if (code == PD_OK) code = launch_all(c, call, events);
    if (code == PD_OK) code = give_outputs(c, call);
    return code;
}

/* Copies outputs from their mirrors to the caller's arrays in host memory. */
static void deliver(const pd_context *c, void *const *outputs) {
    for (int32_t o = 0; o < plan->output_count; o++) {
        if (c->places[plan->input_count + o] != PD_ON_HOST) continue;
        memcpy(outputs[o], mirror(c, c->staged[plan->input_count + o]), (size_t)pd_output_bytes(c, o));
    }
}

/* Sets where the kernels of a call read and write. */
static int32_t bind(pd_context *c, const pd_call *call) {
    int32_t code = PD_OK;
    for (int32_t i = 0; i < plan->input_count; i++)
        call->inputs[i] = c->staged[i] < 0 ? (void *)call->given[i] : c->arena + c->staged[i];
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

#define BEFORE " (in a call before this one; its outputs are void, and this one did not run)"

/* Prepares the stream: the context's last run may still be using its memory. */
static int32_t begin(pd_context *c, void *stream) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    int32_t code = pd_cuda_index_status(c, BEFORE);
    if (code == PD_OK) code = pd_cuda_ask(c);
    if (code != PD_OK) return code;
    int host = 0; /* arrays in host memory: pinned memory is written, so the previous run must have ended */
    for (int32_t i = 0; i < plan->input_count + plan->output_count; i++) host |= c->places[i] == PD_ON_HOST;
    if (host) pd_cuda_settle(d, x);
    /* on the same stream too: equal handles may denote streams of two threads, or a new stream */
    if (x->busy) TRY(cuStreamWaitEvent(stream, x->done, 0), "waiting for the last run");
    return PD_OK;
}

/* Ends a run after all work is issued, or after a failure with `code`. Waits for it unless detached. */
static int32_t end(pd_context *c, void *stream, int32_t code, int32_t detached) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    for (int32_t o = 0; o < plan->output_count; o++) detached &= c->places[plan->input_count + o] != PD_ON_HOST;
    if (code == PD_OK && detached) {
        int32_t result = d->cuda.cuEventRecord(x->done, stream);
        if (!result) {
            x->busy = 1;
            x->unread = pd_cuda_checks_indices(c);
            return PD_OK;
        }
        code = pd_cuda_say(d, result, "cuEventRecord", "ending a run");
    }
    int32_t result = d->cuda.cuStreamSynchronize(stream); /* after a failure too: nothing may still be running, */
    pd_cuda_settle(d, x);                                 /* nor the previous run */
    if (code != PD_OK) return code;
    if (result) return pd_cuda_say(d, result, "cuStreamSynchronize", "a kernel of this run failed");
    return pd_cuda_found(c, "");
}

/* Launches a graph of the run on the stream. */
static int32_t repeat(pd_context *c, const pd_recorded *made, void *stream) {
    pd_device *d = c->program->place;
    c->copied_bytes += made->copied;
    if (made->graph) TRY(cuGraphLaunch(made->graph, stream), "repeating a call");
    return PD_OK;
}

static int32_t run(pd_context *c, pd_call *call, int32_t detached, void **events) {
    const pd_recorded *kept = NULL;
    int32_t code = begin(c, call->stream);
    if (code == PD_OK) code = bind(c, call);
    for (int32_t i = 0; i < plan->input_count && code == PD_OK; i++) fill(c, i, call->given[i]);
    if (code == PD_OK) code = scan(c);
    if (code == PD_OK && !events) code = pd_cuda_kept(c, call, &kept);
    if (code == PD_OK) code = kept ? repeat(c, kept, call->stream) : pd_cuda_issue(c, call, events);
    return end(c, call->stream, code, detached);
}

static int32_t times(pd_device *d, void **events, int64_t *nanoseconds) {
    for (int32_t k = 0; k < plan->launch_count; k++) {
        float ms = 0;
        TRY(cuEventElapsedTime(&ms, events[k], events[k + 1]), "profiling");
        nanoseconds[k] = (int64_t)(ms * 1e6f);
    }
    return PD_OK;
}

static int32_t profiled(pd_context *c, pd_call *call, int64_t *nanoseconds) {
    pd_device *d = c->program->place;
    void *events[plan->launch_count + 1];
    int32_t made = 0, result = 0, code = PD_OK;
    while (made <= plan->launch_count && !result) result = d->cuda.cuEventCreate(&events[made], 0), made += !result;
    if (result) code = pd_cuda_say(d, result, "cuEventCreate", "profiling");
    if (code == PD_OK) code = run(c, call, 0, events);
    if (code == PD_OK) code = times(d, events, nanoseconds);
    while (made-- > 0) d->cuda.cuEventDestroy_v2(events[made]);
    return code;
}

/* Rejects a caller's stream that is being captured: its graph would retain memory that other calls use. */
static int32_t refuse_capture(pd_device *d, void *stream) {
    int32_t captures = 0;
    if (stream) TRY(cuStreamIsCapturing(stream, &captures), "looking at the stream");
    return captures ? pd_fail(PD_INPUT, "the stream is capturing a graph, whose replays would use memory of other calls: "
                                        "bind the call instead, and call it outside the capture") : PD_OK;
}

/* Checks that the context is ready for a call. */
static int32_t ready(const pd_context *c, const char *who) {
    return c->ready ? pd_cuda_alive(c) : pd_fail(PD_USAGE, "%s needs a successful pd_shapes before it", who);
}

PD_EXPORT int32_t pd_cuda_run(pd_context *c, const void *const *inputs, void *const *outputs, void *stream,
                              int32_t detached, int64_t *nanoseconds) {
    pd_device *d = c->program->place;
    void *addresses[plan->input_count + 1], *results[plan->output_count + 1];
    pd_call call = {inputs, outputs, addresses, results, stream ? stream : ((pd_cuda *)c->place)->stream, NULL, 0};
    int32_t code = ready(c, "pd_cuda_run");
    if (code == PD_OK) code = pd_cuda_enter(d);
    if (code != PD_OK) return code;
    code = refuse_capture(d, stream);
    if (code != PD_OK) return pd_cuda_leave(d, code);
    pd_cuda_release(c);
    if (!nanoseconds) pd_count_run(c);
    code = nanoseconds ? profiled(c, &call, nanoseconds) : run(c, &call, detached, NULL);
    if (code == PD_OK) deliver(c, outputs);
    return pd_cuda_leave(d, code);
}

PD_EXPORT int32_t pd_run(pd_context *c, const void *const *inputs, void *const *outputs) {
    return pd_cuda_run(c, inputs, outputs, NULL, 0, NULL);
}

/* ---- bound calls: one graph each, independent of those that the context keeps ---- */

static int32_t record(pd_context *c, const pd_call *call) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    if (!d->graphs) return pd_cuda_say(d, NOT_SUPPORTED, "binding a call", "the driver is older than CUDA 11.4");
    pd_cuda_settle(d, x); /* choosing may free the workspace */
    int32_t code = pd_cuda_index_status(c, BEFORE);
    if (code == PD_OK) code = pd_cuda_ask(c);
    if (code == PD_OK) code = bind(c, call);
    while (x->next < plan->launch_count && code == PD_OK) code = pd_cuda_choose(c, x->next, call->stream);
    if (code == PD_OK) code = pd_cuda_build(c, call, &x->bound);
    if (code != PD_OK) return code;
    memcpy(x->inputs, call->given, (size_t)plan->input_count * sizeof *x->inputs);
    memcpy(x->outputs, call->outputs, (size_t)plan->output_count * sizeof *x->outputs);
    x->recorded = 1;
    return PD_OK;
}

PD_EXPORT int32_t pd_cuda_record(pd_context *c, const void *const *inputs, void *const *outputs) {
    pd_device *d = c->program->place;
    void *addresses[plan->input_count + 1], *results[plan->output_count + 1];
    pd_call call = {inputs, outputs, addresses, results, ((pd_cuda *)c->place)->stream, NULL, 0};
    int32_t code = ready(c, "pd_cuda_record");
    if (code == PD_OK) code = pd_cuda_enter(d);
    if (code != PD_OK) return code;
    pd_cuda_release(c);
    code = record(c, &call);
    return pd_cuda_leave(d, code);
}

static int32_t replay(pd_context *c, void *stream, int32_t detached) {
    pd_cuda *x = c->place;
    int32_t code = begin(c, stream);
    for (int32_t i = 0; i < plan->input_count && code == PD_OK; i++) fill(c, i, x->inputs[i]);
    if (code == PD_OK) code = scan(c);
    if (code == PD_OK) code = repeat(c, &x->bound, stream);
    return end(c, stream, code, detached);
}

PD_EXPORT int32_t pd_cuda_replay(pd_context *c, void *stream, int32_t detached) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    int32_t code = ready(c, "pd_cuda_replay");
    if (code == PD_OK && !x->recorded) code = pd_fail(PD_USAGE, "pd_cuda_replay needs pd_cuda_record before it");
    if (code == PD_OK) code = pd_cuda_enter(d);
    if (code != PD_OK) return code;
    code = refuse_capture(d, stream);
    if (code != PD_OK) return pd_cuda_leave(d, code);
    pd_count_run(c);
    code = replay(c, stream ? stream : x->stream, detached);
    if (code == PD_OK) deliver(c, x->outputs);
    return pd_cuda_leave(d, code);
}

PD_EXPORT void pd_cuda_release(pd_context *c) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    if (x->bound.graph && !pd_cuda_is_lost(c) && pd_cuda_enter(d) == PD_OK) {
        pd_cuda_settle(d, x); /* a replay may be running */
        pd_cuda_destroy(c, &x->bound);
        pd_cuda_leave(d, PD_OK);
    }
    x->bound.graph = NULL;
    x->recorded = 0;
}
