/* size_steps.c: steps of a sequence that compute sizes from data, and arithmetic on them. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "sequence.h"

/* Numbers that are read from a tensor, or sizes. */
typedef struct {
    int64_t n[2 * PD_MAX_RANK];
    int32_t count;
} numbers;

/* ---- reading ---- */

static double float_of(uint32_t bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}

static double half_of(uint16_t h) {
    int e = h >> 10 & 31, m = h & 1023;
    double x = e == 31 ? (m ? NAN : INFINITY) : e ? ldexp(1024 + m, e - 25) : ldexp(m, -24);
    return h >> 15 ? -x : x;
}

/* Returns element k of a tensor of numbers. The type can represent every 64-bit integer. */
static long double number(const pd_held *t, int64_t k) {
    const void *at = t->data + k * pd_item_bytes[t->dtype];
    switch (t->dtype) {
#define NUMBER(T, type)                                                                                               \
    case T: {                                                                                                         \
        type x;                                                                                                       \
        memcpy(&x, at, sizeof x);                                                                                     \
        return (long double)x;                                                                                        \
    }
        case PD_FLOAT16: return half_of(*(const uint16_t *)at);
        case PD_BFLOAT16: return float_of((uint32_t) * (const uint16_t *)at << 16);
        NUMBER(PD_FLOAT32, float)
        NUMBER(PD_FLOAT64, double)
        NUMBER(PD_INT8, int8_t)
        NUMBER(PD_INT16, int16_t)
        NUMBER(PD_INT32, int32_t)
        NUMBER(PD_INT64, int64_t)
        NUMBER(PD_UINT16, uint16_t)
        NUMBER(PD_UINT32, uint32_t)
        NUMBER(PD_UINT64, uint64_t)
        default: NUMBER(PD_UINT8, uint8_t)
#undef NUMBER
    }
}

static int has(const pd_stage *g, int32_t i) { return i < g->input_count && g->inputs[i] >= 0; }

/* Reads input i, of integers; their number is known at compile time. */
static numbers numbers_of(const pd_sequence *s, const pd_stage *g, int32_t i) {
    const pd_held *t = &s->tensors[g->inputs[i]];
    numbers x = {.count = (int32_t)pd_min(pd_elements(t), 2 * PD_MAX_RANK)};
    for (int32_t k = 0; k < x.count; k++) x.n[k] = (int64_t)number(t, k);
    return x;
}

/* Returns the sizes that are passed to the step. */
static numbers dims_of(const pd_sequence *s, const pd_stage *g) {
    numbers x = {.count = g->dim_count};
    for (int32_t k = 0; k < x.count; k++) x.n[k] = pd_value_of(g->dims[k], s->values);
    return x;
}

/* ---- rejecting ---- */

typedef struct {
    char of[512];
} words;

static words show(const numbers *x) {
    words w = {"["};
    size_t at = 1;
    for (int32_t k = 0; k < x->count && at < sizeof w.of - 32; k++)
        at += (size_t)snprintf(w.of + at, sizeof w.of - at, "%s%" PRId64, k ? ", " : "", x->n[k]);
    snprintf(w.of + at, sizeof w.of - at, "]");
    return w;
}

#define REFUSE(s, rule, ...) pd_refuse(s, PD_INPUT, __VA_ARGS__), add_rule(s, rule)

static int32_t add_rule(pd_sequence *s, const char *rule) {
    size_t at = strlen(s->text);
    snprintf(s->text + at, sizeof s->text - at, "\n  rule: %s\n  remedy: pass data that give such sizes", rule);
    return PD_INPUT;
}

static int32_t tell(pd_sequence *s, const pd_stage *g, const numbers *x) {
    for (int32_t k = 0; k < x->count; k++) s->values[g->symbols[k]] = x->n[k];
    return PD_OK;
}

/* ---- the steps ---- */

/* Reads the elements of one tensor; each must be a valid size. */
static int32_t sizes(pd_sequence *s, const pd_stage *g) {
    const pd_held *t = &s->tensors[g->inputs[0]];
    for (int64_t k = 0; k < pd_elements(t); k++) {
        long double v = number(t, k);
        int64_t n = v >= 0 && v < 0x1p62L ? (int64_t)v : -1;
        if (n < 0 || (long double)n != v)
            return REFUSE(s, "a size is a whole number, not negative, below 2^62", "element %" PRId64 " of %s is %.*Lg", k,
                          g->name, fabsl(v) < 0x1p64L && floorl(v) == v ? 20 : 17, v);
        s->values[g->symbols[k]] = n;
    }
    return PD_OK;
}

