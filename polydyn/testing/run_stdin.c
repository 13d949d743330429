/* Runs a compiled program on tensors from stdin, outputs to stdout: run_stdin LIBRARY ARTIFACT THREADS.
 *
 * Each tensor: int64 rank, int64 sizes, the elements. Inputs follow each other in the program's order until stdin ends, so
 * that one process makes many calls; outputs are written the same way. Sizes that data decide are asked behind a run. Arrays
 * have no byte to spare, so that the address sanitizer sees every access behind them. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>

#include "polydyn.h"

#define MOST 32
#define LOAD(name) __typeof__(name) *f_##name = (__typeof__(name) *)dlsym(library, #name)
#define CHECK(call)                                                                                                    \
    if (call) {                                                                                                       \
        fprintf(stderr, "%s\n", f_pd_error());                                                                         \
        return 2;                                                                                                     \
    }

static size_t bytes(int32_t dtype) { /* of an element */
    switch (dtype) {
    case PD_FLOAT64: case PD_INT64: case PD_UINT64: return 8;
    case PD_FLOAT32: case PD_INT32: case PD_UINT32: return 4;
    case PD_FLOAT16: case PD_BFLOAT16: case PD_INT16: case PD_UINT16: return 2;
    default: return 1;
    }
}

int main(int count, char **arguments) {
    if (count != 4) return 1;
    void *library = dlopen(arguments[1], RTLD_NOW);
    if (!library) return fprintf(stderr, "%s\n", dlerror()), 1;
    LOAD(pd_error);
    LOAD(pd_open);
    LOAD(pd_close);
    LOAD(pd_inputs);
    LOAD(pd_outputs);
    LOAD(pd_weight_bytes);
    LOAD(pd_context_new);
    LOAD(pd_context_free);
    LOAD(pd_shapes);
    LOAD(pd_run);
    LOAD(pd_result);
    pd_program *program;
    pd_context *context;
    CHECK(f_pd_open(arguments[2], NULL, 4096, f_pd_weight_bytes(NULL), &program));
    CHECK(f_pd_context_new(program, atoi(arguments[3]), &context));

    int32_t ins, outs;
    const pd_io *in = f_pd_inputs(program, &ins), *out = f_pd_outputs(program, &outs);
    if (ins > MOST || outs > MOST) return 1;
    for (;;) {
        static int64_t sizes[MOST][PD_MAX_RANK], dims[MOST * PD_MAX_RANK];
        pd_tensor tensors[MOST];
        void *from[MOST], *to[MOST];
        for (int k = 0; k < ins; k++) {
            int64_t rank, elements = 1;
            if (fread(&rank, 8, 1, stdin) != 1) return f_pd_context_free(context), f_pd_close(program), k ? 1 : 0;
            for (int64_t i = 0; i < rank; i++) {
                if (fread(&sizes[k][i], 8, 1, stdin) != 1) return 1;
                elements *= sizes[k][i];
            }
            size_t size = bytes(in[k].dtype) * (size_t)elements;
            from[k] = malloc(size ? size : 1);
            if (size && fread(from[k], size, 1, stdin) != 1) return 1;
            tensors[k] = (pd_tensor){sizes[k], NULL, in[k].dtype, (int32_t)rank};
        }
        CHECK(f_pd_shapes(context, tensors, NULL, dims));
        size_t size[MOST];
        const int64_t *d = dims;
        for (int k = 0; k < outs; d += out[k++].rank) {
            size[k] = bytes(out[k].dtype);
            int late = 0;
            for (int i = 0; i < out[k].rank; i++) size[k] *= (size_t)d[i], late |= d[i] == PD_LATE;
            to[k] = late ? NULL : malloc(size[k] ? size[k] : 1);
        }
        CHECK(f_pd_run(context, (const void *const *)from, to));
        for (int k = 0; k < outs; k++) {
            int64_t rank = out[k].rank, found[PD_MAX_RANK];
            const void *late = f_pd_result(context, k, found);
            if (!to[k]) size[k] = bytes(out[k].dtype);
            for (int i = 0; i < rank && !to[k]; i++) size[k] *= (size_t)found[i];
            fwrite(&rank, 8, 1, stdout), fwrite(found, 8, (size_t)rank, stdout);
            fwrite(to[k] ? to[k] : late, size[k], 1, stdout);
            free(to[k]);
        }
        for (int k = 0; k < ins; k++) free(from[k]);
    }
}
