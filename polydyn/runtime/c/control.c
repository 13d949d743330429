/* control.c: the steps of a sequence that run models: conditionals and loops. */
#include <stdio.h>
#include <string.h>

#include "sequence.h"

#define AT_ONCE 65536   /* iterations between two checks for pending signals */
#define FIRST_ROWS 64   /* rows to reserve at first if their number is unknown */
#define FIRST_ROOM 4096 /* bytes to reserve for a growing tensor in addition to twice its size */

/* ---- bodies ---- */

static void feed(pd_body *b, int64_t i, const pd_held *t) {
    if (!b->inner) {
        pd_feed(&b->unit, (int32_t)i, t);
        return;
    }
    pd_held *to = &b->inner->tensors[i];
    pd_take_shape(to, t->rank, t->shape);
    memcpy(to->strides, t->strides, (size_t)t->rank * sizeof *t->strides);
    to->data = t->data;
}

/* Passes the body its inputs from the enclosing scope. */
static void feed_around(const pd_sequence *s, const pd_stage *g, pd_body *b) {
    for (int32_t k = 0; k < b->captured_count; k++)
        feed(b, b->captured[2 * k], &s->tensors[g->inputs[b->captured[2 * k + 1]]]);
    for (int32_t k = 0; k < b->size_count; k++) {
        int64_t size = pd_value_of(g->dims[b->sizes[2 * k + 1]], s->values);
        if (b->inner) pd_take_shape(&b->inner->tensors[b->sizes[2 * k]], 1, &size);
        else pd_feed_size(&b->unit, (int32_t)b->sizes[2 * k], size);
    }
}

/* Computes the shapes of the results. A body of several parts is run for this. */
static int32_t start(pd_sequence *s, pd_body *b) {
    pd_sequence *n = b->inner;
    if (!n) return pd_unit_shapes(s, &b->unit);
    if (!b->entered) n->at = 0, n->begun = -1;
    int32_t code = pd_sequence_run(n);
    b->entered = code == PD_STOP_SIGNALS;
    if (code <= 0) return code;
    const char *origin = n->begun < 0 ? NULL : n->stages[n->at].origin;
    return pd_refuse(s, code, "%s%s%s", n->text, origin ? "\n  node: " : "", origin ? origin : "");
}

static int32_t run(pd_sequence *s, pd_body *b) { return b->inner ? PD_OK : pd_unit_run(s, &b->unit); }

/* Returns a result where the body left it; call `start` before. */
static pd_held result_of(const pd_body *b, int32_t r, int32_t dtype) {
    const pd_unit *u = &b->unit;
    pd_held t = {.dtype = dtype, .room = -1};
    int64_t from = b->results[r];
    if (b->inner) return b->inner->tensors[from];
    if (from >= 0) {
        pd_take_shape(&t, u->ranks[from], pd_unit_dims(u, (int32_t)from));
        t.data = u->to[from];
    } else {
        const pd_tensor *i = &u->tensors[-1 - from];
        pd_take_shape(&t, i->rank, i->shape);
        memcpy(t.strides, i->strides, (size_t)i->rank * sizeof *t.strides);
        t.data = (char *)u->from[-1 - from];
    }
    return t;
}

/* Checks the sizes of all outputs against those that the step declares. */
static int32_t tell_sizes(pd_sequence *s, const pd_stage *g) {
    const int64_t *symbol = g->symbols;
    for (int32_t o = 0; o < g->output_count; o++) {
        const pd_held *t = &s->tensors[g->outputs[o]];
        for (int32_t a = 0; a < t->rank; a++) s->values[*symbol++] = t->shape[a];
    }
    return PD_OK;
}

int32_t pd_branch(pd_sequence *s, const pd_stage *g) {
    const pd_held *c = &s->tensors[g->inputs[0]];
    if (pd_elements(c) != 1)
        return pd_refuse(s, PD_INPUT, "a condition with %lld elements\n  rule: one element", (long long)pd_elements(c));
    pd_body *b = &g->bodies[*c->data ? 0 : 1];
    feed_around(s, g, b);
    int32_t code = start(s, b);
    for (int32_t r = 0; r < b->result_count && code == PD_OK; r++) {
        pd_held *t = &s->tensors[g->outputs[r]], of = result_of(b, r, t->dtype);
        pd_take_shape(t, of.rank, of.shape);
        code = pd_place(s, t);
        if (b->direct[r]) b->unit.to[b->results[r]] = t->data;
    }
    if (code == PD_OK) code = run(s, b);
    for (int32_t r = 0; r < b->result_count && code == PD_OK; r++) {
        pd_held *t = &s->tensors[g->outputs[r]], of = result_of(b, r, t->dtype);
        if (!b->direct[r]) pd_copy_held(&of, t->data);
    }
    return code == PD_OK ? tell_sizes(s, g) : code;
}