/* Computes the broadcast of two sizes. */
static int32_t common(pd_sequence *s, const pd_stage *g) {
    numbers x = dims_of(s, g);
    int64_t a = x.n[0], b = x.n[1];
    if (a != b && a != 1 && b != 1)
        return pd_refuse(s, PD_INPUT, "%s: %" PRId64 " and %" PRId64 " are not equal, nor is one of them 1\n  rule: broadcast",
                         g->name, a, b);
    s->values[g->symbols[0]] = a == 1 ? b : a;
    return PD_OK;
}

/* Computes the number of elements of a range with start, limit and step; for floats, in their type's arithmetic. */
static int32_t count(pd_sequence *s, const pd_stage *g) {
    long double of[3];
    for (int32_t i = 0; i < 3; i++) {
        const pd_held *t = &s->tensors[g->inputs[i]];
        if (pd_elements(t) != 1)
            return REFUSE(s, "one element", "a range whose input %d has %" PRId64 " elements", i, pd_elements(t));
        of[i] = number(t, 0);
    }
    long double start = of[0], limit = of[1], delta = of[2];
    int32_t dtype = s->tensors[g->inputs[0]].dtype;
    if (delta == 0) return REFUSE(s, "the step of a range is not 0", "a range by steps of 0");
    double far = dtype == PD_FLOAT64 ? (double)limit - (double)start : (float)((float)limit - (float)start);
    double steps = dtype <= PD_FLOAT64 ? ceil(far / (double)delta) : 0;
    if (steps < 0) steps = 0;
    if (steps != steps || steps >= 0x1p62)
        return REFUSE(s, "a range ends", "a range from %Lg to %Lg by %Lg", start, limit, delta);
    __int128 whole = (__int128)steps;
    if (dtype > PD_FLOAT64) {
        __int128 wide = (__int128)limit - (__int128)start, by = (__int128)delta;
        whole = wide / by + (wide % by != 0 && (wide < 0) == (by < 0));
    }
    s->values[g->symbols[0]] = whole < 0 ? 0 : whole > INT64_MAX ? INT64_MAX : (int64_t)whole;
    return PD_OK;
}

static int64_t product(const numbers *x) {
    int64_t n = 1;
    for (int32_t k = 0; k < x->count; k++) n = (int64_t)((uint64_t)n * (uint64_t)x->n[k]);
    return n;
}

/* Computes the sizes for a reshape, whose shape may contain 0 (copies a size) and -1 (the remaining elements). */
static int32_t reshape(pd_sequence *s, const pd_stage *g) {
    numbers dims = dims_of(s, g), asked = numbers_of(s, g, 0), x = asked;
    int32_t free = -1, frees = 0, low = 0;
    for (int32_t k = 0; k < x.count; k++) {
        if (x.n[k] == 0 && !g->setting && k < dims.count) x.n[k] = dims.n[k];
        if (x.n[k] == -1) free = k, frees++;
        low |= x.n[k] < -1;
    }
    const char *rule = "at most one size is -1";
    if (frees <= 1 && !low) {
        rule = "as many elements before as after";
        if (frees) x.n[free] = 1;
        int64_t rest = product(&x);
        if (frees) x.n[free] = pd_floordiv(product(&dims), rest);
        if (product(&x) == product(&dims)) return tell(s, g, &x);
    }
    return REFUSE(s, rule, "a tensor of shape %s cannot be reshaped to %s", show(&dims).of, show(&asked).of);
}

/* Broadcasts a shape that is data with one that is not. */
static int32_t broadcast(pd_sequence *s, const pd_stage *g) {
    numbers dims = dims_of(s, g), asked = numbers_of(s, g, 0), x = {.count = pd_max(dims.count, asked.count)};
    for (int32_t k = 0; k < x.count; k++) {
        int32_t i = k - (x.count - dims.count), j = k - (x.count - asked.count);
        int64_t a = i < 0 ? 1 : dims.n[i], b = j < 0 ? 1 : asked.n[j];
        if ((a != b && a != 1 && b != 1) || b < 0)
            return REFUSE(s, "sizes are equal or 1", "a tensor of shape %s cannot be expanded to %s", show(&dims).of,
                          show(&asked).of);
        x.n[k] = a == 1 ? b : a;
    }
    return tell(s, g, &x);
}

