/* sequence.c: runs the parts of a program and the steps between them, one after the other. */
#define _GNU_SOURCE
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "sequence.h"

int32_t pd_refuse(pd_sequence *s, int32_t code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(s->text, sizeof s->text, format, list);
    va_end(list);
    return code;
}

/* ---- sizes ---- */

int64_t pd_value_of(const int64_t *w, const int64_t *values) {
    int64_t stack[PD_EXPRESSION_DEPTH + 1];
    int32_t top = -1;
    for (; *w != PD_END; w++) {
        if (*w == PD_NUMBER || *w == PD_SYMBOL) {
            stack[++top] = *w == PD_NUMBER ? w[1] : values[w[1]];
            w++;
            continue;
        }
        int64_t b = stack[top--], a = stack[top];
        stack[top] = *w == PD_PLUS    ? (int64_t)((uint64_t)a + (uint64_t)b)
                     : *w == PD_TIMES ? (int64_t)((uint64_t)a * (uint64_t)b)
                     : *w == PD_OVER  ? pd_floordiv(a, b)
                     : *w == PD_LEAST ? pd_min(a, b)
                                      : pd_max(a, b);
    }
    return stack[0];
}

int64_t pd_elements(const pd_held *t) {
    int64_t n = 1;
    for (int32_t a = 0; a < t->rank; a++) n *= t->shape[a];
    return n;
}

int64_t pd_bytes(const pd_held *t) { return pd_elements(t) * pd_item_bytes[t->dtype]; }

void pd_take_shape(pd_held *t, int32_t rank, const int64_t *shape) {
    t->rank = rank;
    memcpy(t->shape, shape, (size_t)rank * sizeof *shape);
    pd_make_dense(t);
}

void pd_make_dense(pd_held *t) { pd_dense_strides(t->rank, t->shape, pd_item_bytes[t->dtype], t->strides); }

void pd_copy_held(const pd_held *from, char *to) {
    int64_t item = pd_item_bytes[from->dtype];
    if (!pd_elements(from)) return;
    if (from->rank) pd_copy_strided(to, from->data, from->rank, from->shape, from->strides, item);
    else memcpy(to, from->data, (size_t)item);
}

/* ---- memory ---- */

int32_t pd_reserve(pd_sequence *s, pd_room *room, int64_t bytes, int64_t kept) {
    if (room->device) pd_free_rooms(s, room, 1);
    if (bytes <= room->bytes) return PD_OK;
    char *data = aligned_alloc(PD_PAGE, ((size_t)bytes + PD_PAGE - 1) / PD_PAGE * PD_PAGE);
    if (!data) return pd_refuse(s, PD_MEMORY, "there is no memory for a tensor whose size data decide: %lld bytes", (long long)bytes);
    if (kept) memcpy(data, room->data, (size_t)kept);
    free(room->data);
    room->data = data, room->bytes = bytes;
    return PD_OK;
}

static int32_t on_device(const pd_sequence *s, pd_room *room, int64_t bytes) {
    return s->device->model->cuda_room(s->device->context, s->stream, (void **)(void *)&room->data, &room->bytes, bytes);
}

int32_t pd_reserve_on(pd_sequence *s, pd_room *room, int64_t bytes, int32_t device) {
    if (!device) return pd_reserve(s, room, bytes, 0);
    if (!room->device) pd_free_rooms(s, room, 1);
    room->device = 1;
    if (bytes <= room->bytes) return PD_OK;
    int32_t code = on_device(s, room, bytes);
    return code == PD_OK ? code : pd_refuse(s, code, "%s", s->device->model->error());
}

int32_t pd_fetch_held(pd_sequence *s, const pd_held *from, char *to) {
    if (!from->device) return pd_copy_held(from, to), PD_OK;
    s->waits++, s->pending = 0;
    int32_t code = s->device->model->cuda_fetch(s->device->context, s->stream, to, from->data, pd_bytes(from));
    return code == PD_OK ? code : pd_refuse(s, code, "%s", s->device->model->error());
}

