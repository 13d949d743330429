/* frame.c: creates a sequence with its own memory and contexts from words (polydyn/program/encoding.py writes them). */
#include <stdlib.h>
#include <string.h>

#include "sequence.h"

/* ---- words ---- */

const int64_t *pd_next_list(pd_words *w, int32_t *count) {
    *count = (int32_t)pd_next(w);
    const int64_t *list = w->at;
    w->at += *count;
    return list;
}

const char *pd_next_text(pd_words *w) {
    int32_t words;
    return (const char *)pd_next_list(w, &words);
}

/* ---- memory of tables ---- */

typedef struct pd_table {
    struct pd_table *next;
    _Alignas(16) char data[];
} pd_table;

void *pd_zeros(void **memory, int64_t count, size_t size) {
    pd_table *t = calloc(1, sizeof *t + ((size_t)count + 1) * size);
    if (!t) return NULL;
    t->next = *memory;
    *memory = t;
    return t->data;
}

void pd_free_zeros(void *memory) {
    for (pd_table *t = memory, *next; t; t = next) {
        next = t->next;
        free(t);
    }
}

/* ---- what a sequence is made of ---- */

typedef struct {
    const pd_parts *parts;
    pd_sequence *s;
    pd_words w;
    int32_t threads;
} maker;

/* For functions that return an error code and have the maker as `m`. */
#define MAKE(place, count)                                                                                            \
    if (!((place) = pd_zeros(&m->s->memory, (count), sizeof *(place)))) return pd_fail(PD_MEMORY, "out of memory")

/* Reads expressions, each a list. */
static int32_t make_expressions(maker *m, const int64_t *const **to, int32_t *count) {
    const int64_t **all;
    *count = (int32_t)pd_next(&m->w);
    MAKE(all, *count);
    for (int32_t k = 0, words; k < *count; k++) all[k] = pd_next_list(&m->w, &words);
    *to = all;
    return PD_OK;
}

static int32_t make_unit(maker *m, pd_unit *u) {
    const pd_model *model = u->model = &m->parts->models[pd_next(&m->w)];
    int32_t code = model->context_new(model->program, m->threads, &u->context), dims = 0;
    if (code != PD_OK) return pd_fail(code, "%s", model->error());
    m->s->units[m->s->unit_count++] = u;
    u->launch_count = model->launch_count(model->program);
    if (model->sequence_of) return PD_OK; /* its tensors take the arguments */
    if (model->cuda_run && !m->s->device) m->s->device = u, m->s->stream = model->cuda_stream(u->context);
    model->inputs(model->program, &u->input_count);
    const pd_io *outputs = model->outputs(model->program, &u->output_count);
    MAKE(u->ranks, u->output_count);
    for (int32_t o = 0; o < u->output_count; o++) dims += u->ranks[o] = outputs[o].rank;
    MAKE(u->tensors, u->input_count);
    MAKE(u->sizes, u->input_count);
    MAKE(u->from, u->input_count);
    MAKE(u->to, u->output_count);
    MAKE(u->places, u->input_count + u->output_count);
    MAKE(u->told, u->input_count + u->output_count);
    for (int32_t o = 0; o < u->output_count; o++) u->places[u->input_count + o] = PD_ON_HOST;
    MAKE(u->output_dims, dims);
    return PD_OK;
}

static int32_t make_body(maker *m, pd_body *b) {
    int32_t code = make_unit(m, &b->unit), numbers;
    if (code != PD_OK) return code;
    b->inner = b->unit.model->sequence_of ? b->unit.model->sequence_of(b->unit.context) : NULL;
    b->formals = pd_next_list(&m->w, &b->formal_count);
    b->captured = pd_next_list(&m->w, &numbers), b->captured_count = numbers / 2;
    b->sizes = pd_next_list(&m->w, &numbers), b->size_count = numbers / 2;
    b->results = pd_next_list(&m->w, &b->result_count);
    b->direct = pd_next_list(&m->w, &numbers);
    return PD_OK;
}

