/* sets.c: decides which nodes are compiled. Each set of nodes becomes one node of ONNX Runtime's graph. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "provider.h"

enum { MAX_MODEL_BYTES = 2000000000, MAX_REASONS = 5 };

static OrtStatus *claim(OrtEpGraphSupportInfo *support, const OrtNode *const *nodes, size_t count) {
    const OrtNodeFusionOptions options = {ORT_API, true}; /* programs hold the constants */
    FnEpGraphSupportInfo_AddNodesToFuse add =
        (FnEpGraphSupportInfo_AddNodesToFuse)ep_api[AtEpGraphSupportInfo_AddNodesToFuse];
    return add(support, nodes, count, &options);
}

int *read_sets(const settings *s, const char *key, size_t *nodes, int *sets, size_t *left) {
    char path[PATH_BYTES];
    size_t size, count, others;
    int offset = 0, made;
    cache_path(s, key, ".sets", path);
    OWNED char *text = read_file(path, &size);
    if (!text || sscanf(text, "polydyn-sets 1 %zu %d %zu\n%n", &count, &made, &others, &offset) != 3) return NULL;
    if (count > size) return NULL; /* each number has a digit */
    int *of = calloc(count + 1, sizeof *of);
    char *at = text + offset;
    for (size_t k = 0; of && k < count; k++) {
        char *end;
        long set = strtol(at, &end, 10);
        if (end == at || set < -1 || set >= made) {
            free(of);
            return NULL;
        }
        of[k] = (int)set;
        at = end;
    }
    if (of) *nodes = count, *sets = made, *left = others;
    return of;
}

/* Logs the reasons why nodes are left to ONNX Runtime. */
static void say_left(const settings *s, const char *key, size_t left, size_t nodes, int sets) {
    char path[PATH_BYTES];
    size_t size;
    if (!left) {
        say(s, LOG_INFO, "polydyn: computes all %zu nodes", nodes);
        return;
    }
    cache_path(s, key, ".sets", path);
    OWNED char *text = read_file(path, &size);
    say(s, LOG_WARNING, "polydyn: computes %zu of %zu nodes, in %d sets; ONNX Runtime computes the others",
        nodes - left, nodes, sets);
    char *at = text ? strstr(text, "\nleft ") : NULL;
    for (int k = 0; at && k < MAX_REASONS; k++) {
        char *line = at + 6, *end = strchr(line, '\n');
        say(s, LOG_WARNING, "polydyn: left to ONNX Runtime: %.*s", end ? (int)(end - line) : (int)strlen(line), line);
        at = end ? strstr(end, "\nleft ") : NULL;
    }
}

/* Claims the nodes of programs in the graph. *found: there are any. */
static OrtStatus *claim_contexts(const OrtNode *const *nodes, size_t count, OrtEpGraphSupportInfo *support,
                                 bool *found) {
    *found = false;
    for (size_t k = 0; k < count; k++) {
        bool own;
        TRY(is_context_node(nodes[k], &own));
        if (own) TRY(claim(support, &nodes[k], 1));
        *found |= own;
    }
    return NULL;
}

static OrtStatus *claim_sets(const OrtNode *const *nodes, size_t count, const int *of, int sets,
                             OrtEpGraphSupportInfo *support) {
    OWNED const OrtNode **some = calloc(count + 1, sizeof *some);
    if (!some) return failure(ORT_FAIL, "polydyn: out of memory");
    for (int set = 0; set < sets; set++) {
        size_t n = 0;
        for (size_t k = 0; k < count; k++)
            if (of[k] == set) some[n++] = nodes[k];
        if (n) TRY(claim(support, some, n));
    }
    return NULL;
}

/* Checks whether an inner session can compute the graph before anything is known about it: all outputs are tensors
 * whose elements can be copied. */
