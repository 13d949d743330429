/* parts.c: the C interface of a program of several parts. Its weights contain the libraries of the parts, which are
 * opened here unless the caller has opened them (pd_open_around). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "sequence.h"

#define EXPORT PD_EXPORT
#define fail pd_fail

/* ---- libraries ---- */

static int32_t find_calls(pd_model *m) {
    const char *missing = NULL;
#define FIND(name)                                                                                                    \
    m->name = (__typeof__(m->name))dlsym(m->library, "pd_" #name);                                                    \
    if (!m->name) missing = "pd_" #name;
    PD_CALLS(FIND)
#define FIND_OWN(name) m->name = (__typeof__(m->name))dlsym(m->library, "pd_" #name);
    PD_OWN_CALLS(FIND_OWN)
    if (missing) return fail(PD_USAGE, "the library of a part has no %s", missing);
    return m->abi_version() == PD_ABI_VERSION ? PD_OK : fail(PD_USAGE, "the library of a part has another C interface");
}

/* Loads a library from memory. Its file stays open: while it is loaded, no other file may have the same name. */
static int32_t load(pd_model *m, const char *data, int64_t bytes) {
    char path[64];
    m->file = memfd_create("polydyn", MFD_CLOEXEC);
    for (int64_t at = 0; m->file >= 0 && at < bytes;) {
        ssize_t written = write(m->file, data + at, (size_t)(bytes - at));
        if (written <= 0) return fail(PD_MEMORY, "there is no memory for the library of a part");
        at += written;
    }
    if (m->file < 0) return fail(PD_MEMORY, "the system gives no file in memory for the library of a part");
    snprintf(path, sizeof path, "/proc/self/fd/%d", m->file);
    m->library = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    return m->library ? find_calls(m) : fail(PD_USAGE, "the library of a part cannot be loaded: %s", dlerror());
}

static void unload(pd_model *m) {
    if (m->file < 0) return;
    if (m->program) m->close(m->program);
    if (m->library) dlclose(m->library);
    close(m->file);
}

static pd_parts *parts_of(const pd_program *p) { return p->place; }

/* Returns a program of one part whose threads the others use, or NULL. */
static const pd_program *lender_in(const pd_program *p) {
    const pd_parts *x = parts_of(p);
    for (int32_t k = 0; k < x->model_count; k++) {
        const pd_model *m = &x->models[k];
        const pd_program *found = m->sequence_of ? lender_in(m->program) : m->borrow_threads ? m->program : NULL;
        if (found) return found;
    }
    return NULL;
}

EXPORT void pd_borrow_threads(pd_program *p, const pd_program *lender) {
    const pd_parts *x = parts_of(p);
    for (int32_t k = 0; k < x->model_count; k++)
        if (x->models[k].program != lender && x->models[k].borrow_threads) x->models[k].borrow_threads(x->models[k].program, lender);
}

/* ---- programs ---- */

static int32_t read_ios(pd_parts *x, pd_words *w, int32_t count, pd_io **to) {
    if (!(*to = pd_zeros(&x->memory, count, sizeof **to))) return fail(PD_MEMORY, "out of memory");
    for (pd_io *io = *to; io < *to + count; io++) {
        io->name = pd_next_text(w), io->shape = pd_next_text(w);
        io->dtype = (int32_t)pd_next(w), io->rank = (int32_t)pd_next(w);
    }
    return PD_OK;
}

/* Whether a size is known at the start of a run: the first symbols are those of the inputs. */
static int is_early(const pd_parts *x, const int64_t *w) {
    for (; *w != PD_END; w += *w == PD_NUMBER || *w == PD_SYMBOL ? 2 : 1)
        if (*w == PD_SYMBOL && w[1] >= x->early) return 0;
    return 1;
}

static int32_t read_outputs(pd_parts *x, pd_words *w) {
    x->output_count = (int32_t)pd_next(w);
    int32_t code = read_ios(x, w, x->output_count, &x->outputs), words;
    if (code != PD_OK) return code;
    x->given = pd_zeros(&x->memory, x->output_count, sizeof *x->given);
    if (!x->given) return fail(PD_MEMORY, "out of memory");
    for (pd_given *g = x->given; g < x->given + x->output_count; g++) {
        int32_t rank = x->outputs[g - x->given].rank;
        g->tensor = (int32_t)pd_next(w);
        if (!(g->dims = pd_zeros(&x->memory, rank, sizeof *g->dims))) return fail(PD_MEMORY, "out of memory");
        for (int32_t a = 0; a < rank; a++) {
            g->dims[a] = pd_next_list(w, &words);
            g->late |= !is_early(x, g->dims[a]);
        }
    }
    return PD_OK;
}

/* Reads the models and the locations of their libraries and weights; opens each model that is not open. */
static int32_t read_models(pd_program *p, pd_words *w, void *const *libraries, pd_program *const *programs) {
    pd_parts *x = parts_of(p);
    int32_t count = (int32_t)pd_next(w), code = PD_OK;
    x->own_parts = (int32_t)pd_next(w);
    x->models = pd_zeros(&x->memory, count, sizeof *x->models);
    if (!x->models) return fail(PD_MEMORY, "out of memory");
    for (int32_t k = 0; k < count; k++) x->models[k].file = -1;
    for (x->model_count = 0; x->model_count < count && code == PD_OK; x->model_count++, w->at += 4) {
        pd_model *m = &x->models[x->model_count];
        const int64_t *at = w->at; /* of the weights: offset, bytes; of the library: offset, bytes */
        if (programs) {
            m->library = libraries[x->model_count], m->program = programs[x->model_count];
            code = find_calls(m);
            continue;
        }
        code = load(m, p->weights + at[2], at[3]);
        if (code == PD_OK && m->cuda_run)
            code = fail(PD_USAGE, "a program of several parts for a device needs Python: run it by polydyn.load");
        if (code == PD_OK && (code = m->open(NULL, p->weights + at[0], 0, at[1], &m->program)) != PD_OK)
            fail(code, "%s", m->error());
    }
    return code;
}

/* Rejects a program with steps that only Python can run. */
static int32_t refuse_python(const pd_words *w) {
    pd_words at = *w;
    const char *step = pd_next_text(&at);
    return *step ? fail(PD_USAGE, "%s needs Python: run the program by polydyn.load", step) : PD_OK;
}

static int32_t read_program(pd_program *p, void *const *libraries, pd_program *const *programs) {
    pd_parts *x = parts_of(p);
    const pd_head *head = (const pd_head *)(const void *)p->weights;
    pd_words w = {(const int64_t *)(const void *)(p->weights + head->words)};
    int32_t code = programs ? PD_OK : refuse_python(&w), count;
    pd_next_text(&w);
    if (code == PD_OK) code = read_models(p, &w, libraries, programs);
    if (code != PD_OK) return code;
    x->launch_count = (int32_t)pd_next(&w), x->early = pd_next(&w);
    x->input_count = (int32_t)pd_next(&w);
    code = read_ios(x, &w, x->input_count, &x->inputs);
    if (code != PD_OK) return code;
    x->dense = pd_next_list(&w, &count);
    code = read_outputs(x, &w);
    x->sequence = w.at;
    const pd_program *lender = lender_in(p);
    if (code == PD_OK && lender) pd_borrow_threads(p, lender);
    return code;
}

/* Opens a program whose weights begin at `memory` or are in a file. */
static int32_t open_program(const char *path, const void *memory, int64_t offset, int64_t bytes, void *const *libraries,
                            pd_program *const *programs, pd_program **out) {
    *out = NULL;
    if (bytes < (int64_t)sizeof(pd_head)) return fail(PD_WEIGHTS, "the weights of the program have no head");
    pd_program *p = calloc(1, sizeof *p);
    pd_parts *x = p ? p->place = calloc(1, sizeof *x) : NULL;
    if (!x) return free(p), fail(PD_MEMORY, "out of memory");
    int32_t code = pd_find_weights(p, path, memory, offset, sizeof(pd_head));
    if (code == PD_OK) {
        const pd_head head = *(const pd_head *)(const void *)p->weights;
        if (head.magic != PD_MAGIC || head.abi != PD_ABI_VERSION)
            code = fail(PD_WEIGHTS, "these are no weights of a program of several parts of ABI %d", PD_ABI_VERSION);
        else if (head.bytes < (int64_t)sizeof(pd_head) + PD_SEAL)
            code = fail(PD_WEIGHTS, "the weights are damaged: their size is %ld", (long)head.bytes);
        else if (path) {
            pd_unmap_weights(p);
            code = pd_find_weights(p, path, NULL, offset, head.bytes);
        }
        if (code == PD_OK) code = pd_check_seal(p, path, head.bytes);
    }
    if (code == PD_OK) code = read_program(p, libraries, programs);
    if (code != PD_OK) pd_close(p);
    else *out = p;
    return code;
}

EXPORT int32_t pd_open(const char *path, const void *memory, int64_t offset, int64_t bytes, pd_program **out) {
    return open_program(path, memory, offset, bytes, NULL, NULL, out);
}

/* Opens a program whose models are already open, given their dlopen handles and programs. The caller must close them
 * after it. */
EXPORT int32_t pd_open_around(const void *memory, int64_t bytes, void *const *libraries, pd_program *const *programs,
                              pd_program **out);
int32_t pd_open_around(const void *memory, int64_t bytes, void *const *libraries, pd_program *const *programs,
                       pd_program **out) {
    return open_program(NULL, memory, 0, bytes, libraries, programs, out);
}

EXPORT void pd_close(pd_program *p) {
    if (!p) return;
    pd_parts *x = parts_of(p);
    for (int32_t k = x->model_count; k-- > 0;) unload(&x->models[k]); /* the model that lends its threads comes last */
    pd_free_zeros(x->memory);
    free(x);
    pd_unmap_weights(p);
    free(p);
}

EXPORT const pd_io *pd_inputs(const pd_program *p, int32_t *count) {
    *count = parts_of(p)->input_count;
    return parts_of(p)->inputs;
}

EXPORT const pd_io *pd_outputs(const pd_program *p, int32_t *count) {
    *count = parts_of(p)->output_count;
    return parts_of(p)->outputs;
}

EXPORT int64_t pd_weight_bytes(const pd_program *p) {
    return p ? ((const pd_head *)(const void *)p->weights)->bytes : (int64_t)sizeof(pd_head);
}

EXPORT int32_t pd_launch_count(const pd_program *p) { return parts_of(p)->launch_count; }

EXPORT const char *pd_symbol(const pd_program *p, int32_t k) {
    const pd_parts *x = parts_of(p);
    return x->own_parts ? x->models[0].symbol(x->models[0].program, k) : NULL;
}

EXPORT int64_t pd_shapes_seen(const pd_program *p, int64_t *rows, int64_t room, int64_t *others) {
    const pd_parts *x = parts_of(p);
    *others = 0;
    return x->own_parts ? x->models[0].shapes_seen(x->models[0].program, rows, room, others) : 0;
}

/* ---- contexts ---- */

EXPORT int32_t pd_context_new(pd_program *p, int32_t threads, pd_context **out) {
    *out = NULL;
    pd_context *c = calloc(1, sizeof *c);
    if (!c) return fail(PD_MEMORY, "out of memory");
    pd_sequence *s;
    int32_t code = pd_sequence_new(parts_of(p), p->weights, threads, &s);
    if (code != PD_OK) return free(c), code;
    c->program = p, c->threads = threads, c->place = s;
    *out = c;
    return PD_OK;
}

EXPORT void pd_context_free(pd_context *c) {
    if (!c) return;
    pd_sequence_free(c->place);
    free(c);
}

EXPORT pd_sequence *pd_sequence_of(pd_context *c) { return c->place; }

#define SUM(what)                                                                                                     \
    int64_t sum = 0;                                                                                                  \
    const pd_sequence *s = c->place;                                                                                  \
    for (int32_t k = 0; k < s->unit_count; k++) sum += s->units[k]->model->what(s->units[k]->context)

EXPORT int64_t pd_arena_bytes(const pd_context *c) {
    SUM(arena_bytes);
    return sum + pd_room_bytes(s);
}

EXPORT int64_t pd_copied_bytes(const pd_context *c) {
    SUM(copied_bytes);
    return sum;
}

EXPORT int64_t pd_evaluations(const pd_context *c) {
    SUM(evaluations);
    return sum;
}

/* ---- calls ---- */

/* Sets this thread's error to that of the sequence. */
static int32_t say(const pd_sequence *s, int32_t code) {
    const char *origin = s->begun < 0 || code == PD_OK ? NULL : s->stages[s->at].origin;
    return code == PD_OK ? code : fail(code, "%s%s%s", s->text, origin ? "\n  node: " : "", origin ? origin : "");
}

static int32_t take_input(const pd_parts *x, pd_sequence *s, int32_t i, const pd_tensor *t) {
    int32_t code = pd_check_tensor(&x->inputs[i], t);
    if (code != PD_OK) return code;
    pd_held *to = &s->tensors[i];
    int64_t dense[PD_MAX_RANK];
    if (pd_dense_strides(t->rank, t->shape, pd_item_bytes[t->dtype], dense))
        return fail(PD_OVERFLOW, "the size of input '%s' overflows 64 bits", x->inputs[i].name);
    pd_take_shape(to, t->rank, t->shape);
    if (!t->strides) return PD_OK;
    if (x->dense[i] && pd_differing_axis(t->rank, t->shape, t->strides, dense) >= 0)
        return fail(PD_INPUT, "input '%s' is not dense\n  rule: what a step between two parts reads is dense", x->inputs[i].name);
    memcpy(to->strides, t->strides, (size_t)t->rank * sizeof *t->strides);
    return PD_OK;
}

EXPORT int32_t pd_shapes(pd_context *c, const pd_tensor *inputs, const int64_t *const *output_strides,
                         int64_t *output_dims) {
    const pd_parts *x = parts_of(c->program);
    pd_sequence *s = c->place;
    int32_t code = PD_OK;
    c->ready = 0, s->begun = -1;
    for (int32_t o = 0; o < x->output_count; o++)
        if (output_strides && output_strides[o])
            return fail(PD_INPUT, "output '%s' has strides\n  rule: outputs of a program of several parts are dense", x->outputs[o].name);
    for (int32_t i = 0; i < x->input_count && code == PD_OK; i++) code = take_input(x, s, i, &inputs[i]);
    if (code != PD_OK) return code;
    code = pd_take_sizes(s);
    if (code == PD_OK && s->count && s->stages[0].kind == PD_PART) code = pd_part_shapes(s, &s->stages[0]);
    if (code != PD_OK) return say(s, code);
    for (int32_t o = 0; o < x->output_count; o++)
        for (int32_t a = 0; a < x->outputs[o].rank; a++) {
            const int64_t *dim = x->given[o].dims[a];
            *output_dims++ = is_early(x, dim) ? pd_value_of(dim, s->values) : PD_LATE;
        }
    c->ready = 1;
    return PD_OK;
}

static int64_t output_bytes(const pd_parts *x, const pd_sequence *s, int32_t o) {
    int64_t bytes = pd_item_bytes[x->outputs[o].dtype];
    for (int32_t a = 0; a < x->outputs[o].rank; a++) bytes *= pd_value_of(x->given[o].dims[a], s->values);
    return bytes;
}

/* Copies outputs that are not in the caller's memory. */
static int32_t deliver(const pd_parts *x, const pd_sequence *s, void *const *outputs) {
    for (int32_t o = 0; o < x->output_count; o++) {
        const pd_held *t = &s->tensors[x->given[o].tensor];
        if (!outputs[o] || outputs[o] == t->data) continue;
        if (pd_bytes(t) != output_bytes(x, s, o))
            return fail(PD_USAGE, "output '%s' has another size than its shape says", x->outputs[o].name);
        pd_copy_held(t, outputs[o]);
    }
    return PD_OK;
}

EXPORT int32_t pd_profile(pd_context *c, const void *const *inputs, void *const *outputs, int64_t *nanoseconds) {
    const pd_parts *x = parts_of(c->program);
    pd_sequence *s = c->place;
    if (!c->ready) return fail(PD_USAGE, "pd_run needs a successful pd_shapes before it");
    for (int32_t i = 0; i < x->input_count; i++) s->tensors[i].data = (char *)inputs[i];
    for (int32_t o = x->output_count; o-- > 0;) {
        pd_held *t = &s->tensors[x->given[o].tensor];
        if (outputs[o] && x->given[o].late)
            return fail(PD_USAGE, "data decide the size of output '%s': pass NULL for it, and ask pd_result", x->outputs[o].name);
        t->given = outputs[o] ? output_bytes(x, s, o) : -1;
        if (outputs[o] && t->result) t->data = outputs[o];
    }
    if (nanoseconds) memset(nanoseconds, 0, (size_t)x->launch_count * sizeof *nanoseconds);
    s->asks = 0, s->at = 0, s->begun = -1, s->times = nanoseconds;
    int32_t code;
    do code = pd_sequence_run(s);
    while (code == PD_STOP_SIGNALS);
    return code == PD_OK ? deliver(x, s, outputs) : say(s, code);
}

EXPORT int32_t pd_run(pd_context *c, const void *const *inputs, void *const *outputs) {
    return pd_profile(c, inputs, outputs, NULL);
}

EXPORT const void *pd_result(const pd_context *c, int32_t o, int64_t *dims) {
    const pd_parts *x = parts_of(c->program);
    const pd_sequence *s = c->place;
    const pd_held *t = &s->tensors[x->given[o].tensor];
    for (int32_t a = 0; a < x->outputs[o].rank; a++) dims[a] = pd_value_of(x->given[o].dims[a], s->values);
    return t->given < 0 ? t->data : NULL;
}

EXPORT int32_t pd_trace(pd_context *c, const void *const *inputs, void *const *outputs, pd_span *spans, int64_t room,
                        int64_t *count) {
    (void)c, (void)inputs, (void)outputs, (void)spans, (void)room, (void)count;
    return fail(PD_USAGE, "a program of several parts has no trace: pd_profile has the time of each launch and step");
}

EXPORT int32_t pd_launch(const pd_context *c, int32_t k, pd_launch_info *info) {
    const pd_sequence *s = c->place;
    for (const pd_stage *g = s->stages; g < s->stages + s->count; g++) {
        int32_t own = g->unit ? g->unit->launch_count : 1;
        if (k >= own) {
            k -= own;
            continue;
        }
        *info = (pd_launch_info){.label = g->label, .kernel = "", .tasks = 1, .threads = 1};
        int32_t code = g->unit ? g->unit->model->launch(g->unit->context, k, info) : PD_OK;
        return code == PD_OK ? code : fail(code, "%s", g->unit->model->error());
    }
    return fail(PD_USAGE, "there is no such launch");
}