/* ---- loops: before the first iteration ---- */

static int more(const pd_loop *l) { return l->going && (l->trips < 0 || l->k < l->trips); }

/* Whether the body can end the loop. A body that returns its condition input unchanged cannot. */
static int asks(const pd_loop *l) {
    const pd_body *b = &l->body;
    return l->counts && b->results[0] != (b->inner ? b->formals[1] : -1 - b->formals[1]);
}

/* Prepares slices of a tensor: the first one, and the distance in bytes to the next. */
static void cut(pd_loop *l, int32_t k, const pd_held *x) {
    int32_t axis = (int32_t)l->slice_forms[2 * k], back = (int32_t)l->slice_forms[2 * k + 1];
    int64_t count = x->shape[axis], step = x->strides[axis];
    pd_held *t = &l->slices[k];
    *t = *x;
    t->rank = 0;
    for (int32_t a = 0; a < x->rank; a++)
        if (a != axis) t->shape[t->rank] = x->shape[a], t->strides[t->rank++] = x->strides[a];
    if (back) t->data += (count - 1) * step;
    l->slice_steps[k] = back ? -step : step;
    if (k == 0) l->trips = count;
}

static int32_t begin_loop(pd_sequence *s, const pd_stage *g, pd_loop *l) {
    const int64_t *in = g->inputs + 2;
    l->k = 0, l->trips = -1, l->going = 1, l->steady = 0;
    for (int32_t i = 0; i < 2; i++)
        if (g->inputs[i] >= 0 && pd_elements(&s->tensors[g->inputs[i]]) != 1)
            return pd_refuse(s, PD_INPUT, "a number of iterations or a condition with %lld elements\n  rule: one element",
                             (long long)pd_elements(&s->tensors[g->inputs[i]]));
    if (g->inputs[0] >= 0) l->trips = pd_max(0, *(const int64_t *)(const void *)s->tensors[g->inputs[0]].data);
    if (g->inputs[1] >= 0) l->going = *s->tensors[g->inputs[1]].data != 0;
    for (int32_t j = 0; j < l->carried_count; j++) {
        l->carried[j].now = s->tensors[*in++];
        l->carried[j].at = -1;
    }
    for (int32_t k = 0; k < l->slice_count; k++) cut(l, k, &s->tensors[*in++]);
    for (int32_t r = 0; r < l->row_count; r++) l->rows[r].capacity = -1, l->rows[r].row.device = 0;
    if (l->counts) { /* scalars: no later code reads their shape */
        feed(&l->body, l->body.formals[0], &(pd_held){.data = (char *)&l->number, .dtype = PD_INT64});
        feed(&l->body, l->body.formals[1], &(pd_held){.data = (char *)&l->condition, .dtype = PD_BOOL});
        for (int32_t i = 0; i < 2 && l->device; i++) /* do not send what the body does not read */
            if (!l->reads[i]) l->body.unit.places[l->body.formals[i]] = PD_ON_DEVICE;
    }
    feed_around(s, g, &l->body);
    l->phase = PD_RUNS;
    return PD_OK;
}

/* ---- loops: an iteration ---- */

static int same_shape(const pd_held *a, const pd_held *b) {
    return a->rank == b->rank && !memcmp(a->shape, b->shape, (size_t)a->rank * sizeof *a->shape);
}

static char *row_at(const pd_rows *x, int64_t k) { return x->start + k * x->step; }

