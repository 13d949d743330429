/* cuda.c: a program and its contexts on a CUDA device. The driver is opened by name at run time. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"

const int64_t pd_arena_align = 256;
static _Thread_local int32_t last_result;

PD_EXPORT int32_t pd_cuda_result(void) { return last_result; }
PD_EXPORT const char *pd_cuda_kernel(const pd_program *p, int32_t k) {
    (void)p;
    return k >= 0 && k < plan->kernel_count ? plan->kernels[k].name : NULL;
}

int32_t pd_cuda_say(const pd_device *d, int32_t result, const char *where, const char *what) {
    const char *name = NULL, *text = NULL;
    d->cuda.cuGetErrorName(result, &name);
    d->cuda.cuGetErrorString(result, &text);
    last_result = result;
    int length = (int)strcspn(where, "("); /* of the function name in a call */
    return pd_fail(PD_DEVICE, "%.*s failed: %s (%s, %d); %s", length, where, text ? text : "unknown error",
                   name ? name : "?", result, what);
}

int32_t pd_cuda_enter(pd_device *d) {
    TRY(cuCtxPushCurrent_v2(d->context), "taking up the context");
    return PD_OK;
}

int32_t pd_cuda_leave(pd_device *d, int32_t code) {
    void *context;
    d->cuda.cuCtxPopCurrent_v2(&context);
    return code;
}

/* ---- programs ---- */

int32_t pd_place_program(pd_program *p) {
    pd_device *d = p->place = calloc(1, sizeof *d);
    if (!d) return PD_MEMORY;
    pthread_mutex_init(&d->loading, NULL);
    d->images = calloc((size_t)plan->kernel_count + 1, sizeof *d->images);
    d->modules = calloc((size_t)plan->kernel_count + 1, sizeof *d->modules);
    d->functions = calloc((size_t)plan->kernel_count + 1, sizeof *d->functions);
    d->early = calloc((size_t)plan->kernel_count + 1, sizeof *d->early);
    d->overlap = 1;
    if (d->images && d->modules && d->functions && d->early) return PD_OK;
    pd_displace_program(p);
    return PD_MEMORY;
}

static void forget(pd_device *d) {
    memset(d->functions, 0, (size_t)plan->kernel_count * sizeof *d->functions);
    d->loaded = 0;
    d->weights = 0;
    d->ready = 0;
}

static void unload(pd_device *d) {
    if (!d->ready || pd_cuda_enter(d) != PD_OK) return;
    for (int32_t i = 0; i < d->loaded; i++) d->cuda.cuModuleUnload(d->modules[i]);
    if (d->weights) d->cuda.cuMemFree_v2(d->weights);
    pd_cuda_leave(d, PD_OK);
    forget(d);
}

void pd_displace_program(pd_program *p) {
    pd_device *d = p->place;
    unload(d);
    free(d->images);
    free(d->modules);
    free(d->functions);
    free(d->early);
    pthread_mutex_destroy(&d->loading);
    free(d);
}

PD_EXPORT void pd_cuda_lost(pd_program *p) {
    pd_device *d = p->place;
    d->generation++;
    forget(d);
}

