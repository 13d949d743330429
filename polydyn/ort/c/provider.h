/* provider.h: what the files of the provider share. docs/adr/0039-onnx-runtime.md has the design. */
#ifndef POLYDYN_ORT_PROVIDER_H
#define POLYDYN_ORT_PROVIDER_H

#include <pthread.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "graph.h"
#include "polydyn.h"

#define NAME "PolydynExecutionProvider"
#define PATH_BYTES 4352
#define KEY_BYTES 65 /* 64 hexadecimal digits and a zero */

extern const char polydyn_stamp[];   /* digest of everything but the model that determines a program (stamp.c) */
extern const char polydyn_version[]; /* of the Python package */
extern char default_python[PATH_BYTES], *default_code; /* the command of the worker, see PolydynSetDefaults */
extern int default_threads; /* 0: as many as there are cores */
extern const any_function *ep_api;

/* ---- settings.c: options of a session, paths, log ---- */

typedef struct {
    char *name, *value;
} option;

typedef struct {
    const OrtLogger *logger;
    option *options; /* those that change a program, sorted by name */
    size_t option_count;
    char python[PATH_BYTES], cache[PATH_BYTES], context_path[PATH_BYTES], model_path[PATH_BYTES];
    bool background, strict, write_context, embed_context;
    int threads;
} settings;

OrtStatus *read_settings(const OrtSessionOptions *options, const OrtLogger *logger, settings *s);
void free_settings(settings *s);
void say(const settings *s, int level, const char *format, ...) __attribute__((format(printf, 3, 4)));
/* Says a status and releases it. */
void say_status(const settings *s, int level, OrtStatus *status);
/* Writes the path of a file of the cache: <key><suffix>. */
void cache_path(const settings *s, const char *key, const char *suffix, char path[PATH_BYTES]);
bool cache_has(const settings *s, const char *key, const char *suffix); /* also records the use */
/* Computes the key of a model. `whole`: the key of the graph that the model is a part of, or "". */
void model_key(const settings *s, const message *model, const char *whole, char key[KEY_BYTES]);
/* Writes a file, then gives it its name. */
OrtStatus *write_file(const char *path, const message *content);
/* Returns the content of a file and a final zero; NULL if it cannot be read. The caller frees it. */
char *read_file(const char *path, size_t *size);

/* ---- worker.c: the process that compiles ---- */

typedef struct {
    _Atomic int socket; /* another thread may close it, see interrupt_worker */
    int log;
    pid_t pid;
} worker;
#define NO_WORKER ((worker){-1, -1, 0})

enum { CHECK, COMPILE };
/* Requests the sets of a graph (`<key>.sets`) or a program (`<key>.ep`), and waits. Starts the process if necessary. */
OrtStatus *request(const settings *s, worker *w, int task, const char *key, const char *whole);
void end_worker(worker *w);
void interrupt_worker(worker *w); /* makes a request of another thread fail soon */

/* ---- program.c: a compiled program ---- */

#define PROGRAM_FUNCTIONS(X)                                                                                           \
    X(pd_abi_version) X(pd_error) X(pd_open) X(pd_close) X(pd_inputs) X(pd_outputs) X(pd_weight_bytes)                 \
    X(pd_context_new) X(pd_context_free) X(pd_shapes) X(pd_run) X(pd_result) X(pd_borrow_threads)

typedef struct program program;
struct program {
#define MEMBER(name) __typeof__(&name) name;
    PROGRAM_FUNCTIONS(MEMBER)
#undef MEMBER
    void *library;
    int library_file, file;
    pd_program *program;
    const pd_io *inputs, *outputs;
    int32_t input_count, output_count;
    program *lender; /* whose threads the program uses */
    int uses;
    bool has_parts; /* several parts: it may reject a call when some of them have run */
};

/* Opens a program file. */
OrtStatus *open_program(const char *path, program **out);
/* Opens the content of a program file. */
OrtStatus *open_program_bytes(const char *data, size_t size, program **out);
void borrow_threads(program *p, program *lender); /* neither may be running */
void close_program(program *p);
size_t dtype_bytes(int32_t dtype);
int32_t dtype_of(int ort_type); /* -1: no dtype of programs */

/* ---- unit.c: a fused node; inner.c: its graph on ONNX Runtime's kernels ---- */

/* Memory of one call at a time. */
typedef struct call_state call_state;
struct call_state {
    pd_context *context;
    pd_tensor *tensors;
    const void **from;
    void **to;
    int64_t *shapes, *dims;
    void **own; /* memory of outputs for programs of several parts */
    call_state *next;
};

typedef struct {
    OrtNodeComputeInfo table;
    const settings *s;
    char key[KEY_BYTES], whole[KEY_BYTES];
    char **input_names, **output_names;
    size_t input_count, output_count;
    program *_Atomic program;     /* NULL: not compiled yet, or never */
    size_t *input_at, *output_at; /* positions of the program's inputs and outputs among the node's */
    pthread_mutex_t lock;         /* guards idle */
    call_state *idle;
    int model_file;               /* the node's graph as a model; -1: there is none */
    OrtSession *inner;            /* guarded by inner_lock */
    pthread_rwlock_t inner_lock;
    pthread_t thread;             /* compiles in the background */
    bool has_thread, unchecked;   /* unchecked: the node was claimed before its graph was checked */
    _Atomic bool closing, said_refusal;
    worker compiler;              /* of the thread */
    _Atomic long inner_calls;
} unit;

OrtStatus *new_unit(const settings *s, const OrtNode *fused, unit **out);
OrtStatus *adopt_program(unit *u, program *p); /* takes over the program, also if it fails */
OrtStatus *load_program(unit *u);              /* adopts the stored program */
void free_unit(unit *u);

OrtStatus *open_model(unit *u); /* opens the stored model, which the inner session needs */
OrtStatus *make_inner(unit *u, bool with_polydyn);
OrtStatus *run_inner(unit *u, OrtKernelContext *call);
void drop_inner(unit *u);
void free_inner(unit *u);
OrtStatus *compile_behind(unit *u); /* makes the inner session, and compiles in a thread */
void end_behind(unit *u);

/* ---- context.c: EPContext models ---- */

OrtStatus *is_context_node(const OrtNode *node, bool *yes);
OrtStatus *load_context(const OrtGraph *graph, const OrtNode *node, unit *u);
OrtStatus *make_context_node(const unit *u, const OrtNode *fused, size_t number, OrtNode **out);
const char *compatibility_text(void);

/* ---- sets.c: which nodes are compiled ---- */

typedef struct {
    OrtEp table;
    settings s;
    worker compiler;
    char whole[KEY_BYTES]; /* key of the graph */
    bool one_set;          /* whether the only set has all nodes of the graph, so that its key is the graph's */
    bool unchecked;        /* whether the nodes were claimed before the graph was checked */
    OrtStatus *error;      /* of the check, returned when the nodes are compiled */
} provider;

/* Stores the model of a graph if the compiling process or an inner session may need it. */
OrtStatus *store_model(const settings *s, const message *model, const char *key);
/* Reads <key>.sets. Returns the set of every node, -1 for one that is left to ONNX Runtime; NULL if the file is absent
 * or damaged; the results are unchanged then. The caller frees it. */
int *read_sets(const settings *s, const char *key, size_t *nodes, int *sets, size_t *left);
OrtStatus *get_capability(OrtEp *ep, const OrtGraph *graph, OrtEpGraphSupportInfo *support);

#endif