/* Reserves memory for the rows of an output: in the output itself if their number is known, else doubled when full. */
static int32_t enlarge(pd_sequence *s, const pd_stage *g, pd_loop *l, pd_rows *x) {
    pd_held *t = &s->tensors[g->outputs[l->carried_count + (x - l->rows)]];
    int64_t bytes = pd_bytes(&x->row), count = l->k ? 2 * l->k : l->trips < 0 ? FIRST_ROWS : pd_min(l->trips, FIRST_ROWS);
    int32_t code, counted = l->trips >= 0 && !asks(l) && x->axis == 0;
    x->row.device = counted && l->device && bytes % 16 == 0; /* otherwise kernels could not write it in place */
    x->direct = counted && !x->row.device;
    if (x->direct) {
        int64_t shape[PD_MAX_RANK] = {count = l->trips};
        memcpy(shape + 1, x->row.shape, (size_t)x->row.rank * sizeof *shape);
        pd_take_shape(t, x->row.rank + 1, shape);
        code = pd_place(s, t);
    } else if (x->row.device) code = pd_reserve_on(s, &x->room, (count = l->trips) * bytes, 1);
    else code = pd_reserve(s, &x->room, count * bytes, l->k * bytes);
    if (code != PD_OK) return code;
    int back = counted && x->backwards;
    x->start = (x->direct ? t->data : x->room.data) + (back ? (count - 1) * bytes : 0);
    x->step = back ? -bytes : bytes;
    x->capacity = count;
    return PD_OK;
}

static int32_t place_row(pd_sequence *s, const pd_stage *g, pd_loop *l, int32_t r, const pd_held *of) {
    pd_rows *x = &l->rows[r];
    if (x->capacity < 0) pd_take_shape(&x->row, of->rank, of->shape);
    else if (!same_shape(&x->row, of))
        return pd_refuse(s, PD_INPUT, "iteration %lld gives a row of another shape than those before\n"
                         "  rule: all rows of an output have one shape", (long long)l->k);
    if (l->k < x->capacity) return PD_OK;
    int32_t code = enlarge(s, g, l, x);
    for (int32_t j = 0; j < l->carried_count && code == PD_OK && l->k; j++)
        if (l->carried[j].row == r) l->carried[j].now.data = row_at(x, l->k - 1);
    return code;
}

/* Chooses memory for the next value of a carried tensor. One that grows at its end stays in place, others alternate
 * between two rooms. */
static int32_t place_carried(pd_sequence *s, pd_carried *c, const pd_held *of, char **to, int32_t device) {
    int64_t bytes = pd_bytes(of), had = pd_bytes(&c->now);
    int other = !same_shape(&c->now, of), next = c->at == 0;
    int64_t ample = other ? 2 * bytes + FIRST_ROOM : bytes;
    if (!other || !c->in_place) {
        int32_t code = bytes > c->rooms[next].bytes ? pd_reserve_on(s, &c->rooms[next], ample, device) : PD_OK;
        *to = c->rooms[next].data;
        return code;
    }
    int32_t first = c->at < 0, at = first ? 0 : c->at;
    int32_t code = bytes > c->rooms[at].bytes ? pd_reserve(s, &c->rooms[at], ample, first ? 0 : had) : PD_OK;
    if (code != PD_OK) return code;
    if (first) pd_copy_held(&c->now, c->rooms[0].data);
    c->at = at;
    *to = c->now.data = c->rooms[at].data;
    return PD_OK;
}

/* Reserves memory for all results of an iteration. May be called again for the same iteration. */
static int32_t place_results(pd_sequence *s, const pd_stage *g, pd_loop *l, char **next) {
    const pd_body *b = &l->body;
    const int32_t first = l->counts, rows = first + l->carried_count;
    int32_t code = PD_OK;
    for (int32_t r = 0; r < l->row_count && code == PD_OK; r++) {
        pd_held of = result_of(b, rows + r, l->rows[r].row.dtype);
        code = place_row(s, g, l, r, &of);
        if (code == PD_OK && b->direct[rows + r]) b->unit.to[b->results[rows + r]] = row_at(&l->rows[r], l->k);
    }
    for (int32_t j = 0; j < l->carried_count && code == PD_OK; j++) {
        pd_carried *c = &l->carried[j];
        pd_held of = result_of(b, first + j, c->now.dtype);
        if (c->row >= 0) next[j] = row_at(&l->rows[c->row], l->k);
        else if (c->stays) next[j] = c->now.data;
        else code = place_carried(s, c, &of, &next[j], l->device);
        if (b->direct[first + j]) b->unit.to[b->results[first + j]] = next[j];
    }
    if (code != PD_OK || !asks(l)) return code;
    pd_held of = result_of(b, 0, PD_BOOL);
    if (pd_elements(&of) != 1)
        return pd_refuse(s, PD_INPUT, "a condition with %lld elements\n  rule: one element", (long long)pd_elements(&of));
    if (b->direct[0]) b->unit.to[b->results[0]] = &l->answer;
    return PD_OK;
}

