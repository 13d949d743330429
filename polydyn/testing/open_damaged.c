/* open_damaged FILE: opens the weights of a damaged program at many places, from the file and from memory. Every call
 * of pd_open must succeed or return an error. Built with a program's sources and sanitizers (damage_artifacts.py). */
#include <stdio.h>
#include <stdlib.h>

#include "polydyn.h"

static void use(const char *path, const void *memory, int64_t offset, int64_t bytes) {
    pd_program *program = NULL;
    pd_context *context;
    if (pd_open(path, memory, offset, bytes, &program)) {
        if (!pd_error() || !*pd_error()) abort();
        return;
    }
    (void)pd_verify_weights(program);
    if (!pd_context_new(program, 1, &context)) pd_context_free(context);
    pd_close(program);
}

int main(int count, char **arguments) {
    if (count != 2) return 1;
    const int64_t need = pd_weight_bytes(NULL);
    const int64_t offsets[] = {4096, 0, 1, 64, 8192, -1, -4096, INT64_MAX, INT64_MIN, INT64_MAX - 4095};
    const int64_t sizes[] = {need, need + 64, need - 1, 0, -1, INT64_MAX, INT64_MIN};
    for (size_t i = 0; i < sizeof offsets / sizeof *offsets; i++)
        for (size_t k = 0; k < sizeof sizes / sizeof *sizes; k++)
            use(arguments[1], NULL, offsets[i], sizes[k]);
    FILE *file = fopen(arguments[1], "rb");
    if (!file) return 1;
    fseek(file, 0, SEEK_END);
    const int64_t length = ftell(file);
    rewind(file);
    for (int64_t start = 4096; start >= 0; start -= 4096) {
        const int64_t size = length - start;
        if (size <= 0) continue;
        char *memory = aligned_alloc(64, (size_t)((size + 63) / 64 * 64)); /* addresses past it are poisoned */
        fseek(file, start, SEEK_SET);
        if (!memory || fread(memory, 1, (size_t)size, file) != (size_t)size) return 1;
        use(NULL, memory, 0, size);
        use(NULL, memory + 1, 0, size - 1);
        free(memory);
    }
    fclose(file);
    return 0;
}