static int32_t make_loop(maker *m, pd_stage *g) {
    pd_loop *l;
    MAKE(l, 1);
    m->s->loops[m->s->loop_count++] = g->loop = l;
    int32_t code = make_body(m, &l->body), numbers;
    if (code != PD_OK) return code;
    l->counts = (int32_t)pd_next(&m->w), l->plain = (int32_t)pd_next(&m->w), l->device = (int32_t)pd_next(&m->w);
    l->reads = pd_next_list(&m->w, &numbers);
    const int64_t *forms = pd_next_list(&m->w, &numbers);
    l->carried_count = numbers / 3;
    MAKE(l->carried, l->carried_count);
    for (pd_carried *c = l->carried; c < l->carried + l->carried_count; c++, forms += 3)
        c->in_place = (int32_t)forms[0], c->row = (int32_t)forms[1], c->stays = (int32_t)forms[2];
    l->row_count = (int32_t)pd_next(&m->w);
    MAKE(l->rows, l->row_count);
    for (pd_rows *x = l->rows; x < l->rows + l->row_count; x++) {
        x->row = (pd_held){.dtype = (int32_t)pd_next(&m->w), .room = -1};
        x->axis = (int32_t)pd_next(&m->w), x->backwards = (int32_t)pd_next(&m->w);
        code = make_expressions(m, &x->tail, &x->tail_rank);
        if (code != PD_OK) return code;
    }
    l->slice_forms = pd_next_list(&m->w, &numbers), l->slice_count = numbers / 2;
    MAKE(l->slices, l->slice_count);
    MAKE(l->slice_steps, l->slice_count);
    return PD_OK;
}

static int32_t make_stage(maker *m, pd_stage *g) {
    g->kind = (int32_t)pd_next(&m->w), g->setting = (int32_t)pd_next(&m->w);
    g->label = pd_next_text(&m->w), g->origin = pd_next_text(&m->w), g->name = pd_next_text(&m->w);
    if (g->kind == PD_PART) g->label = g->origin = NULL;
    g->inputs = pd_next_list(&m->w, &g->input_count);
    g->outputs = pd_next_list(&m->w, &g->output_count);
    g->symbols = pd_next_list(&m->w, &g->symbol_count);
    int32_t code = make_expressions(m, &g->dims, &g->dim_count);
    if (code != PD_OK) return code;
    MAKE(g->scratch, 1);
    if (g->kind == PD_PART) {
        MAKE(g->unit, 1);
        code = make_unit(m, g->unit);
    }
    if (g->kind == PD_ITERATE) code = make_loop(m, g);
    if (g->kind != PD_BRANCH) return code;
    MAKE(g->bodies, 2);
    for (int32_t b = 0; b < 2 && code == PD_OK; b++) code = make_body(m, &g->bodies[b]);
    return code;
}

static int32_t make_tensors(maker *m, const char *weights) {
    pd_sequence *s = m->s;
    s->tensor_count = (int32_t)pd_next(&m->w);
    MAKE(s->tensors, s->tensor_count);
    for (pd_held *t = s->tensors; t < s->tensors + s->tensor_count; t++) {
        t->dtype = (int32_t)pd_next(&m->w), t->room = (int32_t)pd_next(&m->w), t->result = (int32_t)pd_next(&m->w);
        t->device = (int32_t)pd_next(&m->w), t->given = -1;
        int64_t constant = pd_next(&m->w); /* its offset in the weights */
        if (constant < 0) continue;
        int32_t rank;
        const int64_t *shape = pd_next_list(&m->w, &rank);
        pd_take_shape(t, rank, shape);
        t->data = (char *)weights + constant;
    }
    s->room_count = (int32_t)pd_next(&m->w);
    MAKE(s->rooms, s->room_count);
    s->value_count = (int32_t)pd_next(&m->w);
    MAKE(s->values, s->value_count);
    return PD_OK;
}