static int32_t find_driver(pd_device *d, const char *driver) {
    void *library = dlopen(driver, RTLD_NOW);
    if (!library) return pd_fail(PD_DEVICE, "no CUDA driver: %s", dlerror());
#define FIND(name, parameters)                                                                                        \
    if (!(d->cuda.name = (int32_t(*) parameters)dlsym(library, #name)))                                               \
        return pd_fail(PD_DEVICE, "the CUDA driver %s has no " #name, driver);
    DRIVER(FIND)
#define FIND_GRAPH(name, parameters)                                                                                  \
    d->graphs &= (d->cuda.name = (int32_t(*) parameters)dlsym(library, #name)) != NULL;
    d->graphs = 1;
    GRAPHS(FIND_GRAPH)
#define FIND_OVERLAP(name, parameters)                                                                                \
    d->overlap &= (d->cuda.name = (int32_t(*) parameters)dlsym(library, #name)) != NULL;
    OVERLAP(FIND_OVERLAP)
    d->cuTensorMapEncodeTiled = (pd_encode *)dlsym(library, "cuTensorMapEncodeTiled");
    d->cuTensorMapEncodeIm2col = (pd_encode_pixels *)dlsym(library, "cuTensorMapEncodeIm2col");
    return PD_OK;
}

static int32_t load_weights(pd_program *p) {
    pd_device *d = p->place;
    int32_t device = 0, limit = 0;
    TRY(cuCtxGetDevice(&device), "asking for the device");
    TRY(cuDeviceGetAttribute(&limit, SHARED_OPT_IN, device), "asking for shared memory");
    d->shared_limit = limit;
    char what[64];
    snprintf(what, sizeof what, "%" PRId64 " bytes of weights", plan->weight_bytes);
    if (plan->weight_bytes) {
        TRY(cuMemAlloc_v2(&d->weights, (size_t)plan->weight_bytes), what);
        TRY(cuMemcpyHtoD_v2(d->weights, p->weights, (size_t)plan->weight_bytes), what);
        TRY(cuStreamSynchronize(NULL), what); /* streams of runs do not wait for a copy from pageable memory */
    }
    p->constants = (const char *)(uintptr_t)d->weights;
    return PD_OK;
}

PD_EXPORT int32_t pd_cuda_open(pd_program *p, const char *driver, void *context, pd_cuda_image image, void *user,
                               int32_t arch) {
    pd_device *d = p->place;
    last_result = 0;
    if (d->ready) return pd_fail(PD_USAGE, "the program is open already");
    d->context = context;
    d->image = image;
    d->user = user;
    d->arch = arch;
    int32_t code = find_driver(d, driver);
    if (code == PD_OK) code = pd_cuda_enter(d);
    if (code != PD_OK) return code;
    d->ready = 1;
    code = pd_cuda_leave(d, load_weights(p));
    if (code != PD_OK) unload(d);
    return code;
}

PD_EXPORT void pd_cuda_without(pd_program *p, int64_t features) { ((pd_device *)p->place)->lacking = features; }

static int32_t load(pd_device *d, int32_t k, int shared) {
    const char *name = plan->kernels[k].name;
    const void *image = d->image(d->user, k);
    int32_t i = 0;
    last_result = 0;
    if (!image) return pd_fail(PD_DEVICE, "there is no image of the kernel %s", name);
    while (i < d->loaded && d->images[i] != image) i++;
    if (i == d->loaded) {
        TRY(cuModuleLoadData(&d->modules[i], image), name);
        d->images[i] = image;
        d->loaded++;
    }
    void *function;
    int32_t arch = 0; /* kernels compiled for an older architecture lack the code for an early begin */
    TRY(cuModuleGetFunction(&function, d->modules[i], name), name);
    TRY(cuFuncGetAttribute(&arch, PTX_VERSION, function), name);
    d->early[k] = d->overlap && plan->kernels[k].begins && arch >= EARLY_ARCH;
    TRY(cuFuncSetAttribute(function, MAX_DYNAMIC_SHARED, (int32_t)d->shared_limit), name);
    if (shared) TRY(cuFuncSetAttribute(function, CARVE_OUT, 100), name); /* per cent: as many blocks as fit */
    d->functions[k] = function;
    return PD_OK;
}

int32_t pd_cuda_load(pd_device *d, int32_t k, int shared) {
    pthread_mutex_lock(&d->loading);
    int32_t code = d->functions[k] ? PD_OK : load(d, k, shared);
    pthread_mutex_unlock(&d->loading);
    return code;
}

PD_EXPORT void pd_cuda_overlap(pd_program *p, int32_t allowed) { ((pd_device *)p->place)->overlap = allowed; }

/* ---- contexts ---- */

/* Returns the largest number of parameters of any candidate of a launch, including the launches that follow it. */
static int32_t most_parameters(const pd_launch_entry *l) {
    int32_t most = 0;
    for (int32_t i = 0; i < l->candidates;) {
        int32_t together = 0, last = i + plan->candidates[l->first_candidate + i].after;
        for (; i <= last; i++) {
            const pd_candidate *n = &plan->candidates[l->first_candidate + i];
            together += n->maps + n->buffers + n->symbols;
        }
        if (together > most) most = together;
    }
    return most;
}

static int32_t make(pd_device *d, pd_cuda *x) {
    TRY(cuStreamCreate(&x->stream, NON_BLOCKING), "making a stream");
    TRY(cuEventCreate(&x->done, NO_TIMING), "making an event");
    return PD_OK;
}

int32_t pd_place_context(pd_context *c) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place = calloc(1, sizeof *x);
    if (!d->ready) return pd_fail(PD_USAGE, "pd_context_new needs a successful pd_cuda_open before it");
    if (!x) return pd_fail(PD_MEMORY, "out of memory");
    x->generation = d->generation;
    c->values[plan->symbol_count + PD_SHARED] = d->shared_limit;
    c->values[plan->symbol_count + PD_ARCH] = d->arch;
    c->values[plan->symbol_count + PD_LACKING] = d->lacking;
    x->first = calloc((size_t)plan->launch_count + 1, sizeof *x->first);
    x->remembered = calloc((size_t)pd_cuda_remembered_words() + 1, sizeof *x->remembered);
    if (!x->first || !x->remembered) return pd_fail(PD_MEMORY, "out of memory");
    int32_t all = 0;
    for (int32_t k = 0; k < plan->launch_count; all += most_parameters(&plan->launches[k++])) x->first[k] = all;
    x->values = calloc((size_t)all + 1, sizeof *x->values);
    x->parameters = calloc((size_t)all + 1, sizeof *x->parameters);
    if (!x->values || !x->parameters) return pd_fail(PD_MEMORY, "out of memory");
    x->maps = aligned_alloc(MAP_ALIGN, ((size_t)plan->map_count + 1) * MAP_BYTES);
    x->map_addresses = calloc((size_t)plan->map_count + 1, sizeof *x->map_addresses);
    x->word_counts = calloc(2 * (size_t)plan->device_check_count + 1, sizeof *x->word_counts);
    x->inputs = calloc((size_t)plan->input_count + 1, sizeof *x->inputs);
    x->outputs = calloc((size_t)plan->output_count + 1, sizeof *x->outputs);
    x->keeper = pd_keeper_new();
    if (!x->maps || !x->map_addresses || !x->word_counts || !x->inputs || !x->outputs || !x->keeper)
        return pd_fail(PD_MEMORY, "out of memory");
    int32_t code = pd_cuda_enter(d);
    return code == PD_OK ? pd_cuda_leave(d, make(d, x)) : code;
}

int pd_cuda_is_lost(const pd_context *c) {
    const pd_device *d = c->program->place;
    return !d->ready || ((const pd_cuda *)c->place)->generation != d->generation;
}

int32_t pd_cuda_alive(const pd_context *c) {
    return pd_cuda_is_lost(c) ? pd_fail(PD_USAGE, "the context's device was lost") : PD_OK;
}

void pd_cuda_settle(pd_device *d, pd_cuda *x) {
    if (x->busy) d->cuda.cuEventSynchronize(x->done);
    x->busy = 0;
}

void pd_displace_context(pd_context *c) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    if (!x) return;
    pd_cuda_release(c); /* before the memory that its graphs use */
    if (!pd_cuda_is_lost(c) && pd_cuda_enter(d) == PD_OK) {
        pd_cuda_settle(d, x);
        pd_cuda_drop(c);
        if (c->arena) d->cuda.cuMemFree_v2((uint64_t)(uintptr_t)c->arena);
        if (x->counters) d->cuda.cuMemFree_v2(x->counters);
        if (x->pinned) d->cuda.cuMemFreeHost(x->pinned);
        if (x->found) d->cuda.cuMemFreeHost(x->found);
        if (x->done) d->cuda.cuEventDestroy_v2(x->done);
        if (x->stream) d->cuda.cuStreamDestroy_v2(x->stream);
        pd_cuda_leave(d, PD_OK);
    }
    if (x->keeper) pd_keeper_free(x->keeper);
    free(x->first);
    free(x->remembered);
    free(x->values);
    free(x->parameters);
    free(x->maps);
    free(x->map_addresses);
    free(x->word_counts);
    free(x->inputs);
    free(x->outputs);
    free(x);
}

PD_EXPORT void pd_cuda_places(pd_context *c, const int32_t *places) {
    memcpy(c->places, places, (size_t)(plan->input_count + plan->output_count) * sizeof *places);
    c->ready = 0;
}

PD_EXPORT void *pd_cuda_stream(const pd_context *c) { return ((const pd_cuda *)c->place)->stream; }

void pd_place_info(const pd_context *c, int32_t k, pd_launch_info *info) {
    const pd_candidate *first = &plan->candidates[plan->launches[k].first_candidate];
    const pd_cuda *x = c->place;
    const pd_candidate *n = x->replayed || k < x->next ? pd_chosen(c, k) : NULL;
    info->kernel = plan->kernels[(n ? n : first)->kernel].name;
    info->tasks = n ? c->values[n->tasks] : 0;
    info->threads = n ? n->threads : 0;
}

int32_t pd_cuda_pinned(pd_device *d, char **memory, int64_t *has, int64_t bytes) {
    if (bytes <= *has) return PD_OK;
    char what[64];
    snprintf(what, sizeof what, "%" PRId64 " bytes of pinned memory", bytes);
    if (*memory) d->cuda.cuMemFreeHost(*memory);
    *memory = NULL;
    *has = 0;
    TRY(cuMemHostAlloc((void **)memory, (size_t)bytes, 0), what);
    *has = bytes;
    return PD_OK;
}

static int32_t room(pd_device *d, void *stream, void **memory, int64_t *has, int64_t bytes) {
    char what[80];
    snprintf(what, sizeof what, "%" PRId64 " bytes for tensors between parts", bytes);
    TRY(cuStreamSynchronize(stream), what);
    if (*memory) d->cuda.cuMemFree_v2((uint64_t)(uintptr_t)*memory);
    *memory = NULL, *has = 0;
    uint64_t made = 0;
    if (bytes) TRY(cuMemAlloc_v2(&made, (size_t)bytes), what);
    *memory = (void *)(uintptr_t)made, *has = bytes;
    return PD_OK;
}

PD_EXPORT int32_t pd_cuda_room(const pd_context *c, void *stream, void **memory, int64_t *has, int64_t bytes) {
    pd_device *d = c->program->place;
    if (pd_cuda_is_lost(c)) {
        *memory = NULL, *has = 0; /* it was freed with the CUcontext */
        return bytes ? pd_cuda_alive(c) : PD_OK;
    }
    int32_t code = pd_cuda_enter(d);
    return code == PD_OK ? pd_cuda_leave(d, room(d, stream, memory, has, bytes)) : code;
}

static int32_t fetch(pd_device *d, void *stream, void *to, const void *from, int64_t bytes) {
    TRY(cuMemcpyDtoHAsync_v2(to, (uint64_t)(uintptr_t)from, (size_t)bytes, stream), "a tensor between parts");
    TRY(cuStreamSynchronize(stream), "a tensor between parts");
    return PD_OK;
}

PD_EXPORT int32_t pd_cuda_fetch(const pd_context *c, void *stream, void *to, const void *from, int64_t bytes) {
    pd_device *d = c->program->place;
    int32_t code = pd_cuda_alive(c);
    if (code == PD_OK && bytes) code = pd_cuda_enter(d);
    return code == PD_OK && bytes ? pd_cuda_leave(d, fetch(d, stream, to, from, bytes)) : code;
}

static int32_t grow(pd_context *c) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    pd_cuda_settle(d, x);
    pd_cuda_drop(c);
    if (c->planned_bytes > c->arena_bytes) {
        char what[64];
        snprintf(what, sizeof what, "%" PRId64 " bytes for intermediates", c->planned_bytes);
        if (c->arena) d->cuda.cuMemFree_v2((uint64_t)(uintptr_t)c->arena); /* before allocating more */
        c->arena = NULL;
        c->arena_bytes = 0;
        uint64_t arena;
        TRY(cuMemAlloc_v2(&arena, (size_t)c->planned_bytes), what);
        c->arena = (char *)(uintptr_t)arena;
        c->arena_bytes = c->planned_bytes;
    }
    return pd_cuda_pinned(d, &x->pinned, &x->pinned_bytes, c->planned_bytes - c->staging_offset);
}

/* Kernels use shared memory, not the arena. */
int64_t pd_place_scratch(pd_context *c) {
    (void)c;
    return 0;
}

int32_t pd_place_sizes(pd_context *c) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    pd_cuda_release(c);
    x->next = x->replayed = 0;
    int64_t staging = c->planned_bytes - c->staging_offset;
    if (c->planned_bytes <= c->arena_bytes && staging <= x->pinned_bytes) return PD_OK;
    int32_t code = pd_cuda_enter(d);
    return code == PD_OK ? pd_cuda_leave(d, grow(c)) : code;
}
