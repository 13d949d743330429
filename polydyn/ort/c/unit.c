/* unit.c: a fused node. Its program computes the calls; what it rejects, and what comes before it is compiled, is
 * computed by the inner session (inner.c). */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "provider.h"

/* ---- calls ---- */

static void free_call(const program *p, call_state *c) {
    if (!c) return;
    if (c->context) p->pd_context_free(c->context);
    free(c->tensors);
    free(c->from);
    free(c->to);
    free(c->shapes);
    free(c->dims);
    for (int32_t k = 0; c->own && k < p->output_count; k++) free(c->own[k]);
    free(c->own);
    free(c);
}

static OrtStatus *new_call(const program *p, int threads, call_state **out) {
    size_t dims = 1, inputs = (size_t)p->input_count, outputs = (size_t)p->output_count;
    for (size_t k = 0; k < outputs; k++) dims += (size_t)p->outputs[k].rank;
    call_state *c = calloc(1, sizeof *c);
    if (!c) return failure(ORT_FAIL, "polydyn: out of memory");
    c->tensors = calloc(inputs + 1, sizeof *c->tensors);
    c->from = calloc(inputs + 1, sizeof *c->from);
    c->to = calloc(outputs + 1, sizeof *c->to);
    c->shapes = calloc((inputs + 1) * PD_MAX_RANK, sizeof *c->shapes);
    c->dims = calloc(dims, sizeof *c->dims);
    c->own = calloc(outputs + 1, sizeof *c->own);
    OrtStatus *bad = NULL;
    if (!c->tensors || !c->from || !c->to || !c->shapes || !c->dims || !c->own)
        bad = failure(ORT_FAIL, "polydyn: out of memory");
    else if (p->pd_context_new(p->program, threads, &c->context)) {
        c->context = NULL;
        bad = failure(ORT_FAIL, "polydyn: %s", p->pd_error());
    }
    if (bad) free_call(p, c);
    else *out = c;
    return bad;
}

static OrtStatus *take_call(unit *u, const program *p, call_state **out) {
    pthread_mutex_lock(&u->lock);
    call_state *c = u->idle;
    if (c) u->idle = c->next;
    pthread_mutex_unlock(&u->lock);
    *out = c;
    return c ? NULL : new_call(p, u->s->threads, out);
}

static void return_call(unit *u, call_state *c) {
    pthread_mutex_lock(&u->lock);
    c->next = u->idle;
    u->idle = c;
    pthread_mutex_unlock(&u->lock);
}

/* ---- running the program ---- */

static _Alignas(64) char empty[64]; /* the address of tensors without elements, for which ONNX Runtime may give NULL */

static OrtStatus *read_input(const OrtValue *value, int64_t *shape, pd_tensor *tensor, const void **data) {
    int type;
    size_t rank;
    const int64_t *dims = shape;
    if (ort_minor >= 24) {
        TRY(ORT(GetTensorElementTypeAndShapeDataReference)(value, &type, &dims, &rank));
    } else {
        OrtTensorInfo *info;
        TRY(ORT(GetTensorTypeAndShape)(value, &info));
        OrtStatus *bad = ORT(GetTensorElementType)(info, &type);
        if (!bad) bad = ORT(GetDimensionsCount)(info, &rank);
        if (!bad && rank <= PD_MAX_RANK) bad = ORT(GetDimensions)(info, shape, rank);
        ORT(ReleaseTensorTypeAndShapeInfo)(info);
        if (bad) return bad;
    }
    if (rank > PD_MAX_RANK) rank = PD_MAX_RANK + 1; /* rejected by the program */
    *tensor = (pd_tensor){dims, NULL, dtype_of(type), (int32_t)rank};
    TRY(ORT(GetTensorData)(value, data));
    if (!*data) *data = empty;
    return NULL;
}

static bool is_late(const int64_t *dims, int32_t rank) {
    for (int32_t a = 0; a < rank; a++)
        if (dims[a] == PD_LATE) return true;
    return false;
}

static size_t bytes_of(const pd_io *output, const int64_t *dims) {
    size_t size = dtype_bytes(output->dtype);
    for (int32_t a = 0; a < output->rank; a++) size *= (size_t)dims[a];
    return size;
}

/* Takes memory of the call for the outputs whose sizes are known: an output of ONNX Runtime keeps its first shape, and
 * the inner session may compute another one if a later part of the program rejects the call. */
