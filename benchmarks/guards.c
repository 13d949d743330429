/* guards.c: times the parts of pd_shapes. One unit with the runtime and the generated host program, whose functions are
 * static; appended to setup.c, whose flags it gets (benchmarks/guards.py). */
#include <time.h>

#include "host.c"

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * INT64_C(1000000000) + t.tv_nsec;
}

/* Checks a call with new shapes: dtypes, ranks, symbols, their arithmetic, dims, guards. */
static int32_t check_call(pd_context *c, const pd_tensor *inputs) {
    int32_t code = PD_OK, first = 0;
    for (int32_t i = 0; i < plan->input_count && code == PD_OK; i++) code = pd_check_tensor(&plan->inputs[i], &inputs[i]);
    if (code != PD_OK) return code;
    take(c, inputs, NULL);
    for (int32_t i = 0; i < plan->input_count; first += plan->inputs[i++].rank)
        for (int32_t s = 0; s < plan->symbol_count; s++)
            if (plan->sources[s].input == i) c->values[s] = c->dims[first + plan->sources[s].axis];
    if (plan->check(c->values)) return PD_OVERFLOW;
    code = check_dims(c);
    return code == PD_OK ? check_guards(c->values) : code;
}

/* Nanoseconds of `calls` calls over `shapes` sets of inputs: [0] guards alone, [1] pd_shapes with the shapes of
 * the previous call, [2] pd_shapes with new ones. Returns 1 if a call was rejected. */
EXPORT int32_t bench_guards(pd_context *c, const pd_tensor *inputs, int32_t shapes, int32_t calls, int64_t *ns) {
    int64_t dims[plan->output_dim_count + 1];
    int32_t refused = 0, n = plan->input_count, k;
    int64_t start = now();
    for (k = 0; k < calls; k++) refused |= check_call(c, inputs + k % shapes * n);
    ns[0] = now() - start;
    refused |= pd_shapes(c, inputs, NULL, dims);
    start = now();
    for (k = 0; k < calls; k++) refused |= pd_shapes(c, inputs, NULL, dims);
    ns[1] = now() - start;
    start = now();
    for (k = 0; k < calls; k++) refused |= pd_shapes(c, inputs + (k + 1) % shapes * n, NULL, dims);
    ns[2] = now() - start;
    return refused != 0;
}
