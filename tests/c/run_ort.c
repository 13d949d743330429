/* run_ort.c: a host of ONNX Runtime without Python. It registers the provider of polydyn, opens a model with the input x
 * (float32, B x 3) and the output y (float32), and runs it with several B.
 *
 *     run_ort LIBONNXRUNTIME PROVIDER MODEL
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "abi.h"

#define HOST_FUNCTIONS(X)                                                                                              \
    X(49, CreateTensorWithDataAsOrtValue, OrtStatus *,                                                                 \
      (const void *, void *, size_t, const int64_t *, size_t, int, OrtValue **))                                       \
    X(69, CreateCpuMemoryInfo, OrtStatus *, (int, int, void **))                                                       \
    X(94, ReleaseMemoryInfo, void, (void *))                                                                           \
    X(301, RegisterExecutionProviderLibrary, OrtStatus *, (OrtEnv *, const char *, const char *))                      \
    X(302, UnregisterExecutionProviderLibrary, OrtStatus *, (OrtEnv *, const char *))
#define DECLARE(position, name, result, arguments)                                                                     \
    typedef result(*Fn##name) arguments;                                                                               \
    enum { At##name = position };
HOST_FUNCTIONS(DECLARE)

const any_function *ort_api;
int ort_minor;

static void check(OrtStatus *status) {
    if (!status) return;
    printf("error: %s\n", ORT(GetErrorMessage)(status));
    exit(1);
}

static void run(OrtSession *session, const void *memory, int64_t rows) {
    const char *const inputs[] = {"x"}, *const outputs[] = {"y"};
    const int64_t dims[2] = {rows, 3};
    float x[3 * 8];
    OrtValue *in, *out = NULL;
    OrtTensorInfo *info;
    size_t rank, bytes;
    const void *y;
    for (int64_t k = 0; k < 3 * rows; k++) x[k] = (float)k;
    check(ORT(CreateTensorWithDataAsOrtValue)(memory, x, sizeof(float) * 3 * (size_t)rows, dims, 2, 1, &in));
    check(ORT(Run)(session, NULL, inputs, (const OrtValue *const *)&in, 1, outputs, 1, &out));
    check(ORT(GetTensorTypeAndShape)(out, &info));
    check(ORT(GetDimensionsCount)(info, &rank));
    check(ORT(GetTensorSizeInBytes)(out, &bytes));
    check(ORT(GetTensorData)(out, &y));
    printf("%ld:", (long)rows);
    for (size_t k = 0; k < bytes / sizeof(float); k++) printf(" %g", ((const float *)y)[k]);
    printf("\n");
    ORT(ReleaseTensorTypeAndShapeInfo)(info);
    ORT(ReleaseValue)(in);
    ORT(ReleaseValue)(out);
}

int main(int count, char **arguments) {
    if (count != 4) return 2;
    void *runtime = dlopen(arguments[1], RTLD_NOW), *memory;
    if (!runtime) return puts(dlerror()), 1;
    const OrtApiBase *(*get_base)(void) = (const OrtApiBase *(*)(void))dlsym(runtime, "OrtGetApiBase");
    ort_api = get_base()->get_api(ORT_API);
    OrtEnv *env;
    OrtSessionOptions *options;
    OrtSession *session;
    const OrtEpDevice *const *devices, *own = NULL;
    size_t n;
    check(ORT(CreateEnv)(LOG_WARNING, "host", &env));
    check(ORT(RegisterExecutionProviderLibrary)(env, "polydyn", arguments[2]));
    check(ORT(GetEpDevices)(env, &devices, &n));
    for (size_t k = 0; k < n; k++)
        if (!strcmp(ORT(EpDevice_EpName)(devices[k]), "PolydynExecutionProvider")) own = devices[k];
    if (!own) return puts("the provider has no device"), 1;
    check(ORT(CreateSessionOptions)(&options));
    check(ORT(SessionOptionsAppendExecutionProvider_V2)(options, env, &own, 1, NULL, NULL, 0));
    check(ORT(CreateSession)(env, arguments[3], options, &session));
    check(ORT(CreateCpuMemoryInfo)(0, 0, &memory));
    for (int64_t rows = 1; rows <= 4; rows += 3) run(session, memory, rows);
    ORT(ReleaseMemoryInfo)(memory);
    ORT(ReleaseSession)(session);
    ORT(ReleaseSessionOptions)(options);
    check(ORT(UnregisterExecutionProviderLibrary)(env, "polydyn"));
    ORT(ReleaseEnv)(env);
    return 0;
}
