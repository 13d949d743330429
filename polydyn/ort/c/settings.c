/* settings.c: options of a session, paths of the cache, the log. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "provider.h"

#define PREFIX "ep.polydynexecutionprovider."

/* ---- the log ---- */

static void log_text(const settings *s, int level, const char *text) {
    if (!s->logger) return;
    OrtStatus *bad = ORT(Logger_LogMessage)(s->logger, level, text, "polydyn", 0, "polydyn");
    if (bad) ORT(ReleaseStatus)(bad);
}

void say(const settings *s, int level, const char *format, ...) {
    char text[4096];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    log_text(s, level, text);
}

void say_status(const settings *s, int level, OrtStatus *status) {
    if (!status) return;
    log_text(s, level, ORT(GetErrorMessage)(status));
    ORT(ReleaseStatus)(status);
}

/* ---- options ---- */

static bool is_yes(const char *value) { return !strcmp(value, "1") || !strcasecmp(value, "true"); }
static bool is_no(const char *value) { return !strcmp(value, "0") || !strcasecmp(value, "false"); }

static OrtStatus *copy_text(char *to, size_t room, const char *name, const char *value) {
    size_t size = strlen(value) + 1;
    if (size > room) return failure(ORT_INVALID_ARGUMENT, "polydyn: the option %s is too long", name);
    memcpy(to, value, size);
    return NULL;
}

static bool changes_programs(const char *name) {
    static const char *const NAMES[] = {"exclude", "min_nodes", "records", "schedules", "strategy", "without", "tf32",
                                        "precision", "winograd", "target"};
    if (!strncmp(name, "dim.", 4) && name[4]) return true;
    for (size_t k = 0; k < sizeof NAMES / sizeof *NAMES; k++)
        if (!strcmp(name, NAMES[k])) return true;
    return false;
}

static OrtStatus *add_option(settings *s, const char *name, const char *value) {
    if (strchr(value, '\n') || strchr(name, '\n'))
        return failure(ORT_INVALID_ARGUMENT, "polydyn: the option %s has a line break", name);
    option *larger = realloc(s->options, (s->option_count + 1) * sizeof *larger);
    if (!larger) return failure(ORT_FAIL, "polydyn: out of memory");
    s->options = larger;
    option o = {strdup(name), strdup(value)};
    if (!o.name || !o.value) {
        free(o.name);
        free(o.value);
        return failure(ORT_FAIL, "polydyn: out of memory");
    }
    s->options[s->option_count++] = o;
    return NULL;
}

static OrtStatus *read_option(settings *s, const char *name, const char *value) {
    if (!strcmp(name, "compile")) {
        s->background = !strcmp(value, "background");
        if (!s->background && strcmp(value, "wait"))
            return failure(ORT_INVALID_ARGUMENT, "polydyn: compile is '%s'\n  remedy: wait or background", value);
    } else if (!strcmp(name, "strict")) {
        s->strict = is_yes(value);
        if (!s->strict && !is_no(value))
            return failure(ORT_INVALID_ARGUMENT, "polydyn: strict is '%s'\n  remedy: 1 or 0", value);
    } else if (!strcmp(name, "threads")) {
        char *end;
        long n = strtol(value, &end, 10);
        if (*end || n < 1 || n > PD_MAX_THREADS)
            return failure(ORT_INVALID_ARGUMENT, "polydyn: threads is '%s'\n  remedy: 1 to %d", value,
                           PD_MAX_THREADS);
        s->threads = (int)n;
    } else if (!strcmp(name, "python")) {
        return copy_text(s->python, sizeof s->python, name, value);
    } else if (!strcmp(name, "cache_dir")) {
        return copy_text(s->cache, sizeof s->cache - 128, name, value);
    } else if (changes_programs(name)) {
        return add_option(s, name, value);
    } else {
        return failure(ORT_INVALID_ARGUMENT,
                       "polydyn: there is no option %s\n  remedy: compile, strict, threads, python, cache_dir, exclude,"
                       " min_nodes, dim.NAME, records, schedules, strategy, without, tf32, precision, winograd, target",
                       name);
    }
    return NULL;
}

static void set_defaults(settings *s) {
    const char *chosen = getenv("POLYDYN_CACHE"), *caches = getenv("XDG_CACHE_HOME"), *home = getenv("HOME");
    const char *python = getenv("POLYDYN_ORT_PYTHON");
    size_t room = sizeof s->cache - 128;
    if (chosen && *chosen) snprintf(s->cache, room, "%s/ort", chosen);
    else if (caches && *caches) snprintf(s->cache, room, "%s/polydyn/ort", caches);
    else snprintf(s->cache, room, "%s/.cache/polydyn/ort", home ? home : "");
    if (!python || !*python) python = *default_python ? default_python : "python3";
    snprintf(s->python, sizeof s->python, "%s", python);
    cpu_set_t cores;
    if (default_threads) s->threads = default_threads;
    else s->threads = sched_getaffinity(0, sizeof cores, &cores) ? 1 : CPU_COUNT(&cores);
    if (s->threads > PD_MAX_THREADS) s->threads = PD_MAX_THREADS;
}

