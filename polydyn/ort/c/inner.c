/* inner.c: a fused node's graph on ONNX Runtime's own kernels, and the thread that compiles meanwhile. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "provider.h"

OrtStatus *open_model(unit *u) {
    char path[PATH_BYTES];
    if (u->model_file >= 0) return NULL;
    cache_path(u->s, u->key, ".onnx", path);
    u->model_file = open(path, O_RDONLY | O_CLOEXEC); /* it stays readable if the cache removes the file */
    return u->model_file < 0 ? failure(ORT_EP_FAIL, "polydyn: cannot read %s: %s", path, strerror(errno)) : NULL;
}

/* ---- the session ---- */

/* Returns the environment of the process. It is counted, and the reference is kept until the process ends: releasing
 * the last one would unload this library while its code runs. */
static OrtStatus *environment(OrtEnv **env) {
    static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
    static OrtEnv *kept;
    pthread_mutex_lock(&lock);
    OrtStatus *bad = kept ? NULL : ORT(CreateEnv)(LOG_WARNING, "polydyn", &kept);
    *env = kept;
    pthread_mutex_unlock(&lock);
    return bad;
}

/* Adds this provider to the options of an inner session. */
static OrtStatus *append_provider(const unit *u, OrtEnv *env, OrtSessionOptions *options) {
    const OrtEpDevice *const *devices;
    const OrtEpDevice *own = NULL;
    size_t count, room = u->s->option_count + 4, n = 0;
    char threads[16];
    OWNED const char **keys = calloc(room, sizeof *keys);
    OWNED const char **values = calloc(room, sizeof *values);
    if (!keys || !values) return failure(ORT_FAIL, "polydyn: out of memory");
    for (; n < u->s->option_count; n++) {
        keys[n] = u->s->options[n].name;
        values[n] = u->s->options[n].value;
    }
    snprintf(threads, sizeof threads, "%d", u->s->threads);
    keys[n] = "threads", values[n++] = threads;
    keys[n] = "python", values[n++] = u->s->python;
    keys[n] = "cache_dir", values[n++] = u->s->cache;
    TRY(ORT(GetEpDevices)(env, &devices, &count));
    for (size_t k = 0; k < count && !own; k++)
        if (!strcmp(ORT(EpDevice_EpName)(devices[k]), NAME)) own = devices[k];
    if (!own) return failure(ORT_EP_FAIL, "polydyn: the provider is not registered any more");
    return ORT(SessionOptionsAppendExecutionProvider_V2)(options, env, &own, 1, keys, values, n);
}

static OrtStatus *open_session(unit *u, bool with_polydyn, OrtSession **session) {
    char path[64];
    OrtSessionOptions *options;
    OrtEnv *env;
    TRY(open_model(u));
    TRY(environment(&env));
    TRY(ORT(CreateSessionOptions)(&options));
    OrtStatus *bad = ORT(SetIntraOpNumThreads)(options, u->s->threads);
    if (!bad) bad = ORT(AddSessionConfigEntry)(options, "session.intra_op.allow_spinning", "0");
    if (!bad) bad = ORT(SetSessionLogSeverityLevel)(options, LOG_ERROR);
    if (!bad && with_polydyn) bad = append_provider(u, env, options);
    snprintf(path, sizeof path, "/proc/self/fd/%d", u->model_file);
    if (!bad) bad = ORT(CreateSession)(env, path, options, session);
    ORT(ReleaseSessionOptions)(options);
    return bad;
}

/* `with_polydyn`: polydyn computes what it can. Replaces an earlier session, whose calls end first. */
OrtStatus *make_inner(unit *u, bool with_polydyn) {
    OrtSession *session;
    TRY(open_session(u, with_polydyn, &session));
    pthread_rwlock_wrlock(&u->inner_lock);
    OrtSession *old = u->inner;
    u->inner = session;
    pthread_rwlock_unlock(&u->inner_lock);
    if (old) ORT(ReleaseSession)(old);
    return NULL;
}

void drop_inner(unit *u) {
    pthread_rwlock_wrlock(&u->inner_lock);
    OrtSession *old = u->inner;
    u->inner = NULL;
    pthread_rwlock_unlock(&u->inner_lock);
    if (old) ORT(ReleaseSession)(old);
}

void free_inner(unit *u) {
    drop_inner(u);
    if (u->model_file >= 0) close(u->model_file);
}

/* ---- a call ---- */