static OrtStatus *place_own(const program *p, call_state *c) {
    const int64_t *dims = c->dims;
    for (int32_t k = 0; k < p->output_count; dims += p->outputs[k++].rank) {
        free(c->own[k]);
        c->own[k] = c->to[k] = NULL;
        if (is_late(dims, p->outputs[k].rank)) continue;
        size_t size = (bytes_of(&p->outputs[k], dims) + 64) / 64 * 64;
        if (!(c->own[k] = c->to[k] = aligned_alloc(64, size))) return failure(ORT_FAIL, "polydyn: out of memory");
    }
    return NULL;
}

/* Requests the memory of the outputs whose sizes are known. */
static OrtStatus *place_outputs(const unit *u, const program *p, call_state *c, OrtKernelContext *call) {
    const int64_t *dims = c->dims;
    for (int32_t k = 0; k < p->output_count; dims += p->outputs[k++].rank) {
        OrtValue *value;
        c->to[k] = NULL;
        if (is_late(dims, p->outputs[k].rank)) continue;
        TRY(ORT(KernelContext_GetOutput)(call, u->output_at[k], dims, (size_t)p->outputs[k].rank, &value));
        TRY(ORT(GetTensorMutableData)(value, &c->to[k]));
        if (!c->to[k]) c->to[k] = empty;
    }
    return NULL;
}

/* Copies the outputs that are not in ONNX Runtime's memory yet. */
static OrtStatus *copy_outputs(const unit *u, const program *p, call_state *c, OrtKernelContext *call) {
    const int64_t *early = c->dims;
    for (int32_t k = 0; k < p->output_count; early += p->outputs[k++].rank) {
        if (c->to[k] && !c->own[k]) continue;
        int64_t late[PD_MAX_RANK];
        OrtValue *value;
        void *data;
        const void *result = c->own[k] ? c->own[k] : p->pd_result(c->context, k, late);
        const int64_t *dims = c->own[k] ? early : late;
        size_t size = bytes_of(&p->outputs[k], dims);
        TRY(ORT(KernelContext_GetOutput)(call, u->output_at[k], dims, (size_t)p->outputs[k].rank, &value));
        TRY(ORT(GetTensorMutableData)(value, &data));
        if (size && result) memcpy(data, result, size);
    }
    return NULL;
}

/* *rejected: the program does not accept this call. */
static OrtStatus *run_program(const unit *u, const program *p, call_state *c, OrtKernelContext *call,
                              bool *rejected) {
    for (int32_t k = 0; k < p->input_count; k++) {
        const OrtValue *value;
        TRY(ORT(KernelContext_GetInput)(call, u->input_at[k], &value));
        TRY(read_input(value, c->shapes + k * PD_MAX_RANK, &c->tensors[k], &c->from[k]));
    }
    int32_t code = p->pd_shapes(c->context, c->tensors, NULL, c->dims);
    if (code == PD_OK) {
        bool may_delegate = p->has_parts && !u->s->strict && u->model_file >= 0;
        TRY(may_delegate ? place_own(p, c) : place_outputs(u, p, c, call));
        code = p->pd_run(c->context, c->from, c->to);
    }
    *rejected = code == PD_INPUT;
    if (code) return failure(*rejected ? ORT_INVALID_ARGUMENT : ORT_FAIL, "polydyn: %s", p->pd_error());
    return copy_outputs(u, p, c, call);
}

static OrtStatus *compute(OrtNodeComputeInfo *info, void *state, OrtKernelContext *call) {
    unit *u = (unit *)info;
    program *p = atomic_load_explicit(&u->program, memory_order_acquire);
    call_state *c;
    bool rejected = false;
    (void)state;
    if (!p) return run_inner(u, call);
    TRY(take_call(u, p, &c));
    OrtStatus *bad = run_program(u, p, c, call, &rejected);
    return_call(u, c);
    if (!rejected || u->s->strict || u->model_file < 0) return bad;
    int level = atomic_exchange(&u->said_refusal, true) ? LOG_VERBOSE : LOG_WARNING; /* people see the first */
    say(u->s, level, "polydyn: a call was left to ONNX Runtime's kernels: %s", ORT(GetErrorMessage)(bad));
    ORT(ReleaseStatus)(bad);
    return run_inner(u, call); /* if it fails too, its error is the caller's */
}

static OrtStatus *create_state(OrtNodeComputeInfo *info, OrtNodeComputeContext *context, void **state) {
    (void)context;
    *state = info;
    return NULL;
}