int32_t pd_place(pd_sequence *s, pd_held *t) {
    int64_t bytes = pd_item_bytes[t->dtype], bad = pd_dense_strides(t->rank, t->shape, bytes, t->strides);
    for (int32_t a = 0; a < t->rank; a++) bad |= __builtin_mul_overflow(bytes, t->shape[a], &bytes);
    if (bad) return pd_refuse(s, PD_MEMORY, "there is no memory for a tensor whose size data decide: its size overflows");
    if (t->result && t->given == bytes) return PD_OK;
    if (t->result && s->asks) {
        s->lacks = (int32_t)(t - s->tensors);
        return PD_STOP_MEMORY;
    }
    int32_t code = pd_reserve_on(s, &s->rooms[t->room], bytes, t->device);
    t->data = s->rooms[t->room].data;
    return code;
}

void pd_free_rooms(const pd_sequence *s, pd_room *rooms, int64_t count) {
    for (int64_t k = 0; k < count; k++) {
        if (rooms[k].device) on_device(s, &rooms[k], 0);
        else free(rooms[k].data);
        rooms[k] = (pd_room){0};
    }
}

/* ---- programs ---- */

static const int64_t one_byte[] = {1};

void pd_feed(pd_unit *u, int32_t i, const pd_held *t) {
    u->tensors[i] = (pd_tensor){.shape = t->shape, .strides = t->strides, .dtype = t->dtype, .rank = t->rank};
    u->from[i] = t->data;
    u->places[i] = !t->device ? PD_ON_HOST : (uintptr_t)t->data % 16 ? PD_TO_COPY : PD_ON_DEVICE;
}

void pd_feed_size(pd_unit *u, int32_t i, int64_t size) {
    u->sizes[i] = size;
    u->tensors[i] = (pd_tensor){.shape = &u->sizes[i], .strides = one_byte, .dtype = PD_UINT8, .rank = 1};
    u->from[i] = NULL; /* its elements are not read */
    u->places[i] = PD_ON_DEVICE;
}

static int32_t said(pd_sequence *s, const pd_unit *u, int32_t code) {
    return code == PD_OK ? PD_OK : pd_refuse(s, code, "%s", u->model->error());
}

int32_t pd_unit_shapes(pd_sequence *s, pd_unit *u) {
    size_t bytes = (size_t)(u->input_count + u->output_count) * sizeof *u->places;
    if (u->model->cuda_places && memcmp(u->places, u->told, bytes)) {
        memcpy(u->told, u->places, bytes);
        u->model->cuda_places(u->context, u->places);
    }
    return said(s, u, u->model->shapes(u->context, u->tensors, NULL, u->output_dims));
}

/* Runs a unit on the device. Waits for it only if one of its results is in host memory. */
static int32_t run_on_device(pd_sequence *s, pd_unit *u, int64_t *times) {
    s->pending = u->unread = !times;
    for (int32_t o = 0; o < u->output_count; o++) s->pending &= u->places[u->input_count + o] == PD_ON_DEVICE;
    s->waits += !s->pending;
    return said(s, u, u->model->cuda_run(u->context, u->from, u->to, s->stream, !times, times));
}

int32_t pd_unit_run(pd_sequence *s, pd_unit *u) {
    return s->device ? run_on_device(s, u, NULL) : said(s, u, u->model->run(u->context, u->from, u->to));
}

/* Reports the errors of runs that were not waited for; `code`: an error that is already known. */
static int32_t wait(pd_sequence *s, int32_t code) {
    s->waits += s->pending;
    s->pending = 0;
    for (int32_t k = 0; s->device && k < s->unit_count; k++) {
        pd_unit *u = s->units[k];
        int32_t own = u->unread ? u->model->cuda_wait(u->context) : PD_OK;
        u->unread = 0;
        if (code == PD_OK) code = said(s, u, own);
    }
    return code;
}

const int64_t *pd_unit_dims(const pd_unit *u, int32_t o) {
    const int64_t *dims = u->output_dims;
    for (int32_t k = 0; k < o; k++) dims += u->ranks[k];
    return dims;
}

int32_t pd_part_shapes(pd_sequence *s, const pd_stage *g) {
    pd_unit *u = g->unit;
    for (int32_t i = 0; i < g->input_count; i++) pd_feed(u, i, &s->tensors[g->inputs[i]]);
    for (int32_t k = 0; k < g->dim_count; k++) pd_feed_size(u, g->input_count + k, pd_value_of(g->dims[k], s->values));
    for (int32_t o = 0; o < g->output_count; o++)
        u->places[u->input_count + o] = s->tensors[g->outputs[o]].device ? PD_ON_DEVICE : PD_ON_HOST;
    return pd_unit_shapes(s, u);
}

