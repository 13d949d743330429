/* provider.c: polydyn as an execution provider of ONNX Runtime: the provider, its factory, and the entry points. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "provider.h"

#define EXPORT __attribute__((visibility("default")))

const any_function *ort_api, *ep_api;
int ort_minor;

/* ---- the provider of a session ---- */

static const char *get_name(const OrtEp *ep) {
    (void)ep;
    return NAME;
}

/* Opens or compiles the program of a unit. */
static OrtStatus *make_program(provider *p, unit *u) {
    char path[PATH_BYTES];
    size_t size;
    if (cache_has(u->s, u->key, ".ep")) {
        OrtStatus *bad = load_program(u);
        if (!bad) return NULL;
        cache_path(u->s, u->key, ".ep", path);
        unlink(path); /* damaged, or of another version */
        say_status(u->s, LOG_INFO, bad);
    }
    cache_path(u->s, u->key, ".failed", path);
    OWNED char *reason = read_file(path, &size);
    if (reason) return failure(ORT_EP_FAIL, "polydyn: %s", reason);
    if (u->s->background) return compile_behind(u);
    TRY(request(u->s, &p->compiler, COMPILE, u->key, u->whole));
    return load_program(u);
}

static OrtStatus *fill_unit(provider *p, const OrtGraph *graph, unit *u) {
    if (p->one_set) {
        memcpy(u->key, p->whole, sizeof u->key);
        u->unchecked = p->unchecked;
    } else {
        MESSAGE model = {0};
        TRY(write_model(graph, &model));
        memcpy(u->whole, p->whole, sizeof u->whole);
        model_key(u->s, &model, p->whole, u->key);
        TRY(store_model(u->s, &model, u->key));
    }
    if (!u->s->strict) say_status(u->s, LOG_INFO, open_model(u)); /* the program may do without */
    OrtStatus *bad = make_program(p, u);
    if (!bad || u->s->strict || u->s->write_context) return bad;
    say(u->s, LOG_WARNING, "polydyn: %zu outputs are computed by ONNX Runtime's kernels, because their nodes were not "
        "compiled: %s", u->output_count, ORT(GetErrorMessage)(bad));
    ORT(ReleaseStatus)(bad);
    return NULL;
}

static OrtStatus *compile_one(provider *p, const OrtGraph *graph, const OrtNode *fused, unit **out) {
    OWNED const OrtNode **nodes = NULL;
    size_t count;
    unit *u;
    bool context = false;
    TRY(nodes_of(graph, &nodes, &count));
    if (count == 1) TRY(is_context_node(nodes[0], &context));
    TRY(new_unit(&p->s, fused, &u));
    OrtStatus *bad = context ? load_context(graph, nodes[0], u) : fill_unit(p, graph, u);
    if (bad) free_unit(u);
    else *out = u;
    return bad;
}

/* Programs of one session run in turn, so they share threads. */
static void share_threads(OrtNodeComputeInfo *const *infos, size_t count) {
    program *lender = NULL;
    for (size_t k = 0; k < count; k++) {
        unit *u = (unit *)infos[k];
        if (u->has_thread) return; /* its program comes later, while others run */
    }
    for (size_t k = 0; k < count; k++) {
        program *own = ((unit *)infos[k])->program;
        if (own && lender) borrow_threads(own, lender);
        else if (own) lender = own;
    }
}

static void release_units(OrtEp *ep, OrtNodeComputeInfo **infos, size_t count) {
    (void)ep;
    for (size_t k = count; k-- > 0;) free_unit((unit *)infos[k]);
}

static OrtStatus *compile_all(OrtEp *ep, const OrtGraph **graphs, const OrtNode **fused, size_t count,
                              OrtNodeComputeInfo **infos, OrtNode **contexts) {
    provider *p = (provider *)ep;
    OrtStatus *bad = p->error;
    size_t made = 0;
    p->error = NULL;
    for (; made < count && !bad; made++) {
        unit *u = NULL;
        bad = compile_one(p, graphs[made], fused[made], &u);
        if (bad) break;
        infos[made] = &u->table;
        if (p->s.write_context && contexts) bad = make_context_node(u, fused[made], made, &contexts[made]);
    }
    end_worker(&p->compiler);
    if (!bad) {
        share_threads(infos, count);
        return NULL;
    }
    release_units(ep, infos, made);
    memset(infos, 0, count * sizeof *infos);
    return bad;
}

static const char *compatibility(OrtEp *ep, const OrtGraph *graph) {
    (void)ep, (void)graph;
    return compatibility_text();
}

/* ---- the factory ---- */

static const char *factory_name(const OrtEpFactory *factory) {
    (void)factory;
    return NAME;
}

static const char *vendor(const OrtEpFactory *factory) {
    (void)factory;
    return "polydyn";
}

static uint32_t vendor_id(const OrtEpFactory *factory) {
    (void)factory;
    return 0;
}

static const char *version(const OrtEpFactory *factory) {
    (void)factory;
    return polydyn_version;
}

