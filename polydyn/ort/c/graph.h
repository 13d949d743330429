/* graph.h: a graph of ONNX Runtime as an ONNX model. */
#ifndef POLYDYN_ORT_GRAPH_H
#define POLYDYN_ORT_GRAPH_H

#include "abi.h"
#include "message.h"

#define TRY(call)                                                                                                      \
    do {                                                                                                               \
        OrtStatus *status_ = (call);                                                                                   \
        if (status_) return status_;                                                                                   \
    } while (0)

/* Returns a status with a formatted message. */
OrtStatus *failure(int code, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* Lists of a graph or node. The caller frees *list, which is not NULL. */
OrtStatus *nodes_of(const OrtGraph *graph, const OrtNode ***list, size_t *count);
OrtStatus *node_inputs(const OrtNode *node, const OrtValueInfo ***list, size_t *count);
OrtStatus *node_outputs(const OrtNode *node, const OrtValueInfo ***list, size_t *count);
/* Returns the name of a value, "" for a missing one. */
OrtStatus *value_name(const OrtValueInfo *value, const char **name);

/* Writes a model of the graph. Its nodes are in the order of Graph_GetNodes; inputs that no node reads and outputs that
 * no node computes are left out. Referenced data belong to the graph. */
OrtStatus *write_model(const OrtGraph *graph, message *model);

/* Returns a string attribute, "" if the node has none. The caller frees *text. `size` without the final zero. */
OrtStatus *string_attribute(const OrtNode *node, const char *name, char **text, size_t *size);

#endif