static OrtStatus *copy_output(OrtKernelContext *call, size_t k, const OrtValue *value) {
    OrtTensorInfo *info;
    OrtValue *output;
    size_t rank, size;
    void *to;
    const void *from;
    TRY(ORT(GetTensorTypeAndShape)(value, &info));
    OrtStatus *bad = ORT(GetDimensionsCount)(info, &rank);
    OWNED int64_t *dims = bad ? NULL : calloc(rank + 1, sizeof *dims);
    if (!bad && !dims) bad = failure(ORT_FAIL, "polydyn: out of memory");
    if (!bad) bad = ORT(GetDimensions)(info, dims, rank);
    ORT(ReleaseTensorTypeAndShapeInfo)(info);
    if (bad) return bad;
    TRY(ORT(KernelContext_GetOutput)(call, k, dims, rank, &output));
    TRY(ORT(GetTensorSizeInBytes)(value, &size));
    TRY(ORT(GetTensorData)(value, &from));
    TRY(ORT(GetTensorMutableData)(output, &to));
    if (size) memcpy(to, from, size);
    return NULL;
}

static OrtStatus *run_session(unit *u, OrtKernelContext *call) {
    OWNED const OrtValue **inputs = calloc(u->input_count + 1, sizeof *inputs);
    OWNED OrtValue **outputs = calloc(u->output_count + 1, sizeof *outputs);
    if (!inputs || !outputs) return failure(ORT_FAIL, "polydyn: out of memory");
    for (size_t k = 0; k < u->input_count; k++) TRY(ORT(KernelContext_GetInput)(call, k, &inputs[k]));
    OrtStatus *bad = ORT(Run)(u->inner, NULL, (const char *const *)u->input_names, inputs, u->input_count,
                              (const char *const *)u->output_names, u->output_count, outputs);
    for (size_t k = 0; k < u->output_count; k++) {
        if (!bad) bad = copy_output(call, k, outputs[k]);
        if (outputs[k]) ORT(ReleaseValue)(outputs[k]);
    }
    return bad;
}

OrtStatus *run_inner(unit *u, OrtKernelContext *call) {
    atomic_fetch_add_explicit(&u->inner_calls, 1, memory_order_relaxed);
    for (;;) {
        pthread_rwlock_rdlock(&u->inner_lock);
        bool there = u->inner != NULL;
        OrtStatus *bad = there ? run_session(u, call) : NULL;
        pthread_rwlock_unlock(&u->inner_lock);
        if (there) return bad;
        pthread_mutex_lock(&u->lock);
        bad = u->inner ? NULL : make_inner(u, false);
        pthread_mutex_unlock(&u->lock);
        if (bad) return bad;
    }
}

/* ---- compiling in the background ---- */

static OrtStatus *compile_unit(unit *u) {
    size_t nodes, left = 0;
    int sets = 1;
    if (u->unchecked) {
        TRY(request(u->s, &u->compiler, CHECK, u->key, u->whole));
        OWNED int *of = read_sets(u->s, u->key, &nodes, &sets, &left);
        if (!of) return failure(ORT_EP_FAIL, "polydyn: the sets of the graph were removed from the cache");
    }
    if (left || sets != 1) {
        end_worker(&u->compiler);
        if (sets) TRY(make_inner(u, true));
        if (u->closing) return NULL;
        say(u->s, LOG_WARNING, "polydyn: %zu nodes stay on ONNX Runtime's kernels; polydyn computes %d sets of nodes",
            left, sets);
        return NULL;
    }
    TRY(request(u->s, &u->compiler, COMPILE, u->key, u->whole));
    TRY(load_program(u));
    drop_inner(u); /* waits for the calls that it still computes */
    if (u->closing) return NULL; /* the logger may have ended */
    say(u->s, LOG_INFO, "polydyn: the compiled program answers, after %ld calls", (long)u->inner_calls);
    return NULL;
}

static void *behind(void *argument) {
    unit *u = argument;
    OrtStatus *bad = compile_unit(u);
    end_worker(&u->compiler);
    if (bad && u->closing) ORT(ReleaseStatus)(bad);
    else say_status(u->s, LOG_WARNING, bad);
    return NULL;
}

OrtStatus *compile_behind(unit *u) {
    TRY(make_inner(u, false));
    u->has_thread = !pthread_create(&u->thread, NULL, behind, u);
    return u->has_thread ? NULL : failure(ORT_FAIL, "polydyn: no thread");
}

void end_behind(unit *u) {
    u->closing = true;
    while (u->has_thread) {
        struct timespec until;
        interrupt_worker(&u->compiler); /* repeated: the process may just be starting */
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += 20000000;
        if (until.tv_nsec >= 1000000000) until.tv_sec++, until.tv_nsec -= 1000000000;
        u->has_thread = pthread_timedjoin_np(u->thread, NULL, &until) == ETIMEDOUT;
    }
}