static bool is_stream_aware(const OrtEpFactory *factory) {
    (void)factory;
    return false;
}

static OrtStatus *validate(OrtEpFactory *factory, const OrtHardwareDevice *const *devices, size_t count,
                           const char *text, int *out) {
    (void)factory, (void)devices, (void)count;
    *out = strcmp(text, compatibility_text()) ? COMPILED_UNSUPPORTED : COMPILED_OPTIMAL;
    return NULL;
}

/* The provider uses ONNX Runtime's own memory: it has no allocator, no data transfer and no stream. */
static OrtStatus *make_nothing(OrtEpFactory *factory, const void *info, const OrtKeyValuePairs *options, void **out) {
    (void)factory, (void)info, (void)options;
    *out = NULL;
    return NULL;
}

static OrtStatus *make_no_transfer(OrtEpFactory *factory, void **out) {
    (void)factory;
    *out = NULL;
    return NULL;
}

static void release_nothing(OrtEpFactory *factory, void *allocator) { (void)factory, (void)allocator; }

static OrtStatus *find_devices(OrtEpFactory *factory, const OrtHardwareDevice *const *devices, size_t count,
                               OrtEpDevice **out, size_t room, size_t *found) {
    FnCreateEpDevice create = (FnCreateEpDevice)ep_api[AtCreateEpDevice];
    *found = 0;
    for (size_t k = 0; k < count && !*found && room; k++) {
        if (ORT(HardwareDevice_Type)(devices[k]) != DEVICE_CPU) continue;
        TRY(create(factory, devices[k], NULL, NULL, out));
        *found = 1;
    }
    return NULL;
}

static void release_provider(OrtEpFactory *factory, OrtEp *ep) {
    provider *p = (provider *)ep;
    (void)factory;
    if (!p) return;
    end_worker(&p->compiler);
    if (p->error) ORT(ReleaseStatus)(p->error);
    free_settings(&p->s);
    free(p);
}

static OrtStatus *create_provider(OrtEpFactory *factory, const OrtHardwareDevice *const *devices,
                                  const OrtKeyValuePairs *const *metadata, size_t count,
                                  const OrtSessionOptions *options, const OrtLogger *logger, OrtEp **out) {
    provider *p = calloc(1, sizeof *p);
    (void)devices, (void)metadata, (void)count;
    if (!p) return failure(ORT_FAIL, "polydyn: out of memory");
    p->table.ort_version_supported = ORT_API;
    p->table.GetName = get_name;
    p->table.GetCapability = get_capability;
    p->table.Compile = compile_all;
    p->table.ReleaseNodeComputeInfos = release_units;
    p->table.GetCompiledModelCompatibilityInfo = compatibility;
    p->compiler = NO_WORKER;
    OrtStatus *bad = read_settings(options, logger, &p->s);
    if (bad) release_provider(factory, &p->table);
    else *out = &p->table;
    return bad;
}

/* ---- entry points ---- */

EXPORT OrtStatus *CreateEpFactories(const char *name, const OrtApiBase *base, const OrtLogger *logger,
                                    OrtEpFactory **factories, size_t room, size_t *count) {
    int major = 0, minor = 0;
    (void)name, (void)logger;
    *count = 0;
    const any_function *table = base->get_api(ORT_API);
    if (!table) { /* too old: only the function that makes an error is certain to be there */
        char text[200];
        const any_function *first = base->get_api(1);
        snprintf(text, sizeof text, "polydyn: needs ONNX Runtime 1.%d or newer, this is %s\n  remedy: pip install "
                 "'onnxruntime>=1.%d'", ORT_API, base->version_string(), ORT_API);
        return first ? ((FnCreateStatus)first[AtCreateStatus])(ORT_FAIL, text) : NULL;
    }
    sscanf(base->version_string(), "%d.%d", &major, &minor);
    ort_api = table;
    ort_minor = major > 1 ? 1000 : minor;
    ep_api = ORT(GetEpApi)();
    if (room < 1) return failure(ORT_INVALID_ARGUMENT, "polydyn: no room for a factory");
    OrtEpFactory *f = calloc(1, sizeof *f);
    if (!f) return failure(ORT_FAIL, "polydyn: out of memory");
    *f = (OrtEpFactory){
        .ort_version_supported = ORT_API, .GetName = factory_name, .GetVendor = vendor,
        .GetSupportedDevices = find_devices, .CreateEp = create_provider, .ReleaseEp = release_provider,
        .GetVendorId = vendor_id, .GetVersion = version, .ValidateCompiledModelCompatibilityInfo = validate,
        .CreateAllocator = make_nothing, .ReleaseAllocator = release_nothing, .CreateDataTransfer = make_no_transfer,
        .IsStreamAware = is_stream_aware, .CreateSyncStreamForDevice = make_nothing,
    };
    factories[0] = f;
    *count = 1;
    return NULL;
}

EXPORT OrtStatus *ReleaseEpFactory(OrtEpFactory *factory) {
    free(factory);
    return NULL;
}
