/* repeat.c: a program again and again, as the body of a loop (docs/adr/0027-parts.md). */
#include <string.h>

#include "internal.h"

static const pd_plan *const plan = &pd_the_plan;

static void *place(const pd_moving *m, int64_t k, int first) {
    return first && m->first ? m->first : m->base[k & 1] + m->step * k;
}

static const pd_grown *grown(const pd_growth *g, int32_t output) {
    for (int32_t i = 0; i < g->count; i++)
        if (g->grown[i].output == output) return &g->grown[i];
    return NULL;
}

/* Prepares the next run, whose inputs have new shapes; *state: PD_GOING, or why it cannot run. */
static int32_t prepare(pd_context *c, const pd_growth *g, int32_t *state) {
    int64_t dims[plan->output_dim_count + 1];
    int32_t code = pd_shapes(c, g->inputs, NULL, dims), at = 0;
    for (int32_t o = 0; code == PD_OK && o < plan->output_count; at += plan->outputs[o++].rank) {
        const pd_grown *n = grown(g, o);
        size_t bytes = (size_t)plan->outputs[o].rank * sizeof *dims;
        if (n && pd_output_bytes(c, o) > n->room) *state = PD_ROOM;
        if (!n && memcmp(dims + at, g->output_dims + at, bytes)) *state = PD_SHAPE;
    }
    if (*state == PD_GOING) memcpy(g->output_dims, dims, (size_t)plan->output_dim_count * sizeof *dims);
    return code;
}

/* What was written is read by the next run. */
static void carry(const pd_growth *g) {
    for (int32_t i = 0; i < g->count; i++) {
        const pd_tensor *to = &g->inputs[g->grown[i].input];
        int64_t *sizes = (int64_t *)to->shape, *strides = (int64_t *)to->strides;
        memcpy(sizes, g->output_dims + pd_first_axis(plan->outputs, g->grown[i].output), (size_t)to->rank * sizeof *sizes);
        pd_dense_strides(to->rank, sizes, pd_item_bytes[to->dtype], strides); /* pd_shapes has seen that they fit */
    }
}

PD_EXPORT int32_t pd_repeat(pd_context *c, const pd_moving *inputs, const pd_moving *outputs, const pd_growth *growth,
                            int64_t *number, const uint8_t *condition, int64_t end, int64_t *next, int32_t *state) {
    const void *from[plan->input_count + 1];
    void *to[plan->output_count + 1];
    int32_t code = PD_OK;
    int first = 1;
    for (*state = PD_GOING; *state == PD_GOING && *next < end; ++*next, first = 0) {
        if (growth) code = prepare(c, growth, state);
        if (code != PD_OK || *state != PD_GOING) return code;
        for (int32_t i = 0; i < plan->input_count; i++) from[i] = place(&inputs[i], *next, first);
        for (int32_t o = 0; o < plan->output_count; o++) to[o] = place(&outputs[o], *next, first);
        if (number) *number = *next;
        code = pd_run(c, from, to);
        if (code != PD_OK) return code;
        if (growth) carry(growth);
        *state = !condition || *condition ? PD_GOING : PD_ENDED;
    }
    return PD_OK;
}