/* Converts axes to non-negative ones; each may occur once. */
static int32_t take_axes(pd_sequence *s, numbers *axes, int32_t rank) {
    const numbers given = *axes;
    uint32_t seen = 0;
    int fits = rank <= PD_MAX_RANK;
    for (int32_t k = 0; k < axes->count && fits; k++) {
        if (axes->n[k] < 0) axes->n[k] += rank;
        fits = axes->n[k] >= 0 && axes->n[k] < rank && !(seen >> axes->n[k] & 1);
        if (fits) seen |= 1u << axes->n[k];
    }
    if (fits) return PD_OK;
    return REFUSE(s, "each is an axis, and only once", "the axes %s of a tensor with %d axes", show(&given).of, rank);
}

/* Reads input i; if missing, returns 0, 1, ... or 1, 1, ... */
static numbers read_or(const pd_sequence *s, const pd_stage *g, int32_t i, int32_t count, int64_t step) {
    if (has(g, i)) return numbers_of(s, g, i);
    numbers x = {.count = count};
    for (int32_t k = 0; k < count; k++) x.n[k] = step ? step : k;
    return x;
}

/* Computes for every axis the begin of a slice, its number of elements, its forward step and its backward step. */
static int32_t slice(pd_sequence *s, const pd_stage *g) {
    numbers dims = dims_of(s, g), starts = numbers_of(s, g, 0), ends = numbers_of(s, g, 1);
    numbers axes = read_or(s, g, 2, starts.count, 0), steps = read_or(s, g, 3, starts.count, 1);
    int fits = starts.count == ends.count && axes.count == steps.count && starts.count == axes.count;
    for (int32_t k = 0; k < steps.count; k++) fits &= steps.n[k] != 0;
    if (!fits)
        return REFUSE(s, "as many of each, no step of 0", "a slice from %s to %s along %s by %s", show(&starts).of,
                      show(&ends).of, show(&axes).of, show(&steps).of);
    int32_t code = take_axes(s, &axes, dims.count);
    if (code != PD_OK) return code;
    int64_t found[4 * PD_MAX_RANK];
    for (int32_t a = 0; a < dims.count; a++) memcpy(found + 4 * a, (int64_t[]){0, dims.n[a], 1, 0}, 4 * sizeof *found);
    for (int32_t k = 0; k < axes.count; k++) {
        int64_t n = dims.n[axes.n[k]], by = steps.n[k], start = starts.n[k], end = ends.n[k], *to = found + 4 * axes.n[k];
        int64_t first = pd_min(pd_max(start < 0 ? start + n : start, 0), by > 0 ? n : n - 1);
        if (by < 0 && (end == INT32_MAX || end == INT64_MAX)) end = -n - 1; /* up to the first element, as in ONNX Runtime */
        int64_t last = pd_min(pd_max(end < 0 ? end + n : end, by > 0 ? 0 : -1), by > 0 ? n : n - 1);
        to[0] = pd_max(first, 0), to[1] = pd_max(0, -pd_floordiv(first - last, by));
        by = pd_max(pd_min(by, n + 1), -n - 1); /* at most one element: -by does not overflow */
        to[2] = pd_max(by, 0), to[3] = by < 0 ? -by : 0;
    }
    for (int32_t k = 0; k < 4 * dims.count; k++) s->values[g->symbols[k]] = found[k];
    return PD_OK;
}

/* Inserts a size of 1 at each given axis. */
static int32_t unsqueeze(pd_sequence *s, const pd_stage *g) {
    numbers dims = dims_of(s, g), axes = numbers_of(s, g, 0), x = {.count = dims.count + axes.count};
    int32_t code = take_axes(s, &axes, x.count);
    for (int32_t k = 0; k < axes.count && code == PD_OK; k++) x.n[axes.n[k]] = -1;
    for (int32_t a = 0, from = 0; a < x.count && code == PD_OK; a++) x.n[a] = x.n[a] < 0 ? 1 : dims.n[from++];
    return code == PD_OK ? tell(s, g, &x) : code;
}

