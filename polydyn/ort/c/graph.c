/* graph.c: a graph of ONNX Runtime as an ONNX model. ONNX Runtime has no function for that. */
#include "graph.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MAX_AXES = 64, MAX_COPIED_BYTES = 256 };

OrtStatus *failure(int code, const char *format, ...) {
    char text[4096];
    va_list list;
    va_start(list, format);
    vsnprintf(text, sizeof text, format, list);
    va_end(list);
    return ORT(CreateStatus)(code, text);
}

static OrtStatus *no_memory(void) { return failure(ORT_FAIL, "polydyn: out of memory"); }

/* Defines a function that lists values of an object: its count, then its elements. */
#define LISTING(function, Object, Element, GetCount, GetElements)                                                      \
    OrtStatus *function(const Object *object, const Element ***list, size_t *count) {                                  \
        *list = NULL;                                                                                                  \
        TRY(ORT(GetCount)(object, count));                                                                             \
        if (!(*list = calloc(*count + 1, sizeof **list))) return no_memory();                                          \
        OrtStatus *bad = *count ? ORT(GetElements)(object, *list, *count) : NULL;                                      \
        if (bad) {                                                                                                     \
            free(*list);                                                                                               \
            *list = NULL;                                                                                              \
        }                                                                                                              \
        return bad;                                                                                                    \
    }
LISTING(nodes_of, OrtGraph, OrtNode, Graph_GetNumNodes, Graph_GetNodes)
LISTING(node_inputs, OrtNode, OrtValueInfo, Node_GetNumInputs, Node_GetInputs)
LISTING(node_outputs, OrtNode, OrtValueInfo, Node_GetNumOutputs, Node_GetOutputs)
static LISTING(captured_inputs, OrtNode, OrtValueInfo, Node_GetNumImplicitInputs, Node_GetImplicitInputs)
static LISTING(node_attributes, OrtNode, OrtOpAttr, Node_GetNumAttributes, Node_GetAttributes)
static LISTING(graph_inputs, OrtGraph, OrtValueInfo, Graph_GetNumInputs, Graph_GetInputs)
static LISTING(graph_outputs, OrtGraph, OrtValueInfo, Graph_GetNumOutputs, Graph_GetOutputs)
static LISTING(graph_constants, OrtGraph, OrtValueInfo, Graph_GetNumInitializers, Graph_GetInitializers)

OrtStatus *value_name(const OrtValueInfo *value, const char **name) {
    *name = "";
    return value ? ORT(GetValueInfoName)(value, name) : NULL;
}

/* ---- tensors and types ---- */

static OrtStatus *put_strings(message *out, const OrtValue *value, size_t count) {
    size_t length;
    TRY(ORT(GetStringTensorDataLength)(value, &length));
    OWNED char *text = malloc(length + 1);
    OWNED size_t *offsets = calloc(count + 1, sizeof *offsets);
    if (!text || !offsets) return no_memory();
    if (count) TRY(ORT(GetStringTensorContent)(value, text, length, offsets, count));
    offsets[count] = length;
    for (size_t k = 0; k < count; k++) put_bytes(out, 6, text + offsets[k], offsets[k + 1] - offsets[k]);
    return NULL;
}

static OrtStatus *shape_of(const OrtValue *value, int *type, int64_t dims[MAX_AXES], size_t *rank) {
    OrtTensorInfo *info;
    TRY(ORT(GetTensorTypeAndShape)(value, &info));
    OrtStatus *bad = ORT(GetTensorElementType)(info, type);
    if (!bad) bad = ORT(GetDimensionsCount)(info, rank);
    if (!bad && *rank > MAX_AXES) bad = failure(ORT_FAIL, "polydyn: a tensor has %zu axes", *rank);
    if (!bad) bad = ORT(GetDimensions)(info, dims, *rank);
    ORT(ReleaseTensorTypeAndShapeInfo)(info);
    return bad;
}

/* Writes a TensorProto. `refer`: the value outlives the message, so that large data need no copy. */
static OrtStatus *put_tensor(message *out, const char *name, const OrtValue *value, bool refer) {
    int type;
    size_t rank, size, count = 1;
    int64_t dims[MAX_AXES];
    const void *data;
    TRY(shape_of(value, &type, dims, &rank));
    for (size_t k = 0; k < rank; k++) {
        put_number(out, 1, dims[k]);
        count *= (size_t)dims[k];
    }
    put_number(out, 2, type);
    put_text(out, 8, name);
    if (type == TYPE_STRING) return put_strings(out, value, count);
    TRY(ORT(GetTensorSizeInBytes)(value, &size));
    TRY(ORT(GetTensorData)(value, &data));
    if (refer && size > MAX_COPIED_BYTES) put_reference(out, 9, data, size);
    else put_bytes(out, 9, data, size);
    return NULL;
}