/* Reads the checks of input sizes before any stage, and of all sizes after the last one. */
static int32_t make_checks(maker *m) {
    pd_sequence *s = m->s;
    int32_t words;
    s->source_count = (int32_t)pd_next(&m->w);
    MAKE(s->sources, s->source_count);
    for (pd_size *x = s->sources; x < s->sources + s->source_count; x++)
        x->tensor = (int32_t)pd_next(&m->w), x->axis = (int32_t)pd_next(&m->w), x->value = (int32_t)pd_next(&m->w);
    s->check_count = (int32_t)pd_next(&m->w);
    MAKE(s->checks, s->check_count);
    for (pd_size *x = s->checks; x < s->checks + s->check_count; x++) {
        x->tensor = (int32_t)pd_next(&m->w), x->axis = (int32_t)pd_next(&m->w);
        x->dim = pd_next_list(&m->w, &words), x->name = pd_next_text(&m->w), x->text = pd_next_text(&m->w);
    }
    s->guard_count = (int32_t)pd_next(&m->w);
    MAKE(s->guards, s->guard_count);
    for (pd_late_guard *g = s->guards; g < s->guards + s->guard_count; g++) {
        g->relation = (int32_t)pd_next(&m->w);
        g->left = pd_next_list(&m->w, &words), g->right = pd_next_list(&m->w, &words);
        g->text = pd_next_text(&m->w), g->message = pd_next_text(&m->w);
    }
    return PD_OK;
}

static int32_t make(maker *m, const char *weights) {
    pd_sequence *s = m->s;
    int32_t code = make_tensors(m, weights);
    if (code == PD_OK) code = make_checks(m);
    if (code != PD_OK) return code;
    int64_t uses = pd_next(&m->w); /* of models */
    MAKE(s->units, uses);
    MAKE(s->loops, uses);
    s->count = (int32_t)pd_next(&m->w);
    MAKE(s->stages, s->count);
    for (int32_t k = 0; k < s->count && code == PD_OK; k++) code = make_stage(m, &s->stages[k]);
    return code;
}

int32_t pd_sequence_new(const pd_parts *p, const char *weights, int32_t threads, pd_sequence **out) {
    pd_sequence *s = *out = calloc(1, sizeof *s);
    if (!s) return pd_fail(PD_MEMORY, "out of memory");
    maker m = {.parts = p, .s = s, .w = {p->sequence}, .threads = threads};
    int32_t code = make(&m, weights);
    if (code != PD_OK) pd_sequence_free(s), *out = NULL;
    return code;
}

void pd_sequence_free(pd_sequence *s) {
    for (int32_t k = 0; k < s->loop_count; k++) pd_free_loop(s, s->loops[k]);
    for (int32_t k = 0; s->stages && k < s->count; k++)
        if (s->stages[k].scratch) pd_free_rooms(s, s->stages[k].scratch, 1);
    if (s->rooms) pd_free_rooms(s, s->rooms, s->room_count);
    for (int32_t k = 0; k < s->unit_count; k++) s->units[k]->model->context_free(s->units[k]->context);
    pd_free_zeros(s->memory);
    free(s);
}

int64_t pd_room_bytes(const pd_sequence *s) {
    int64_t bytes = 0;
    for (int32_t k = 0; k < s->room_count; k++) bytes += s->rooms[k].bytes;
    for (int32_t k = 0; k < s->count; k++) bytes += s->stages[k].scratch->bytes;
    for (int32_t k = 0; k < s->loop_count; k++) {
        const pd_loop *l = s->loops[k];
        for (int32_t j = 0; j < l->carried_count; j++) bytes += l->carried[j].rooms[0].bytes + l->carried[j].rooms[1].bytes;
        for (int32_t r = 0; r < l->row_count; r++) bytes += l->rows[r].room.bytes;
    }
    return bytes;
}
