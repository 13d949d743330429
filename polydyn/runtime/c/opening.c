/* opening.c: shared by programs of one part and of several: errors, weights, input types. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include "internal.h"

#define ALIGN 64 /* alignment of weights */

/* ---- errors ---- */

static _Thread_local char error_text[1024];

int32_t pd_fail(int32_t code, const char *format, ...) {
    va_list list;
    va_start(list, format);
    vsnprintf(error_text, sizeof error_text, format, list);
    va_end(list);
    return code;
}

PD_EXPORT const char *pd_error(void) { return error_text; }
PD_EXPORT int32_t pd_abi_version(void) { return PD_ABI_VERSION; }

/* ---- weights ---- */

static int32_t map_weights(pd_program *p, const char *path, int64_t offset, int64_t bytes) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0) return pd_fail(PD_WEIGHTS, "cannot open weights %s: %s", path, strerror(errno));
    struct stat s;
    if (fstat(file, &s) || offset < 0 || bytes < 0 || offset > s.st_size || bytes > s.st_size - offset) {
        close(file);
        return pd_fail(PD_WEIGHTS, "%s is shorter than the weights that should be in it; is it truncated?", path);
    }
    int64_t before = offset % sysconf(_SC_PAGESIZE);
    p->map_bytes = (size_t)(before + bytes);
    p->map = mmap(NULL, p->map_bytes, PROT_READ, MAP_PRIVATE, file, offset - before);
    int problem = errno;
    close(file);
    if (p->map == MAP_FAILED) {
        p->map = NULL;
        return pd_fail(PD_WEIGHTS, "cannot map weights %s: %s", path, strerror(problem));
    }
    p->weights = (const char *)p->map + before;
    return PD_OK;
}

int32_t pd_find_weights(pd_program *p, const char *path, const void *memory, int64_t offset, int64_t bytes) {
    int32_t code = PD_OK;
    if (!path && !memory && bytes > 0) return pd_fail(PD_USAGE, "pd_open has neither a file nor memory with the weights");
    if (!path) p->weights = memory ? (const char *)memory + offset : NULL;
    else if (bytes) code = map_weights(p, path, offset, bytes);
    if (code == PD_OK && (uintptr_t)p->weights % ALIGN)
        code = pd_fail(PD_WEIGHTS, "weights must be aligned to %d bytes", ALIGN);
    return code;
}

void pd_unmap_weights(pd_program *p) {
    if (p->map) munmap(p->map, p->map_bytes);
    p->map = NULL;
}

/* ---- inputs ---- */

static const char *const dtype_names[] = {"float16", "bfloat16", "float32", "float64", "int8",   "int16", "int32",
                                          "int64",   "uint8",    "uint16",  "uint32",  "uint64", "bool",
                                          "float8_e4m3fn", "float8_e4m3fnuz", "float8_e5m2", "float8_e5m2fnuz",
                                          "float8_e8m0fnu", "float4_e2m1fn", "int4", "uint4", "int2", "uint2"};

int32_t pd_check_tensor(const pd_io *io, const pd_tensor *t) {
    if (t->dtype != io->dtype) {
        int known = t->dtype >= 0 && t->dtype <= PD_UINT2;
        return pd_fail(PD_INPUT, "input '%s' is %s, the program takes %s", io->name,
                       known ? dtype_names[t->dtype] : "of an unknown type", dtype_names[io->dtype]);
    }
    if (t->rank != io->rank)
        return pd_fail(PD_INPUT, "input '%s' has %d axes, the program takes %d: %s", io->name, t->rank, io->rank, io->shape);
    for (int32_t a = 0; a < t->rank; a++)
        if (t->shape[a] < 0) return pd_fail(PD_INPUT, "input '%s': axis %d is negative", io->name, a);
    return PD_OK;
}
