/* context.c: EPContext models, which hold compiled programs instead of nodes. */
#define _GNU_SOURCE
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/utsname.h>

#include "provider.h"

static char compatibility[128];

static void write_compatibility(void) {
    struct utsname machine;
    snprintf(compatibility, sizeof compatibility, "polydyn abi %d %s", PD_ABI_VERSION,
             uname(&machine) ? "" : machine.machine);
}

const char *compatibility_text(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, write_compatibility);
    return compatibility;
}

OrtStatus *is_context_node(const OrtNode *node, bool *yes) {
    const char *type;
    OWNED char *source = NULL;
    size_t size;
    *yes = false;
    TRY(ORT(Node_GetOperatorType)(node, &type));
    if (strcmp(type, "EPContext")) return NULL;
    TRY(string_attribute(node, "source", &source, &size));
    *yes = !strcmp(source, NAME);
    return NULL;
}

/* Writes the folder of the model, with a slash at its end; "" for the current folder. */
static void model_folder(const settings *s, char folder[PATH_BYTES]) {
    snprintf(folder, PATH_BYTES, "%s", *s->model_path ? s->model_path : s->context_path);
    char *slash = strrchr(folder, '/');
    slash ? (slash[1] = 0) : (*folder = 0);
}

OrtStatus *load_context(const OrtGraph *graph, const OrtNode *node, unit *u) {
    OWNED char *content = NULL;
    size_t size;
    program *p;
    (void)graph;
    TRY(string_attribute(node, "ep_cache_context", &content, &size));
    if (!strncmp(content, "polydyn-ep ", 11)) {
        TRY(open_program_bytes(content, size, &p));
        return adopt_program(u, p);
    }
    char folder[PATH_BYTES], path[2 * PATH_BYTES];
    if (!*content || strchr(content, '/') || !strcmp(content, ".."))
        return failure(ORT_EP_FAIL, "polydyn: the EPContext node names the file '%s'\n  remedy: a file in the folder "
                       "of the model", content);
    model_folder(u->s, folder);
    snprintf(path, sizeof path, "%s%s", folder, content);
    TRY(open_program(path, &p));
    return adopt_program(u, p);
}

/* Returns the content of the program's file, or copies the file next to the model and returns its name. */
static OrtStatus *place_program(const unit *u, size_t number, char **content, size_t *size) {
    char from[PATH_BYTES], name[PATH_BYTES], path[PATH_BYTES + 64];
    const char *model = *u->s->context_path ? u->s->context_path : u->s->model_path;
    cache_path(u->s, u->key, ".ep", from);
    OWNED char *data = read_file(from, size);
    if (!data) return failure(ORT_EP_FAIL, "polydyn: cannot read %s", from);
    if (u->s->embed_context) {
        *content = data;
        data = NULL;
        return NULL;
    }
    if (!*model)
        return failure(ORT_INVALID_ARGUMENT, "polydyn: the folder of the context model is not known\n  remedy: set "
                       "ep.context_file_path, or ep.context_embed_mode to 1");
    const char *slash = strrchr(model, '/');
    const char *base = slash ? slash + 1 : model, *dot = strrchr(base, '.');
    snprintf(name, sizeof name, "%.*s_polydyn_%zu.ep", dot ? (int)(dot - base) : (int)strlen(base), base, number);
    snprintf(path, sizeof path, "%.*s%s", (int)(base - model), model, name);
    MESSAGE file = {0};
    file.references = malloc(sizeof *file.references);
    if (!file.references) return failure(ORT_FAIL, "polydyn: out of memory");
    file.references[file.reference_count++] = (reference){0, *size, data};
    TRY(write_file(path, &file));
    *size = strlen(name);
    return (*content = strdup(name)) ? NULL : failure(ORT_FAIL, "polydyn: out of memory");
}

OrtStatus *make_context_node(const unit *u, const OrtNode *fused, size_t number, OrtNode **out) {
    enum { COUNT = 5 };
    const char *name;
    const int64_t one = 1, embedded = u->s->embed_context;
    OrtOpAttr *attributes[COUNT] = {NULL};
    OWNED char *content = NULL;
    size_t size;
    if (!u->program)
        return failure(ORT_EP_FAIL, "polydyn: a set of nodes was not compiled, so there is no context model\n  remedy: "
                       "see the warnings before this");
    TRY(place_program(u, number, &content, &size));
    TRY(ORT(Node_GetName)(fused, &name));
    OrtStatus *bad = ORT(CreateOpAttr)("ep_cache_context", content, (int)size, ATTR_STRING, &attributes[0]);
    if (!bad) bad = ORT(CreateOpAttr)("source", NAME, (int)strlen(NAME), ATTR_STRING, &attributes[1]);
    if (!bad) bad = ORT(CreateOpAttr)("ep_sdk_version", polydyn_version, (int)strlen(polydyn_version), ATTR_STRING,
                                      &attributes[2]);
    if (!bad) bad = ORT(CreateOpAttr)("main_context", &one, 1, ATTR_INT, &attributes[3]);
    if (!bad) bad = ORT(CreateOpAttr)("embed_mode", &embedded, 1, ATTR_INT, &attributes[4]);
    if (!bad) {
        FnCreateNode create = (FnCreateNode)ORT(GetModelEditorApi)()[AtCreateNode];
        bad = create("EPContext", "com.microsoft", name, (const char *const *)u->input_names, u->input_count,
                     (const char *const *)u->output_names, u->output_count, attributes, COUNT, out);
        if (!bad) return NULL; /* the node has the attributes now */
    }
    for (int k = 0; k < COUNT; k++)
        if (attributes[k]) ORT(ReleaseOpAttr)(attributes[k]);
    return bad;
}
