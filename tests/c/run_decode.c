/* run_decode.c: appends twice to one cache through the C interface (tests/test_decode.py).
 *
 * usage: run_decode lib.so artifact    prints the cache's rows, bytes copied, and the refusal of other strides */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "polydyn.h"

#define ROOM 6
#define LOAD(name)                                                                                                    \
    __typeof__(&name) f_##name = (__typeof__(&name))dlsym(library, #name);                                            \
    if (!f_##name) return 1
#define CHECK(call)                                                                                                   \
    if (call) {                                                                                                       \
        fprintf(stderr, "%s\n", f_pd_error());                                                                        \
        return 2;                                                                                                     \
    }

int main(int count, char **arguments) {
    void *library = count == 3 ? dlopen(arguments[1], RTLD_NOW) : NULL;
    if (!library) return 1;
    LOAD(pd_error);
    LOAD(pd_open);
    LOAD(pd_inputs);
    LOAD(pd_outputs);
    LOAD(pd_weight_bytes);
    LOAD(pd_context_new);
    LOAD(pd_shapes);
    LOAD(pd_run);
    LOAD(pd_copied_bytes);
    pd_program *program;
    pd_context *context;
    CHECK(f_pd_open(arguments[2], NULL, 4096, f_pd_weight_bytes(NULL), &program));
    CHECK(f_pd_context_new(program, 1, &context));
    int32_t inputs, outputs;
    if (f_pd_inputs(program, &inputs)[0].strided != 1 || f_pd_outputs(program, &outputs)[0].strided != 1) return 1;

    float cache[2][ROOM] = {{1, 2}, {3, 4}}, added[2] = {10, 20}, doubled[2 * ROOM], sums[2];
    const int64_t wide[2] = {ROOM * 4, 4}, *strides[3] = {wide, NULL, NULL};
    for (int64_t length = 2; length < 4; length++) {
        int64_t kept[2] = {2, length}, one[2] = {2, 1}, dims[5];
        pd_tensor tensors[2] = {{kept, wide, PD_FLOAT32, 2}, {one, NULL, PD_FLOAT32, 2}};
        CHECK(f_pd_shapes(context, tensors, strides, dims));
        const void *from[2] = {cache, added};
        void *to[3] = {cache, doubled, sums};
        CHECK(f_pd_run(context, from, to));
    }
    for (int64_t i = 0; i < 2; i++)
        for (int64_t j = 0; j < ROOM; j++) printf("%g ", cache[i][j]);
    printf("%lld\n", (long long)f_pd_copied_bytes(context));

    int64_t kept[2] = {2, 2}, one[2] = {2, 1}, dims[5];
    pd_tensor tensors[2] = {{kept, wide, PD_FLOAT32, 2}, {one, NULL, PD_FLOAT32, 2}};
    CHECK(f_pd_shapes(context, tensors, NULL, dims)); /* the output is dense, the input is not */
    const void *from[2] = {cache, added};
    void *to[3] = {cache, doubled, sums};
    CHECK(f_pd_run(context, from, to));
    return 0;
}
