/* program.c: opens a program file, which polydyn/ort/program_file.py writes.
 *
 * The first page is text: lines `name values`. The library and the weights follow at multiples of 4096 bytes. The
 * library is copied to memory and opened there, so that a folder without the right of execution will do; the weights
 * are mapped from the file.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/utsname.h>
#include <unistd.h>

#include "provider.h"

enum { PAGE = 4096 };

static const int8_t DTYPES[] = {-1, PD_FLOAT32, PD_UINT8, PD_INT8, PD_UINT16, PD_INT16, PD_INT32, PD_INT64, -1, PD_BOOL,
                                PD_FLOAT16, PD_FLOAT64, PD_UINT32, PD_UINT64, -1, -1, PD_BFLOAT16, PD_FLOAT8_E4M3FN,
                                PD_FLOAT8_E4M3FNUZ, PD_FLOAT8_E5M2, PD_FLOAT8_E5M2FNUZ};

int32_t dtype_of(int ort_type) {
    return ort_type >= 0 && ort_type < (int)sizeof DTYPES ? DTYPES[ort_type] : -1;
}

size_t dtype_bytes(int32_t dtype) {
    static const uint8_t BYTES[] = {2, 2, 4, 8, 1, 2, 4, 8, 1, 2, 4, 8};
    return dtype >= 0 && dtype < (int32_t)sizeof BYTES ? BYTES[dtype] : 1;
}

typedef struct {
    long abi, library_at, library_bytes, weights_at, weights_bytes;
    unsigned long check;
    char architecture[32], features[3000];
    int parts;
} header;

static bool read_header(const char page[PAGE + 1], header *h) {
    *h = (header){0};
    return sscanf(page,
                  "polydyn-ep 1\nabi %ld\narchitecture %31s\nlibrary %ld %ld %lx\nweights %ld %ld\nfeatures %2999[^\n]"
                  "\nparts %d",
                  &h->abi, h->architecture, &h->library_at, &h->library_bytes, &h->check, &h->weights_at,
                  &h->weights_bytes, h->features, &h->parts) == 9;
}

/* Returns the first of `features` (words with commas between) that this processor lacks; NULL if there is none. */
static const char *missing_feature(char *features) {
    size_t size = 0, room = 0;
    OWNED char *line = NULL;
    FILE *f = fopen("/proc/cpuinfo", "re");
    if (!f) return NULL;
    while (!size && getline(&line, &room, f) >= 0)
        if (!strncmp(line, "flags", 5) || !strncmp(line, "Features", 8)) size = strlen(line);
    fclose(f);
    if (!size) return NULL;
    char *rest;
    for (char *at = strtok_r(features, ",", &rest); at; at = strtok_r(NULL, ",", &rest)) {
        size_t n = strlen(at);
        const char *found = line;
        while ((found = strstr(found, at)) && !(strchr(" \t:", found[-1]) && strchr(" \t\n", found[n]))) found += n;
        if (!found) return at;
    }
    return NULL;
}

static uint32_t crc32_table[256];

static void fill_crc32_table(void) {
    for (uint32_t k = 0; k < 256; k++) {
        uint32_t c = k;
        for (int bit = 0; bit < 8; bit++) c = c & 1 ? c >> 1 ^ 0xedb88320u : c >> 1;
        crc32_table[k] = c;
    }
}

static uint32_t crc32_of(const uint8_t *data, size_t size) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    uint32_t sum = ~0u;
    pthread_once(&once, fill_crc32_table);
    for (size_t k = 0; k < size; k++) sum = crc32_table[(sum ^ data[k]) & 255] ^ sum >> 8;
    return ~sum;
}

/* Returns whether a part is within a file of `size` bytes, after its first page. */
static bool is_inside(long offset, long bytes, off_t size) {
    return offset >= PAGE && offset <= size && bytes >= 0 && bytes <= size - offset;
}

static OrtStatus *check_header(const char *path, header *h, off_t size) {
    struct utsname machine;
    if (h->abi != PD_ABI_VERSION)
        return failure(ORT_EP_FAIL, "polydyn: %s is for version %ld of the C interface, not %d\n  remedy: compile the "
                       "model again with this version of polydyn", path, h->abi, PD_ABI_VERSION);
    if (!uname(&machine) && strcmp(machine.machine, h->architecture))
        return failure(ORT_EP_FAIL, "polydyn: %s is for %s, this is %s\n  remedy: compile the model for this machine",
                       path, h->architecture, machine.machine);
    if (!is_inside(h->library_at, h->library_bytes, size) || !is_inside(h->weights_at, h->weights_bytes, size)) return failure(ORT_EP_FAIL, "polydyn: %s is cut off\n  remedy: compile the model again", path);
    const char *missing = strcmp(h->features, "-") ? missing_feature(h->features) : NULL;
    if (missing)
        return failure(ORT_EP_FAIL, "polydyn: the program %s uses processor features that are missing here: %s\n  "
                       "remedy: compile it for another target, such as cpu:avx2", path, missing);
    return NULL;
}