static OrtStatus *put_dims(message *out, const OrtTensorInfo *info, size_t rank) {
    int64_t dims[MAX_AXES];
    const char *names[MAX_AXES];
    MESSAGE shape = {0};
    TRY(ORT(GetDimensions)(info, dims, rank));
    TRY(ORT(GetSymbolicDimensions)(info, names, rank));
    for (size_t k = 0; k < rank; k++) {
        MESSAGE dim = {0};
        if (dims[k] >= 0) put_number(&dim, 1, dims[k]);
        else if (names[k] && *names[k]) put_text(&dim, 2, names[k]);
        put_message(&shape, 1, &dim);
    }
    put_message(out, 2, &shape);
    return NULL;
}

/* Writes a ValueInfoProto. Before 1.24 a scalar cannot be distinguished from a tensor of unknown rank, and `scalar`
 * decides. */
static OrtStatus *put_value_info(message *out, const OrtValueInfo *value, bool scalar) {
    const char *name;
    const OrtTypeInfo *type;
    const OrtTensorInfo *info = NULL;
    TRY(value_name(value, &name));
    put_text(out, 1, name);
    TRY(ORT(GetValueInfoTypeInfo)(value, &type));
    if (type) TRY(ORT(CastTypeInfoToTensorInfo)(type, &info));
    if (!info) return NULL;
    int element;
    size_t rank;
    MESSAGE tensor = {0};
    MESSAGE all = {0};
    TRY(ORT(GetTensorElementType)(info, &element));
    TRY(ORT(GetDimensionsCount)(info, &rank));
    put_number(&tensor, 1, element);
    bool known = ort_minor >= 24 ? ORT(TensorTypeAndShape_HasShape)(info) : rank > 0 || scalar;
    if (known && rank <= MAX_AXES) TRY(put_dims(&tensor, info, rank));
    put_message(&all, 1, &tensor);
    put_message(out, 2, &all);
    return NULL;
}

/* ---- nodes ---- */

static OrtStatus *read_attribute(const OrtOpAttr *attribute, int type, char **data, size_t *size) {
    *size = 0;
    OrtStatus *bad = ORT(ReadOpAttr)(attribute, type, NULL, 0, size); /* fails and returns the size */
    if (bad) ORT(ReleaseStatus)(bad);
    if (!(*data = calloc(1, *size + 8))) return no_memory();
    if (!*size) return NULL;
    bad = ORT(ReadOpAttr)(attribute, type, *data, *size, size);
    if (bad) {
        free(*data);
        *data = NULL;
    }
    return bad;
}

OrtStatus *string_attribute(const OrtNode *node, const char *name, char **text, size_t *size) {
    const OrtOpAttr *attribute = NULL;
    *size = 0;
    *text = NULL;
    OrtStatus *bad = ORT(Node_GetAttributeByName)(node, name, &attribute);
    if (bad) ORT(ReleaseStatus)(bad); /* some versions fail if there is no such attribute */
    if (bad || !attribute) return (*text = calloc(1, 1)) ? NULL : no_memory();
    return read_attribute(attribute, ATTR_STRING, text, size);
}

static OrtStatus *put_attribute(message *out, const OrtOpAttr *attribute, const char *name, int type) {
    static const int KINDS[] = {0, 2, 7, 1, 6, 3, 8, 5, 4}; /* OrtOpAttrType -> AttributeProto.AttributeType */
    put_text(out, 1, name);
    if (type == ATTR_TENSOR) {
        OrtValue *value;
        MESSAGE tensor = {0};
        TRY(ORT(OpAttr_GetTensorAttributeAsOrtValue)(attribute, &value));
        OrtStatus *bad = put_tensor(&tensor, "", value, false);
        ORT(ReleaseValue)(value);
        if (bad) return bad;
        put_message(out, 5, &tensor);
    } else if (type >= ATTR_INT && type <= ATTR_STRINGS) {
        OWNED char *data = NULL;
        size_t size;
        TRY(read_attribute(attribute, type, &data, &size));
        if (type == ATTR_INT) put_number(out, 3, *(int64_t *)(void *)data);
        if (type == ATTR_FLOAT) put_float(out, 2, *(float *)(void *)data);
        if (type == ATTR_STRING) put_bytes(out, 4, data, strnlen(data, size));
        for (size_t k = 0; type == ATTR_INTS && k < size / 8; k++) put_number(out, 8, ((int64_t *)(void *)data)[k]);
        for (size_t k = 0; type == ATTR_FLOATS && k < size / 4; k++) put_float(out, 7, ((float *)(void *)data)[k]);
        for (size_t k = 0; type == ATTR_STRINGS && k < size; k += strlen(data + k) + 1) put_text(out, 9, data + k);
    } else {
        return failure(ORT_FAIL, "polydyn: attribute '%s' has a type that is not known (%d)", name, type);
    }
    put_number(out, 20, KINDS[type]);
    return NULL;
}

