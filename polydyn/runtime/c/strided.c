/* strided.c: arrays with arbitrary strides. */
#include <string.h>

#include "internal.h"

const int64_t pd_item_bytes[] = {2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1};

int pd_dense_strides(int32_t rank, const int64_t *dims, int64_t item, int64_t *strides) {
    for (int32_t a = rank; a-- > 0;) {
        strides[a] = item;
        if (__builtin_mul_overflow(item, dims[a], &item)) return 1;
    }
    return 0;
}

int pd_usable(const pd_io *io, const int64_t *dims, const int64_t *strides, const int64_t *dense) {
    int64_t item = pd_item_bytes[io->dtype];
    int fits = 1, empty = 0;
    for (int32_t a = 0; a < io->rank; a++) {
        int right = a < io->strided ? strides[a] > 0 && strides[a] % item == 0 : strides[a] == dense[a];
        fits &= dims[a] == 1 || right;
        empty |= dims[a] == 0;
    }
    return fits || empty;
}

int64_t pd_dense_bytes(const pd_io *io, const int64_t *dims) {
    int64_t bytes = pd_item_bytes[io->dtype];
    for (int32_t a = 0; a < io->rank; a++) bytes *= dims[a];
    return bytes;
}

int32_t pd_differing_axis(int32_t rank, const int64_t *dims, const int64_t *a, const int64_t *b) {
    for (int32_t axis = 0; axis < rank; axis++)
        if (dims[axis] > 1 && a[axis] != b[axis]) return axis;
    return -1;
}

int32_t pd_first_axis(const pd_io *ios, int32_t i) {
    int32_t first = 0;
    while (i-- > 0) first += ios[i].rank;
    return first;
}

static void copy_row(char *to, const char *from, int64_t count, int64_t stride, int64_t item) {
    if (stride == item) {
        memcpy(to, from, (size_t)(count * item));
        return;
    }
#define ROW(type)                                                                                                     \
    for (int64_t k = 0; k < count; k++) memcpy(to + k * (int64_t)sizeof(type), from + k * stride, sizeof(type))
    switch (item) {
    case 1: ROW(uint8_t); break;
    case 2: ROW(uint16_t); break;
    case 4: ROW(uint32_t); break;
    default: ROW(uint64_t); break;
    }
#undef ROW
}

void pd_copy_strided(char *to, const char *from, int32_t rank, const int64_t *dims, const int64_t *strides,
                     int64_t item) {
    int64_t at[PD_MAX_RANK] = {0}, last = rank - 1; /* rank >= 1: a scalar is dense */
    for (;;) {
        copy_row(to, from, dims[last], strides[last], item);
        to += dims[last] * item;
        int64_t a = last - 1;
        for (; a >= 0; a--) {
            from += strides[a];
            if (++at[a] < dims[a]) break;
            from -= at[a] * strides[a];
            at[a] = 0;
        }
        if (a < 0) return;
    }
}