static int32_t run_part(pd_sequence *s, const pd_stage *g, int64_t *times) {
    pd_unit *u = g->unit;
    int32_t code = pd_part_shapes(s, g);
    const int64_t *dims = u->output_dims;
    for (int32_t o = 0; o < g->output_count && code == PD_OK; dims += u->ranks[o++]) {
        pd_held *t = &s->tensors[g->outputs[o]];
        pd_take_shape(t, u->ranks[o], dims);
        code = pd_place(s, t);
        u->to[o] = t->data;
    }
    if (code != PD_OK) return code;
    if (s->device && times) return run_on_device(s, u, times);
    return times ? said(s, u, u->model->profile(u->context, u->from, u->to, times)) : pd_unit_run(s, u);
}

/* ---- runs of a sequence ---- */

static int64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (int64_t)t.tv_sec * 1000000000 + t.tv_nsec;
}

static int32_t run_stage(pd_sequence *s, const pd_stage *g, int64_t *times) {
    int64_t begun = times ? now_ns() : 0;
    int32_t code;
    switch (g->kind) {
    case PD_PART: return run_part(s, g, times);
    case PD_PYTHON: return PD_STOP_PYTHON;
    case PD_BRANCH: code = pd_branch(s, g); break;
    case PD_ITERATE: code = pd_iterate(s, g); break;
    case PD_NON_ZERO:
    case PD_SUPPRESS: code = pd_counting_step(s, g); break;
    case PD_UNIQUE: code = pd_unique(s, g); break;
    default: code = pd_size_step(s, g);
    }
    if (times) *times += now_ns() - begun;
    return code;
}

int32_t pd_take_sizes(pd_sequence *s) {
    for (const pd_size *x = s->sources; x < s->sources + s->source_count; x++)
        s->values[x->value] = s->tensors[x->tensor].shape[x->axis];
    for (const pd_size *x = s->checks; x < s->checks + s->check_count; x++) {
        int64_t size = s->tensors[x->tensor].shape[x->axis];
        if (size != pd_value_of(x->dim, s->values))
            return pd_refuse(s, PD_INPUT, "axis %d of input '%s' has size %lld, expected %s", x->axis, x->name,
                             (long long)size, x->text);
    }
    return PD_OK;
}

/* Starts a stage, as opposed to continuing it. */
static void begin(const pd_stage *g) {
    if (g->loop) g->loop->phase = PD_BEGINS, g->loop->body.entered = 0;
    for (int32_t b = 0; g->bodies && b < 2; b++) g->bodies[b].entered = 0;
}

static int32_t check_guards(pd_sequence *s) {
    for (const pd_late_guard *g = s->guards; g < s->guards + s->guard_count; g++) {
        int64_t a = pd_value_of(g->left, s->values), b = pd_value_of(g->right, s->values);
        int holds = g->relation == '=' ? a == b : g->relation == '<' ? a <= b : b ? a % b == 0 : a == 0;
        if (!holds)
            return pd_refuse(s, PD_INPUT, "%s\n  rule: %s, here %lld and %lld", g->message, g->text, (long long)a, (long long)b);
    }
    return PD_OK;
}

PD_EXPORT int32_t pd_sequence_run(pd_sequence *s) {
    int64_t *times = s->times;
    int32_t code = s->begun < 0 ? pd_take_sizes(s) : PD_OK;
    if (code != PD_OK) return code;
    for (int32_t k = 0; times && k < s->at; k++) times += s->stages[k].unit ? s->stages[k].unit->launch_count : 1;
    for (; s->at < s->count; s->at++) {
        const pd_stage *g = &s->stages[s->at];
        if (s->begun != s->at) begin(g);
        s->begun = s->at;
        code = run_stage(s, g, times);
        if (code != PD_OK) return code < 0 ? code : wait(s, code);
        if (times) times += g->unit ? g->unit->launch_count : 1;
    }
    code = wait(s, code);
    return code == PD_OK ? check_guards(s) : code;
}