static OrtStatus *put_graph(message *out, const OrtGraph *graph, bool body);

static OrtStatus *put_bodies(message *out, const OrtNode *node) {
    size_t count;
    TRY(ORT(Node_GetNumSubgraphs)(node, &count));
    if (!count) return NULL;
    OWNED const OrtGraph **graphs = calloc(count, sizeof *graphs);
    OWNED const char **names = calloc(count, sizeof *names);
    if (!graphs || !names) return no_memory();
    TRY(ORT(Node_GetSubgraphs)(node, graphs, count, names));
    for (size_t k = 0; k < count; k++) {
        MESSAGE body = {0};
        MESSAGE attribute = {0};
        TRY(put_graph(&body, graphs[k], true));
        put_text(&attribute, 1, names[k]);
        put_message(&attribute, 6, &body);
        put_number(&attribute, 20, 5);
        put_message(out, 5, &attribute);
    }
    return NULL;
}

static OrtStatus *put_names(message *out, int field, const OrtValueInfo *const *values, size_t count) {
    for (size_t k = 0; k < count; k++) {
        const char *name;
        TRY(value_name(values[k], &name));
        put_text(out, field, name);
    }
    return NULL;
}

static OrtStatus *put_node(message *out, const OrtNode *node) {
    const char *text;
    size_t count;
    OWNED const OrtValueInfo **inputs = NULL;
    OWNED const OrtValueInfo **outputs = NULL;
    OWNED const OrtOpAttr **attributes = NULL;
    TRY(node_inputs(node, &inputs, &count));
    TRY(put_names(out, 1, inputs, count));
    TRY(node_outputs(node, &outputs, &count));
    TRY(put_names(out, 2, outputs, count));
    TRY(ORT(Node_GetName)(node, &text));
    put_text(out, 3, text);
    TRY(ORT(Node_GetOperatorType)(node, &text));
    put_text(out, 4, text);
    TRY(ORT(Node_GetDomain)(node, &text));
    put_text(out, 7, text);
    TRY(node_attributes(node, &attributes, &count));
    for (size_t k = 0; k < count; k++) {
        int type;
        MESSAGE attribute = {0};
        TRY(ORT(OpAttr_GetType)(attributes[k], &type));
        if (type == ATTR_GRAPH) continue;
        TRY(ORT(OpAttr_GetName)(attributes[k], &text));
        TRY(put_attribute(&attribute, attributes[k], text, type));
        put_message(out, 5, &attribute);
    }
    return put_bodies(out, node);
}

/* ---- graphs ---- */

/* A sorted list of names. */
typedef struct {
    const char **names;
    size_t count, room;
} name_list;