/* Copies the library into memory and checks it. */
static OrtStatus *copy_library(const char *path, int file, const header *h, int *copy) {
    OWNED uint8_t *data = malloc((size_t)h->library_bytes + 1);
    if (!data) return failure(ORT_FAIL, "polydyn: out of memory");
    if (pread(file, data, (size_t)h->library_bytes, h->library_at) != h->library_bytes)
        return failure(ORT_EP_FAIL, "polydyn: cannot read %s", path);
    if (crc32_of(data, (size_t)h->library_bytes) != h->check)
        return failure(ORT_EP_FAIL, "polydyn: %s is damaged\n  remedy: compile the model again", path);
    *copy = memfd_create("polydyn", MFD_CLOEXEC);
    for (long at = 0; *copy >= 0 && at < h->library_bytes;) {
        ssize_t n = write(*copy, data + at, (size_t)(h->library_bytes - at));
        if (n <= 0) return failure(ORT_EP_FAIL, "polydyn: no memory for the library of %s", path);
        at += n;
    }
    return *copy < 0 ? failure(ORT_EP_FAIL, "polydyn: no memory for the library of %s", path) : NULL;
}

static OrtStatus *load_library(program *p, const char *path) {
    char name[64];
    snprintf(name, sizeof name, "/proc/self/fd/%d", p->library_file);
    p->library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
    if (!p->library) return failure(ORT_EP_FAIL, "polydyn: %s: %s", path, dlerror());
#define LOAD(function)                                                                                                 \
    p->function = (__typeof__(&function))dlsym(p->library, #function);                                                 \
    if (!p->function) return failure(ORT_EP_FAIL, "polydyn: the library of %s has no %s", path, #function);
    PROGRAM_FUNCTIONS(LOAD)
#undef LOAD
    return NULL;
}

/* `path` names the file in errors. */
static OrtStatus *open_file(program *p, const char *path) {
    char page[PAGE + 1] = "", name[64];
    header h;
    struct stat st;
    if (pread(p->file, page, PAGE, 0) < PAGE || fstat(p->file, &st) || !read_header(page, &h))
        return failure(ORT_EP_FAIL, "polydyn: %s is not a program of the provider\n  remedy: compile the model again",
                       path);
    TRY(check_header(path, &h, st.st_size));
    p->has_parts = h.parts;
    TRY(copy_library(path, p->file, &h, &p->library_file));
    TRY(load_library(p, path));
    snprintf(name, sizeof name, "/proc/self/fd/%d", p->file);
    if (p->pd_open(name, NULL, h.weights_at, p->pd_weight_bytes(NULL), &p->program)) {
        p->program = NULL;
        return failure(ORT_EP_FAIL, "polydyn: %s: %s", path, p->pd_error());
    }
    p->inputs = p->pd_inputs(p->program, &p->input_count);
    p->outputs = p->pd_outputs(p->program, &p->output_count);
    return NULL;
}

static OrtStatus *open_with(int file, const char *path, program **out) {
    program *p = calloc(1, sizeof *p);
    if (!p) {
        close(file);
        return failure(ORT_FAIL, "polydyn: out of memory");
    }
    p->file = file;
    p->library_file = -1;
    p->uses = 1;
    OrtStatus *bad = open_file(p, path);
    if (bad) close_program(p);
    else *out = p;
    return bad;
}

OrtStatus *open_program(const char *path, program **out) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return failure(ORT_EP_FAIL, "polydyn: cannot read %s: %s\n  remedy: keep the program next to its model", path,
                       strerror(errno));
    return open_with(file, path, out);
}

OrtStatus *open_program_bytes(const char *data, size_t size, program **out) {
    int file = memfd_create("polydyn-program", MFD_CLOEXEC);
    MESSAGE content = {0};
    content.references = malloc(sizeof *content.references);
    if (file < 0 || !content.references) {
        if (file >= 0) close(file);
        return failure(ORT_FAIL, "polydyn: out of memory");
    }
    content.references[content.reference_count++] = (reference){0, size, data};
    if (message_write(&content, file)) {
        close(file);
        return failure(ORT_FAIL, "polydyn: out of memory");
    }
    return open_with(file, "the program in the model", out);
}

void borrow_threads(program *p, program *lender) {
    p->pd_borrow_threads(p->program, lender->program);
    p->lender = lender;
    lender->uses++;
}

void close_program(program *p) {
    if (!p || --p->uses) return;
    if (p->program) p->pd_close(p->program);
    if (p->library) dlclose(p->library);
    if (p->library_file >= 0) close(p->library_file);
    if (p->file >= 0) close(p->file);
    close_program(p->lender); /* after the programs that used its threads */
    free(p);
}
