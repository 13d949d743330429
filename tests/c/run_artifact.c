/* Runs the example program from an artifact without Python: run_artifact LIBRARY ARTIFACT B L. Prints the outputs. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "polydyn.h"

#define LOAD(name) __typeof__(name) *f_##name = (__typeof__(name) *)dlsym(library, #name)
#define CHECK(call)                                                                                                    \
    if (call) {                                                                                                       \
        fprintf(stderr, "%s\n", f_pd_error());                                                                         \
        return 2;                                                                                                     \
    }

int main(int count, char **arguments) {
    if (count != 5) return 1;
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    LOAD(pd_abi_version);
    LOAD(pd_error);
    LOAD(pd_open);
    LOAD(pd_close);
    LOAD(pd_outputs);
    LOAD(pd_weight_bytes);
    LOAD(pd_context_new);
    LOAD(pd_context_free);
    LOAD(pd_shapes);
    LOAD(pd_run);
    if (f_pd_abi_version() != PD_ABI_VERSION) return 1;

    pd_program *program;
    pd_context *context;
    CHECK(f_pd_open(arguments[2], NULL, 4096, f_pd_weight_bytes(NULL), &program));
    CHECK(f_pd_context_new(program, 2, &context));

    int64_t b = atoll(arguments[3]), l = atoll(arguments[4]), shape[2] = {b, l}, dims[4], columns[2] = {4, 4 * b};
    pd_tensor inputs[2] = {{shape, NULL, PD_FLOAT32, 2}, {shape, columns, PD_FLOAT32, 2}}; /* y is column-major */
    CHECK(f_pd_shapes(context, inputs, NULL, dims));

    float *x = malloc((size_t)(b * l + 1) * 4), *y = malloc((size_t)(b * l + 1) * 4);
    for (int64_t i = 0; i < b; i++)
        for (int64_t j = 0; j < l; j++) x[i * l + j] = (float)(i + j), y[j * b + i] = (float)(i * j);
    float *total = malloc((size_t)(dims[0] + 1) * 4), *scaled = malloc((size_t)(dims[1] * dims[2] + 1) * 4), w[4];
    const void *from[2] = {x, y};
    void *to[3] = {total, scaled, w};
    CHECK(f_pd_run(context, from, to));

    int32_t outputs;
    const pd_io *io = f_pd_outputs(program, &outputs);
    for (int32_t k = 0; k < outputs; k++) printf("%s%s ", io[k].name, io[k].shape);
    for (int64_t i = 0; i < dims[0]; i++) printf("%g ", total[i]);
    printf("%g\n", w[3]);
    f_pd_context_free(context);
    f_pd_close(program);
    free(x), free(y), free(total), free(scaled);
    return 0;
}
