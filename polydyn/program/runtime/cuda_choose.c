/* cuda_choose.c: which version of a launch runs, and what it needs before it can. */
#include <inttypes.h>
#include <limits.h>
#include <stdio.h>
#include <string.h>

#include "cuda_internal.h"

static const pd_plan *const plan = &pd_the_plan;

static int holds(const int64_t *v, const pd_condition *n) {
    int64_t a = v[n->left], b = v[n->right];
    return n->relation == '=' ? a == b : n->relation == '<' ? a <= b : b ? a % b == 0 : a == 0;
}

static int fits(const pd_context *c, const pd_version *n) {
    const pd_device *d = c->program->place;
    int all = c->values[n->smem] <= d->shared_limit && (!n->arch || n->arch == d->arch);
    for (int32_t j = 0; j < n->conditions && all; j++) all = holds(c->values, &plan->conditions[n->first_condition + j]);
    return all;
}

/* Makes a version ready to be launched with the context's sizes: its kernels, its workspace, its symbols. */
static int32_t prepare(pd_context *c, int32_t k, const pd_version *n, void *stream) {
    pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    const int64_t *v = c->values;
    int64_t bytes = v[n->workspace];
    int32_t at = x->first[k];
    if (bytes > x->workspace_bytes) {
        char what[64];
        snprintf(what, sizeof what, "%" PRId64 " bytes of workspace", bytes);
        if (x->workspace) { /* launches before this one may use it, and cuMemFree need not wait */
            TRY(cuStreamSynchronize(stream), what);
            TRY(cuMemFree_v2(x->workspace), what);
        }
        x->workspace = 0;
        x->workspace_bytes = 0;
        x->next = 0; /* without memory launches before this one need theirs again */
        TRY(cuMemAlloc_v2(&x->workspace, (size_t)bytes), what);
        x->workspace_bytes = bytes;
    }
    for (const pd_version *last = n + n->after; n <= last; n++) {
        int32_t code = pd_cuda_load(d, n->kernel);
        if (code != PD_OK) return code;
        if (v[n->grid] > INT_MAX)
            return pd_fail(PD_OVERFLOW, "%s needs %" PRId64 " blocks", plan->launches[k].label, v[n->grid]);
        for (int32_t m = n->first_map; m < n->first_map + n->maps; m++, at++) {
            x->parameters[at] = x->maps + (int64_t)m * MAP_BYTES;
            x->map_addresses[m] = 0;
        }
        for (int32_t b = 0; b < n->buffers; b++, at++) x->parameters[at] = &x->values[at];
        for (int32_t s = 0; s < n->symbols; s++, at++) {
            x->parameters[at] = &x->values[at];
            x->values[at] = v[plan->launch_symbols[n->first_symbol + s]];
        }
    }
    return PD_OK;
}

/* ---- the choice of versions ----
 *
 * All values follow from the symbols, `nth` and the callers' strides, which come first: the last few choices are
 * remembered by them, with all values. */

#define REMEMBERED 8

static int64_t key_words(void) {
    int64_t words = plan->symbol_count + 1;
    for (int32_t i = 0; i < plan->input_count; i++) words += plan->inputs[i].strided;
    for (int32_t o = 0; o < plan->output_count; o++) words += plan->outputs[o].strided;
    return words;
}

int64_t pd_cuda_remembered_words(void) { return REMEMBERED * ((int64_t)plan->value_count + plan->launch_count); }

/* The k-th of the remembered choices: values, then the versions of launches. */
static int64_t *remembered(const pd_cuda *x, int64_t k) {
    return x->remembered + k % REMEMBERED * ((int64_t)plan->value_count + plan->launch_count);
}

/* Takes back all values and versions of the context's sizes; 0 when they are not remembered. */
static int recall(pd_context *c) {
    pd_cuda *x = c->place;
    size_t key = (size_t)key_words() * sizeof *c->values, all = (size_t)plan->value_count * sizeof *c->values;
    for (int64_t k = 0; k < pd_min(x->remembered_count, REMEMBERED); k++) {
        const int64_t *from = remembered(x, k);
        if (memcmp(c->values, from, key)) continue;
        memcpy(c->values, from, all);
        for (int32_t n = 0; n < plan->launch_count; n++) x->version[n] = (int32_t)from[plan->value_count + n];
        return 1;
    }
    return 0;
}

/* Keeps values and versions in place of the oldest ones. */
static void remember(pd_context *c) {
    pd_cuda *x = c->place;
    int64_t *to = remembered(x, x->remembered_count++);
    memcpy(to, c->values, (size_t)plan->value_count * sizeof *to);
    for (int32_t n = 0; n < plan->launch_count; n++) to[plan->value_count + n] = x->version[n];
}

/* The version of launch k that takes the least time of those that fit, the first of equals; -1: none fits. */
static int32_t best(const pd_context *c, const pd_launch_entry *l) {
    const pd_version *all = &plan->versions[l->first_version];
    int32_t found = -1;
    for (int32_t i = 0; i < l->versions; i += 1 + all[i].after)
        if (fits(c, &all[i]) && (found < 0 || c->values[all[i].estimate] < c->values[all[found].estimate])) found = i;
    return found;
}

int32_t pd_cuda_choose(pd_context *c, int32_t k, void *stream) {
    const pd_device *d = c->program->place;
    pd_cuda *x = c->place;
    const pd_launch_entry *l = &plan->launches[k];
    if (!k) x->recalled = recall(c);
    if (!x->recalled) {
        if (l->choose(c->values))
            return pd_fail(PD_OVERFLOW, "the sizes of this call overflow 64 bits in %s", l->label);
        x->version[k] = c->values[l->tasks] > 0 ? best(c, l) : -1;
        if (x->version[k] < 0 && c->values[l->tasks] > 0)
            return pd_fail(PD_INPUT, "no version of %s runs at this size, with %" PRId64 " bytes of shared memory",
                           l->label, d->shared_limit);
        x->choices++;
    }
    int32_t code = PD_OK;
    if (x->version[k] >= 0) code = prepare(c, k, &plan->versions[l->first_version + x->version[k]], stream);
    if (code != PD_OK) return code;
    x->next = k + 1;
    if (x->next == plan->launch_count && !x->recalled) remember(c);
    return PD_OK;
}

PD_EXPORT int64_t pd_cuda_choices(const pd_context *c) { return ((const pd_cuda *)c->place)->choices; }