static void release_state(OrtNodeComputeInfo *info, void *state) { (void)info, (void)state; }

/* ---- making a unit ---- */

static OrtStatus *copy_names(const OrtValueInfo *const *values, size_t count, char ***out) {
    char **names = *out = calloc(count + 1, sizeof *names);
    if (!names) return failure(ORT_FAIL, "polydyn: out of memory");
    for (size_t k = 0; k < count; k++) {
        const char *name;
        TRY(value_name(values[k], &name));
        if (!(names[k] = strdup(name))) return failure(ORT_FAIL, "polydyn: out of memory");
    }
    return NULL;
}

static OrtStatus *read_names(const OrtNode *fused, unit *u) {
    OWNED const OrtValueInfo **inputs = NULL;
    OWNED const OrtValueInfo **outputs = NULL;
    TRY(node_inputs(fused, &inputs, &u->input_count));
    TRY(copy_names(inputs, u->input_count, &u->input_names));
    TRY(node_outputs(fused, &outputs, &u->output_count));
    return copy_names(outputs, u->output_count, &u->output_names);
}

OrtStatus *new_unit(const settings *s, const OrtNode *fused, unit **out) {
    unit *u = calloc(1, sizeof *u);
    if (!u) return failure(ORT_FAIL, "polydyn: out of memory");
    u->table = (OrtNodeComputeInfo){ORT_API, create_state, compute, release_state};
    u->s = s;
    u->model_file = -1;
    u->compiler = NO_WORKER;
    pthread_mutex_init(&u->lock, NULL);
    pthread_rwlockattr_t attributes; /* a session that takes over is not kept waiting by new calls */
    pthread_rwlockattr_init(&attributes);
    pthread_rwlockattr_setkind_np(&attributes, PTHREAD_RWLOCK_PREFER_WRITER_NONRECURSIVE_NP);
    pthread_rwlock_init(&u->inner_lock, &attributes);
    pthread_rwlockattr_destroy(&attributes);
    OrtStatus *bad = read_names(fused, u);
    if (bad) free_unit(u);
    else *out = u;
    return bad;
}

/* Finds the position of every argument of a program among the node's values. */
static OrtStatus *find_places(const pd_io *io, int32_t count, char **names, size_t name_count, const char *kind,
                              size_t **out) {
    size_t *places = *out = calloc((size_t)count + 1, sizeof *places);
    if (!places) return failure(ORT_FAIL, "polydyn: out of memory");
    for (int32_t k = 0; k < count; k++) {
        while (places[k] < name_count && strcmp(names[places[k]], io[k].name)) places[k]++;
        if (places[k] == name_count)
            return failure(ORT_EP_FAIL, "polydyn: the program has an %s '%s', the node has not", kind, io[k].name);
    }
    return NULL;
}

OrtStatus *adopt_program(unit *u, program *p) {
    free(u->input_at);
    free(u->output_at);
    u->input_at = u->output_at = NULL;
    OrtStatus *bad = find_places(p->inputs, p->input_count, u->input_names, u->input_count, "input", &u->input_at);
    if (!bad) bad = find_places(p->outputs, p->output_count, u->output_names, u->output_count, "output", &u->output_at);
    if (!bad && (size_t)p->output_count != u->output_count)
        bad = failure(ORT_EP_FAIL, "polydyn: the program has %d outputs, the node %zu", p->output_count,
                      u->output_count);
    if (bad) close_program(p);
    else atomic_store_explicit(&u->program, p, memory_order_release);
    return bad;
}

OrtStatus *load_program(unit *u) {
    char path[PATH_BYTES];
    program *p;
    cache_path(u->s, u->key, ".ep", path);
    TRY(open_program(path, &p));
    return adopt_program(u, p);
}

static void free_names(char **names, size_t count) {
    for (size_t k = 0; names && k < count; k++) free(names[k]);
    free(names);
}

/* Logs nothing: in some versions the logger of a session ends before its nodes. */
void free_unit(unit *u) {
    if (!u) return;
    end_behind(u);
    program *p = u->program;
    while (u->idle) {
        call_state *c = u->idle;
        u->idle = c->next;
        free_call(p, c);
    }
    close_program(p);
    free_inner(u);
    free_names(u->input_names, u->input_count);
    free_names(u->output_names, u->output_count);
    free(u->input_at);
    free(u->output_at);
    pthread_mutex_destroy(&u->lock);
    pthread_rwlock_destroy(&u->inner_lock);
    free(u);
}