static void feed_iteration(pd_loop *l) {
    const int64_t *formal = l->body.formals + 2 * l->counts;
    l->number = l->k, l->condition = 1;
    for (int32_t j = 0; j < l->carried_count; j++) feed(&l->body, *formal++, &l->carried[j].now);
    for (int32_t k = 0; k < l->slice_count; k++, formal++) {
        feed(&l->body, *formal, &l->slices[k]);
        if (l->slices[k].device && l->slice_steps[k] % 16) l->body.unit.places[*formal] = PD_TO_COPY; /* later ones are unaligned */
    }
}

/* Whether a carried tensor is on the device after an iteration. */
static int32_t lies_on_device(const pd_loop *l, const pd_carried *c) {
    return c->stays ? c->now.device : c->row >= 0 ? l->rows[c->row].row.device : l->device;
}

/* Tells the program which results to leave on the device. */
static int32_t tell_places(pd_sequence *s, pd_loop *l) {
    pd_body *b = &l->body;
    const int32_t first = l->counts, rows = first + l->carried_count;
    for (int32_t j = 0; j < l->carried_count; j++)
        if (b->direct[first + j]) b->unit.places[b->unit.input_count + b->results[first + j]] = l->device ? PD_ON_DEVICE : PD_ON_HOST;
    for (int32_t r = 0; r < l->row_count; r++)
        if (b->direct[rows + r])
            b->unit.places[b->unit.input_count + b->results[rows + r]] = l->rows[r].row.device ? PD_ON_DEVICE : PD_ON_HOST;
    return pd_unit_shapes(s, &b->unit);
}

static void go_on(pd_loop *l) {
    for (int32_t k = 0; k < l->slice_count; k++) l->slices[k].data += l->slice_steps[k];
    l->k++;
}

/* Runs one iteration; its shapes may differ from those of the previous one. */
static int32_t iteration(pd_sequence *s, const pd_stage *g, pd_loop *l) {
    const pd_body *b = &l->body;
    const int32_t first = l->counts, rows = first + l->carried_count;
    char *next[l->carried_count + 1];
    feed_iteration(l);
    int32_t code = start(s, &l->body);
    if (code == PD_OK) code = place_results(s, g, l, next);
    if (code != PD_OK) return code;
    feed_iteration(l); /* some arrays have moved */
    code = l->device ? tell_places(s, l) : PD_OK;
    if (code == PD_OK) code = run(s, &l->body);
    if (code != PD_OK) return code;
    pd_held of[rows + l->row_count + 1];
    for (int32_t r = 0; r < rows + l->row_count; r++) {
        int32_t j = r - first, dtype = r < first ? PD_BOOL : r < rows ? l->carried[j].now.dtype : l->rows[r - rows].row.dtype;
        of[r] = result_of(b, r, dtype);
        if (r < first || b->direct[r] || (r < rows && (l->carried[j].stays || l->carried[j].row >= 0))) continue;
        pd_copy_held(&of[r], r < rows ? next[j] : row_at(&l->rows[r - rows], l->k));
    }
    if (asks(l)) l->going = *of[0].data != 0;
    l->steady = l->plain;
    for (int32_t j = 0; j < l->carried_count; j++) {
        pd_carried *c = &l->carried[j];
        if (c->stays) continue;
        int32_t device = lies_on_device(l, c);
        l->steady &= same_shape(&c->now, &of[first + j]) && c->now.device == device;
        c->now.device = device;
        if (c->row < 0 && next[j] != c->now.data) c->at = c->at == 0;
        pd_take_shape(&c->now, of[first + j].rank, of[first + j].shape);
        c->now.data = next[j];
    }
    go_on(l);
    return PD_OK;
}