static int compare_options(const void *a, const void *b) {
    return strcmp(((const option *)a)->name, ((const option *)b)->name);
}

OrtStatus *read_settings(const OrtSessionOptions *options, const OrtLogger *logger, settings *s) {
    OrtKeyValuePairs *pairs;
    const char *const *keys, *const *values;
    size_t count;
    OrtStatus *bad = NULL;
    *s = (settings){.logger = logger};
    set_defaults(s);
    TRY(ORT(GetSessionOptionsConfigEntries)(options, &pairs));
    ORT(GetKeyValuePairs)(pairs, &keys, &values, &count);
    for (size_t k = 0; k < count && !bad; k++) {
        if (!strncmp(keys[k], PREFIX, strlen(PREFIX))) bad = read_option(s, keys[k] + strlen(PREFIX), values[k]);
        else if (!strcmp(keys[k], "ep.context_enable")) s->write_context = is_yes(values[k]);
        else if (!strcmp(keys[k], "ep.context_embed_mode")) s->embed_context = is_yes(values[k]);
        else if (!strcmp(keys[k], "ep.context_file_path"))
            bad = copy_text(s->context_path, sizeof s->context_path, keys[k], values[k]);
    }
    ORT(ReleaseKeyValuePairs)(pairs);
    if (s->option_count) qsort(s->options, s->option_count, sizeof *s->options, compare_options);
    if (s->write_context) s->background = false; /* the context model needs the programs */
    return bad;
}

void free_settings(settings *s) {
    for (size_t k = 0; k < s->option_count; k++) {
        free(s->options[k].name);
        free(s->options[k].value);
    }
    free(s->options);
    s->options = NULL;
    s->option_count = 0;
}

/* ---- files ---- */

void cache_path(const settings *s, const char *key, const char *suffix, char path[PATH_BYTES]) {
    snprintf(path, PATH_BYTES, "%.4200s/%s%s", s->cache, key, suffix);
}

bool cache_has(const settings *s, const char *key, const char *suffix) {
    char path[PATH_BYTES];
    cache_path(s, key, suffix, path);
    if (access(path, R_OK)) return false;
    utimensat(AT_FDCWD, path, NULL, 0); /* the least recently used files are removed first */
    return true;
}

void model_key(const settings *s, const message *model, const char *whole, char key[KEY_BYTES]) {
    hasher h;
    hash_begin(&h);
    hash_text(&h, polydyn_stamp);
    hash_text(&h, whole);
    for (size_t k = 0; k < s->option_count; k++) {
        hash_text(&h, s->options[k].name);
        hash_text(&h, s->options[k].value);
    }
    hash_text(&h, "");
    hash_message(&h, model);
    hash_end(&h, key);
}

/* Creates the folder of a file, for this user alone, and the folders above it. */
static void make_folder(const char *path) {
    char folder[PATH_BYTES];
    snprintf(folder, sizeof folder, "%s", path);
    for (char *at = folder + 1; *at; at++) {
        if (*at != '/') continue;
        *at = 0;
        mkdir(folder, 0700);
        *at = '/';
    }
}

OrtStatus *write_file(const char *path, const message *content) {
    char temporary[PATH_BYTES];
    static _Atomic unsigned count;
    const char *name = strrchr(path, '/');
    int folder = name ? (int)(name - path) : 0;
    make_folder(path);
    snprintf(temporary, sizeof temporary, "%.*s/.%s.%d_%u", folder, path, name ? name + 1 : path, (int)getpid(),
             atomic_fetch_add(&count, 1));
    int file = open(temporary, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0600);
    int problem = file < 0 ? errno : message_write(content, file);
    if (file >= 0 && close(file) && !problem) problem = errno;
    if (!problem && rename(temporary, path)) problem = errno;
    if (!problem) return NULL;
    if (file >= 0) unlink(temporary);
    return failure(ORT_EP_FAIL, "polydyn: cannot write %s: %s\n  remedy: set POLYDYN_CACHE or the option cache_dir to "
                   "a writable folder with free space", path, strerror(problem));
}

char *read_file(const char *path, size_t *size) {
    int file = open(path, O_RDONLY | O_CLOEXEC);
    struct stat st;
    char *data = NULL;
    *size = 0;
    if (file < 0) return NULL;
    if (!fstat(file, &st) && (data = malloc((size_t)st.st_size + 1))) {
        while (*size < (size_t)st.st_size) {
            ssize_t n = read(file, data + *size, (size_t)st.st_size - *size);
            if (n < 0 && errno == EINTR) continue;
            if (n <= 0) break;
            *size += (size_t)n;
        }
        data[*size] = 0;
    }
    close(file);
    return data;
}
