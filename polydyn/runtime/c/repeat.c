/* repeat.c: a program again and again, as the body of a loop (docs/adr/0027-parts.md). */
#include "internal.h"

static const pd_plan *const plan = &pd_the_plan;

static void *place(const pd_moving *m, int64_t k) { return m->base[k & 1] + m->step * k; }

PD_EXPORT int32_t pd_repeat(pd_context *c, const pd_moving *inputs, const pd_moving *outputs, int64_t *number,
                            const uint8_t *condition, int64_t end, int64_t *next, int32_t *going) {
    const void *from[plan->input_count + 1];
    void *to[plan->output_count + 1];
    for (*going = 1; *going && *next < end; ++*next) {
        for (int32_t i = 0; i < plan->input_count; i++) from[i] = place(&inputs[i], *next);
        for (int32_t o = 0; o < plan->output_count; o++) to[o] = place(&outputs[o], *next);
        if (number) *number = *next;
        int32_t code = pd_run(c, from, to);
        if (code != PD_OK) return code;
        *going = !condition || *condition;
    }
    return PD_OK;
}
