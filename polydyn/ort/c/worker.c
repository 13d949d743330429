/* worker.c: the process that compiles, `python -c "from polydyn.ort.worker import main; main()"`.
 *
 * It reads requests from a socket, its standard input, and answers each with one line: "ok", "failed <text>" or "wrong
 * <text>" for a wrong option. A carriage return in a text is a line break. It ends
 * when the socket is closed, so also when this process ends. Its exit code is not used, because a program may ignore
 * SIGCHLD. Results are files of the cache.
 */
#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <spawn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "provider.h"

enum { END_SECONDS = 5, MAX_ANSWER = 8192 };

extern char **environ;
char default_python[PATH_BYTES], *default_code;
int default_threads;

__attribute__((visibility("default"))) void PolydynSetDefaults(const char *python, const char *code, int threads) {
    char *copy = code ? strdup(code) : NULL;
    snprintf(default_python, sizeof default_python, "%s", python);
    free(default_code);
    default_code = copy;
    default_threads = threads;
}

static OrtStatus *start(const settings *s, worker *w) {
    int ends[2];
    const char *code = default_code ? default_code : "from polydyn.ort.worker import main; main()";
    const char *arguments[] = {s->python, "-c", code, NULL};
    if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, ends))
        return failure(ORT_EP_FAIL, "polydyn: no socket for the compiling process: %s", strerror(errno));
    w->log = memfd_create("polydyn-log", MFD_CLOEXEC);
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_adddup2(&actions, ends[1], 0);
    posix_spawn_file_actions_adddup2(&actions, w->log, 1);
    posix_spawn_file_actions_adddup2(&actions, w->log, 2);
    int problem = posix_spawnp(&w->pid, s->python, &actions, NULL, (char **)arguments, environ);
    posix_spawn_file_actions_destroy(&actions);
    close(ends[1]);
    w->socket = ends[0];
    if (!problem) return NULL;
    w->pid = 0;
    end_worker(w);
    return failure(ORT_EP_FAIL, "polydyn: cannot start %s: %s\n  remedy: set the option python, or POLYDYN_ORT_PYTHON, "
                   "to a Python in which polydyn is installed", s->python, strerror(problem));
}

static bool send_text(int socket, const char *text) {
    size_t size = strlen(text);
    while (size) {
        ssize_t n = send(socket, text, size, MSG_NOSIGNAL);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        text += n;
        size -= (size_t)n;
    }
    return true;
}

/* Reads a line; the rest of one that is too long is dropped. */
static bool receive_line(int socket, char text[MAX_ANSWER]) {
    for (size_t size = 0;;) {
        char c;
        ssize_t n = recv(socket, &c, 1, 0);
        if (n < 0 && errno == EINTR) continue;
        if (n <= 0) return false;
        if (c == '\n') {
            text[size] = 0;
            return true;
        }
        if (size < MAX_ANSWER - 1) text[size++] = c;
    }
}

/* Writes a request: lines `name=value`, then an empty line. */
static char *request_text(const settings *s, int task, const char *key, const char *whole) {
    char *text = NULL, path[PATH_BYTES];
    size_t size;
    FILE *f = open_memstream(&text, &size);
    if (!f) return NULL;
    cache_path(s, key, "", path);
    fprintf(f, "task=%s\npath=%s\nnice=%d\n", task == CHECK ? "check" : "compile", path, s->background);
    if (*whole) {
        cache_path(s, whole, "", path);
        fprintf(f, "whole=%s\n", path);
    }
    for (size_t k = 0; k < s->option_count; k++) fprintf(f, "option.%s=%s\n", s->options[k].name, s->options[k].value);
    fputc('\n', f);
    if (!fclose(f)) return text;
    free(text);
    return NULL;
}

/* Returns the last words of a process that ended without an answer. */
static OrtStatus *died(const settings *s, worker *w) {
    char text[1500];
    off_t size = w->log < 0 ? 0 : lseek(w->log, 0, SEEK_END), from = size > 1400 ? size - 1400 : 0;
    ssize_t n = size > 0 ? pread(w->log, text, (size_t)(size - from), from) : 0;
    text[n > 0 ? n : 0] = 0;
    end_worker(w);
    return failure(ORT_EP_FAIL, "polydyn: the compiling process ended without an answer. %s\n  remedy: try %s -c "
                   "'import polydyn'; the option python chooses another Python", text, s->python);
}

OrtStatus *request(const settings *s, worker *w, int task, const char *key, const char *whole) {
    if (w->socket < 0) TRY(start(s, w));
    OWNED char *text = request_text(s, task, key, whole);
    char answer[MAX_ANSWER];
    if (!text) return failure(ORT_FAIL, "polydyn: out of memory");
    if (!send_text(w->socket, text) || !receive_line(w->socket, answer)) return died(s, w);
    if (!strcmp(answer, "ok")) return NULL;
    for (char *at = answer; *at; at++)
        if (*at == '\r') *at = '\n'; /* line breaks of the text */
    if (!strncmp(answer, "wrong ", 6)) return failure(ORT_INVALID_ARGUMENT, "polydyn: %s", answer + 6);
    return failure(ORT_EP_FAIL, "polydyn: %s", strncmp(answer, "failed ", 7) ? answer : answer + 7);
}

void interrupt_worker(worker *w) {
    if (w->socket >= 0) shutdown(w->socket, SHUT_RDWR);
}

void end_worker(worker *w) {
    if (w->socket >= 0) close(w->socket);
    if (w->log >= 0) close(w->log);
    for (int waited = 0; w->pid > 0; waited++) {
        pid_t ended = waitpid(w->pid, NULL, WNOHANG);
        if (ended == w->pid || (ended < 0 && errno != EINTR)) break; /* ECHILD: the program ignores SIGCHLD */
        if (waited == END_SECONDS * 500) kill(w->pid, SIGKILL);
        nanosleep(&(struct timespec){0, 2000000}, NULL);
    }
    *w = NO_WORKER;
}