static int compare_names(const void *a, const void *b) {
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

static OrtStatus *add_names(name_list *list, const OrtValueInfo *const *values, size_t count) {
    if (list->count + count > list->room) {
        size_t room = 2 * (list->count + count);
        const char **larger = realloc(list->names, room * sizeof *larger);
        if (!larger) return no_memory();
        list->names = larger;
        list->room = room;
    }
    for (size_t k = 0; k < count; k++) TRY(value_name(values[k], &list->names[list->count++]));
    return NULL;
}

static bool has_name(const name_list *list, const char *name) {
    return list->count && bsearch(&name, list->names, list->count, sizeof *list->names, compare_names);
}

/* Collects the values that the nodes of a graph read and compute. */
static OrtStatus *used_names(const OrtGraph *graph, name_list *read, name_list *computed) {
    size_t nodes, count;
    OWNED const OrtNode **list = NULL;
    TRY(nodes_of(graph, &list, &nodes));
    for (size_t k = 0; k < nodes; k++) {
        OWNED const OrtValueInfo **inputs = NULL;
        OWNED const OrtValueInfo **captured = NULL;
        OWNED const OrtValueInfo **outputs = NULL;
        TRY(node_inputs(list[k], &inputs, &count));
        TRY(add_names(read, inputs, count));
        TRY(captured_inputs(list[k], &captured, &count));
        TRY(add_names(read, captured, count));
        TRY(node_outputs(list[k], &outputs, &count));
        TRY(add_names(computed, outputs, count));
    }
    if (read->count) qsort(read->names, read->count, sizeof *read->names, compare_names);
    if (computed->count) qsort(computed->names, computed->count, sizeof *computed->names, compare_names);
    return NULL;
}

static int compare_values(const void *a, const void *b) {
    const char *x = "", *y = "";
    OrtStatus *bad = value_name(*(const OrtValueInfo *const *)a, &x);
    if (!bad) bad = value_name(*(const OrtValueInfo *const *)b, &y);
    if (bad) ORT(ReleaseStatus)(bad);
    return strcmp(x, y);
}

/* Writes the constants, sorted by name: their order in a fused node's graph differs from process to process. An
 * initializer that calls may override is not constant; it becomes an input. */
static OrtStatus *put_constants(message *out, const OrtGraph *graph, name_list *constants) {
    size_t count;
    OWNED const OrtValueInfo **values = NULL;
    TRY(graph_constants(graph, &values, &count));
    qsort(values, count, sizeof *values, compare_values);
    for (size_t k = 0; k < count; k++) {
        const char *name;
        const OrtValue *value = NULL;
        bool constant = false;
        MESSAGE tensor = {0};
        TRY(ORT(ValueInfo_IsConstantInitializer)(values[k], &constant));
        if (constant) TRY(ORT(ValueInfo_GetInitializerValue)(values[k], &value));
        if (!value) continue;
        TRY(value_name(values[k], &name));
        TRY(put_tensor(&tensor, name, value, true));
        put_message(out, 5, &tensor);
        TRY(add_names(constants, &values[k], 1));
    }
    return NULL;
}

static OrtStatus *put_graph_with(message *out, const OrtGraph *graph, bool body, name_list lists[3]) {
    name_list *read = &lists[0], *computed = &lists[1], *constants = &lists[2];
    size_t count;
    OWNED const OrtNode **nodes = NULL;
    OWNED const OrtValueInfo **inputs = NULL;
    OWNED const OrtValueInfo **outputs = NULL;
    TRY(nodes_of(graph, &nodes, &count));
    for (size_t k = 0; k < count; k++) {
        MESSAGE node = {0};
        TRY(put_node(&node, nodes[k]));
        put_message(out, 1, &node);
    }
    put_text(out, 2, body ? "body" : "graph");
    TRY(put_constants(out, graph, constants));
    if (!body) TRY(used_names(graph, read, computed));
    TRY(graph_inputs(graph, &inputs, &count));
    for (size_t k = 0; k < count; k++) {
        const char *name;
        MESSAGE info = {0};
        TRY(value_name(inputs[k], &name));
        if (has_name(constants, name) || (!body && !has_name(read, name))) continue;
        TRY(put_value_info(&info, inputs[k], !body));
        put_message(out, 11, &info);
    }
    TRY(graph_outputs(graph, &outputs, &count));
    for (size_t k = 0; k < count; k++) {
        const char *name;
        MESSAGE info = {0};
        TRY(value_name(outputs[k], &name));
        if (!body && !has_name(computed, name)) continue;
        TRY(put_value_info(&info, outputs[k], false));
        put_message(out, 12, &info);
    }
    return NULL;
}

static OrtStatus *put_graph(message *out, const OrtGraph *graph, bool body) {
    name_list lists[3] = {{0}, {0}, {0}};
    OrtStatus *bad = put_graph_with(out, graph, body, lists);
    for (int k = 0; k < 3; k++) free(lists[k].names);
    return bad;
}

OrtStatus *write_model(const OrtGraph *graph, message *model) {
    int64_t version;
    size_t count;
    MESSAGE inner = {0};
    TRY(ORT(Graph_GetOnnxIRVersion)(graph, &version));
    put_number(model, 1, version);
    put_text(model, 2, "polydyn");
    TRY(put_graph(&inner, graph, false));
    put_message(model, 7, &inner);
    TRY(ORT(Graph_GetNumOperatorSets)(graph, &count));
    OWNED const char **domains = calloc(count + 1, sizeof *domains);
    OWNED int64_t *versions = calloc(count + 1, sizeof *versions);
    if (!domains || !versions) return no_memory();
    TRY(ORT(Graph_GetOperatorSets)(graph, domains, versions, count));
    for (size_t k = 0; k < count; k++) {
        MESSAGE opset = {0};
        put_text(&opset, 1, domains[k]);
        put_number(&opset, 2, versions[k]);
        put_message(model, 8, &opset);
    }
    return model->failed ? no_memory() : NULL;
}