static OrtStatus *outputs_are_plain(const OrtGraph *graph, bool *plain) {
    size_t count;
    TRY(ORT(Graph_GetNumOutputs)(graph, &count));
    OWNED const OrtValueInfo **outputs = calloc(count + 1, sizeof *outputs);
    if (!outputs) return failure(ORT_FAIL, "polydyn: out of memory");
    TRY(ORT(Graph_GetOutputs)(graph, outputs, count));
    *plain = count > 0;
    for (size_t k = 0; k < count && *plain; k++) {
        const OrtTypeInfo *type;
        const OrtTensorInfo *info = NULL;
        int element;
        TRY(ORT(GetValueInfoTypeInfo)(outputs[k], &type));
        if (type) TRY(ORT(CastTypeInfoToTensorInfo)(type, &info));
        if (info) TRY(ORT(GetTensorElementType)(info, &element));
        *plain = info && dtype_of(element) >= 0;
    }
    return NULL;
}

OrtStatus *store_model(const settings *s, const message *model, const char *key) {
    char path[PATH_BYTES];
    bool compiled = cache_has(s, key, ".ep");
    if (cache_has(s, key, ".onnx") || (s->strict && compiled)) return NULL;
    cache_path(s, key, ".onnx", path);
    OrtStatus *bad = write_file(path, model);
    if (!compiled) return bad;
    say_status(s, LOG_WARNING, bad); /* a call that the program rejects is then an error */
    return NULL;
}

static OrtStatus *decide(provider *p, const OrtGraph *graph, const OrtNode *const *nodes, size_t count,
                         OrtEpGraphSupportInfo *support) {
    settings *s = &p->s;
    MESSAGE model = {0};
    size_t known = count, left = 0;
    int sets = 1;
    bool plain = false;
    TRY(write_model(graph, &model));
    if (message_bytes(&model) > MAX_MODEL_BYTES)
        return failure(ORT_EP_FAIL, "polydyn: the graph has %zu MB, more than 2 GB; ONNX Runtime computes it\n  "
                       "remedy: polydyn compile MODEL, then polydyn extract --onnxruntime",
                       message_bytes(&model) / 1000000);
    model_key(s, &model, "", p->whole);
    TRY(store_model(s, &model, p->whole));
    OWNED int *of = read_sets(s, p->whole, &known, &sets, &left);
    if (!of && s->background) TRY(outputs_are_plain(graph, &plain));
    if (!of && !plain && !cache_has(s, p->whole, ".ep")) {
        TRY(request(s, &p->compiler, CHECK, p->whole, ""));
        of = read_sets(s, p->whole, &known, &sets, &left);
        if (!of) return failure(ORT_EP_FAIL, "polydyn: the sets of the graph are missing in %s", s->cache);
    }
    if (known != count) return failure(ORT_EP_FAIL, "polydyn: the sets are of a graph with another number of nodes");
    p->one_set = sets == 1 && !left;
    p->unchecked = !of;
    if (of) say_left(s, p->whole, left, count, sets);
    return p->one_set ? claim(support, nodes, count) : claim_sets(nodes, count, of, sets, support);
}

OrtStatus *get_capability(OrtEp *ep, const OrtGraph *graph, OrtEpGraphSupportInfo *support) {
    provider *p = (provider *)ep;
    const OrtNode *parent = NULL;
    const char *path = NULL;
    size_t count;
    bool found;
    OWNED const OrtNode **nodes = NULL;
    TRY(ORT(Graph_GetParentNode)(graph, &parent));
    if (parent) return NULL; /* the body of a node, which is claimed with its node or not at all */
    TRY(nodes_of(graph, &nodes, &count));
    TRY(ORT(Graph_GetModelPath)(graph, &path));
    snprintf(p->s.model_path, sizeof p->s.model_path, "%s", path ? path : "");
    TRY(claim_contexts(nodes, count, support, &found));
    if (found || !count) return NULL;
    OrtStatus *bad = decide(p, graph, nodes, count, support);
    if (!bad) return NULL;
    if (p->s.strict || ORT(GetErrorCode)(bad) == ORT_INVALID_ARGUMENT) {
        if (p->error) ORT(ReleaseStatus)(p->error);
        p->error = bad; /* ONNX Runtime only logs an error of this function, but fails by one of Compile */
        return claim(support, nodes, count);
    }
    say_status(&p->s, LOG_WARNING, bad); /* ONNX Runtime computes the graph */
    return NULL;
}