/* Removes the given axes, whose sizes must be 1. */
static int32_t squeeze(pd_sequence *s, const pd_stage *g) {
    numbers dims = dims_of(s, g), axes = numbers_of(s, g, 0), left = dims, x = {.count = 0};
    int32_t code = take_axes(s, &axes, dims.count);
    for (int32_t k = 0; k < axes.count && code == PD_OK; k++) {
        if (dims.n[axes.n[k]] != 1)
            return REFUSE(s, "such an axis has size 1", "a tensor of shape %s is squeezed along %s", show(&dims).of,
                          show(&axes).of);
        left.n[axes.n[k]] = -1;
    }
    for (int32_t a = 0; a < dims.count; a++)
        if (left.n[a] >= 0) x.n[x.count++] = left.n[a];
    return code == PD_OK ? tell(s, g, &x) : code;
}

/* Computes for every axis how many elements are added before it and cut off there, and the same after it. */
static int32_t pads(pd_sequence *s, const pd_stage *g) {
    numbers values = numbers_of(s, g, 0), axes = read_or(s, g, 1, values.count / 2, 0);
    if (values.count != 2 * axes.count)
        return REFUSE(s, "two for each axis", "pads %s along %s", show(&values).of, show(&axes).of);
    int32_t code = take_axes(s, &axes, g->dim_count);
    if (code != PD_OK) return code;
    for (int32_t k = 0; k < g->symbol_count; k++) s->values[g->symbols[k]] = 0;
    for (int32_t k = 0; k < values.count; k++) {
        int64_t v = values.n[k];
        const int64_t *to = g->symbols + 4 * axes.n[k % axes.count] + (k < axes.count ? 0 : 2);
        s->values[to[0]] = pd_max(v, 0), s->values[to[1]] = v < 0 ? -v : 0;
    }
    return PD_OK;
}

/* Computes every scaled size with the first convergent whose nearest float32 is the scale (`simplest` of
 * graph/operators/resize.py). Also stores this convergent as a fraction. */
static int32_t scales(pd_sequence *s, const pd_stage *g) {
    const pd_held *t = &s->tensors[g->inputs[0]];
    for (int32_t k = 0; k < g->dim_count; k++) {
        float x = (float)number(t, k);
        if (!(x >= 0x1p-24f && x < 0x1p24f))
            return REFUSE(s, "a scale is above 0 and below 2^24", "element %d of the scales is %.9g", k, (double)x);
        int64_t n = (int64_t)ldexp(x, 48), d = INT64_C(1) << 48, top[] = {1, 0}, low[] = {0, 1};
        if (x >= 0x1p14f) n = (int64_t)ldexp(x, 24), d = INT64_C(1) << 24;
        while (n % 2 == 0 && d % 2 == 0) n /= 2, d /= 2;
        for (int64_t rest = 1; rest;) {
            int64_t a = n / d, p = a * top[0] + top[1], q = a * low[0] + low[1];
            top[1] = top[0], low[1] = low[0], top[0] = p, low[0] = q;
            rest = n % d, n = d, d = rest;
            if (p && (float)((double)p / (double)q) == x) break;
        }
        const int64_t *to = g->symbols + 3 * k;
        s->values[to[0]] = pd_floordiv(pd_value_of(g->dims[k], s->values) * top[0], low[0]);
        s->values[to[1]] = top[0], s->values[to[2]] = low[0];
    }
    return PD_OK;
}

int32_t pd_size_step(pd_sequence *s, const pd_stage *g) {
    switch (g->kind) {
    case PD_SIZES: return sizes(s, g);
    case PD_COMMON: return common(s, g);
    case PD_COUNT: return count(s, g);
    case PD_RESHAPE: return reshape(s, g);
    case PD_BROADCAST: return broadcast(s, g);
    case PD_SLICE: return slice(s, g);
    case PD_UNSQUEEZE: return unsqueeze(s, g);
    case PD_SQUEEZE: return squeeze(s, g);
    case PD_PADS: return pads(s, g);
    default: return scales(s, g);
    }
}