/* Runs iterations with the shapes of the previous one while there is memory for rows. */
static int32_t iterations(pd_sequence *s, pd_loop *l, int64_t end) {
    pd_unit *u = &l->body.unit;
    const int64_t *formals = l->body.formals + 2 * l->counts, *results = l->body.results + l->counts;
    int32_t code = PD_OK, asked = asks(l);
    for (int32_t j = 0; j < l->carried_count && code == PD_OK; j++) {
        pd_carried *c = &l->carried[j];
        if (c->row < 0 && !c->stays) code = pd_reserve_on(s, &c->rooms[c->at == 0], pd_bytes(&c->now), l->device);
    }
    for (int32_t r = 0; r < l->row_count; r++) end = pd_min(end, l->rows[r].capacity);
    while (code == PD_OK && l->going && l->k < end) {
        l->number = l->k, l->condition = 1;
        for (int32_t k = 0; k < l->slice_count; k++) u->from[formals[l->carried_count + k]] = l->slices[k].data;
        for (int32_t r = 0; r < l->row_count; r++) u->to[results[l->carried_count + r]] = row_at(&l->rows[r], l->k);
        for (int32_t j = 0; j < l->carried_count; j++) {
            pd_carried *c = &l->carried[j];
            u->from[formals[j]] = c->now.data;
            if (c->stays) continue;
            if (c->row < 0) u->to[results[j]] = c->rooms[c->at = c->at == 0].data;
            c->now.data = u->to[results[j]];
        }
        code = pd_unit_run(s, u);
        if (code != PD_OK) break;
        if (asked) l->going = l->answer;
        go_on(l);
    }
    l->steady = l->k < end;
    return code;
}

/* ---- loops: after the last iteration ---- */

/* Returns the contents of output o. */
static pd_held outcome(const pd_sequence *s, const pd_loop *l, int32_t o) {
    if (o < l->carried_count) return l->carried[o].now;
    const pd_rows *x = &l->rows[o - l->carried_count];
    pd_held every = x->row;
    int64_t tail[PD_MAX_RANK];
    for (int32_t a = 0; x->capacity < 0 && a < x->tail_rank; a++) tail[a] = pd_value_of(x->tail[a], s->values);
    if (x->capacity < 0) pd_take_shape(&every, x->tail_rank, tail);
    for (int32_t a = every.rank++; a > x->axis; a--)
        every.shape[a] = every.shape[a - 1], every.strides[a] = every.strides[a - 1];
    every.shape[x->axis] = l->k;
    every.strides[x->axis] = x->backwards ? -x->step : x->step;
    every.data = x->backwards ? row_at(x, l->k - 1) : x->start;
    return every;
}

static int is_there(const pd_loop *l, int32_t o) {
    const pd_rows *x = o < l->carried_count ? NULL : &l->rows[o - l->carried_count];
    return x && x->direct && x->capacity >= 0;
}

/* Reserves memory for all outputs before copying any, because the run may stop for memory and call this again. */
static int32_t finish(pd_sequence *s, const pd_stage *g, pd_loop *l) {
    int32_t code = PD_OK;
    for (int32_t o = 0; o < g->output_count && code == PD_OK; o++) {
        if (is_there(l, o)) continue;
        pd_held of = outcome(s, l, o);
        pd_take_shape(&s->tensors[g->outputs[o]], of.rank, of.shape);
        code = pd_place(s, &s->tensors[g->outputs[o]]);
    }
    for (int32_t o = 0; o < g->output_count && code == PD_OK; o++) {
        pd_held of = outcome(s, l, o);
        if (!is_there(l, o)) code = pd_fetch_held(s, &of, s->tensors[g->outputs[o]].data);
    }
    return code == PD_OK ? tell_sizes(s, g) : code;
}

int32_t pd_iterate(pd_sequence *s, const pd_stage *g) {
    pd_loop *l = g->loop;
    int32_t code = l->phase == PD_BEGINS ? begin_loop(s, g, l) : PD_OK;
    for (int64_t end = l->k + AT_ONCE; code == PD_OK && l->phase == PD_RUNS && more(l);) {
        if (l->k >= end) return PD_STOP_SIGNALS;
        int64_t until = l->trips < 0 ? end : pd_min(end, l->trips);
        code = l->steady ? iterations(s, l, until) : iteration(s, g, l);
    }
    if (code > 0) {
        size_t length = strlen(s->text);
        snprintf(s->text + length, sizeof s->text - length, "\n  in iteration %lld", (long long)l->k);
    }
    if (code != PD_OK) return code;
    l->phase = PD_HAS_ENDED;
    return finish(s, g, l);
}

void pd_free_loop(const pd_sequence *s, pd_loop *l) {
    for (int32_t j = 0; j < l->carried_count; j++) pd_free_rooms(s, l->carried[j].rooms, 2);
    for (int32_t r = 0; r < l->row_count; r++) pd_free_rooms(s, &l->rows[r].room, 1);
}
