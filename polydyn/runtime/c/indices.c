/* indices.c: checks that integers used as subscripts are within the axis they index. */
#include "internal.h"

/* One branch-free pass, which is the whole cost of a correct call. Only a failing call searches for the position. */
#define SIGNED(type)                                                                                                  \
    {                                                                                                                 \
        const type *p = data;                                                                                         \
        int bad = 0;                                                                                                  \
        for (int64_t i = first; i < count; i += step) bad |= (p[i] < low) | (p[i] >= high);                           \
        if (!bad) return -1;                                                                                          \
        int64_t i = first;                                                                                            \
        while (p[i] >= low && p[i] < high) i += step;                                                               \
        *found = p[i];                                                                                                \
        return i;                                                                                                     \
    }

#define UNSIGNED(type)                                                                                                \
    {                                                                                                                 \
        const type *p = data;                                                                                         \
        for (int64_t i = first; i < count; i += step)                                                                 \
            if (high <= 0 || p[i] >= (uint64_t)high || (low > 0 && p[i] < (uint64_t)low)) {                              \
                *found = (uint64_t)p[i] > INT64_MAX ? INT64_MAX : (int64_t)p[i];                                      \
                return i;                                                                                             \
            }                                                                                                         \
        return -1;                                                                                                    \
    }

int64_t pd_outside(const void *data, int64_t first, int64_t count, int64_t step, int32_t dtype, int64_t low, int64_t high,
                   int64_t *found) {
    switch (dtype) {
    case PD_INT8: SIGNED(int8_t)
    case PD_INT16: SIGNED(int16_t)
    case PD_INT32: SIGNED(int32_t)
    case PD_INT64: SIGNED(int64_t)
    case PD_UINT8: UNSIGNED(uint8_t)
    case PD_UINT16: UNSIGNED(uint16_t)
    case PD_UINT32: UNSIGNED(uint32_t)
    default: UNSIGNED(uint64_t)
    }
}
