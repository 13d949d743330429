/* cuda_nodes.c: a run as nodes of a CUDA graph, and the dependencies between them.
 *
 * The order of a run is correct. So is every order that preserves the sequence of accesses to the same memory, unless
 * both accesses only read it or both write parts of the same buffer. Memory is identified by its begin: buffers that
 * share a slot of the arena begin together, and so do an output and the input that it continues; all others are
 * disjoint. Thus branches of a model that share nothing run in parallel. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cuda_internal.h"


enum { NONE = -1, HOST = 1, DEVICE = 2 }; /* HOST, DEVICE: CU_MEMORYTYPE_ */

typedef struct {
    int32_t node, next;
} pd_link;

/* A memory area: lists of the nodes that write and read its current buffer, and of those that accessed the previous
 * buffer there. Each of the former runs after all of the latter. */
typedef struct {
    uint64_t address;
    int32_t buffer, before, writers, readers;
} pd_memory;

struct pd_nodes {
    void *graph;
    void **nodes, **after; /* after: dependencies of the last node */
    char *kernel;          /* per node: whether it is a kernel */
    int32_t count, room, words;
    uint64_t *earlier, *needs; /* bit sets: per node, the earlier ones; dependencies of the next one */
    pd_memory *memory;
    pd_link *links;
    int32_t places, linked;
    int32_t launch, last, barrier; /* launch and node of the last kernel; a node that all later ones wait for */
};

/* ---- dependencies of a node ---- */

static void need(pd_nodes *g, int32_t node) {
    if (node != NONE && node != g->count) g->needs[node / 64] |= UINT64_C(1) << node % 64;
}

static void need_all(pd_nodes *g, int32_t list) {
    for (; list != NONE; list = g->links[list].next) need(g, g->links[list].node);
}

static void push(pd_nodes *g, int32_t *list) {
    g->links[g->linked] = (pd_link){g->count, *list};
    *list = g->linked++;
}

/* Declares that the next node reads or writes memory at an address. `buffer` NONE: no other node writes a part of it
 * concurrently. */
static void touch(pd_nodes *g, const void *at, int32_t buffer, int written) {
    uint64_t address = (uint64_t)(uintptr_t)at;
    pd_memory *m = g->memory;
    while (m < g->memory + g->places && m->address != address) m++;
    if (m == g->memory + g->places) *m = (pd_memory){address, buffer, NONE, NONE, NONE}, g->places++;
    if ((m->buffer != buffer || buffer == NONE) && (m->writers != NONE || m->readers != NONE)) {
        int32_t *end = &m->writers;
        while (*end != NONE) end = &g->links[*end].next;
        *end = m->readers;
        m->before = m->writers;
        m->writers = m->readers = NONE;
    }
    m->buffer = buffer;
    need_all(g, written || m->writers == NONE ? m->before : m->writers);
    if (written) need_all(g, m->readers);
    push(g, written ? &m->writers : &m->readers);
}

/* Stores the direct dependencies of the next node, without those implied by others: first copies (*copies of them),
 * then kernels. Returns their number. */
static size_t settle(pd_nodes *g, size_t *copies) {
    uint64_t *earlier = g->earlier + (size_t)g->count * (size_t)g->words;
    size_t count = *copies = 0;
    need(g, g->barrier);
    for (int32_t n = g->count - 1; n >= 0; n--) {
        uint64_t bit = UINT64_C(1) << n % 64;
        if (!(g->needs[n / 64] & bit) || (earlier[n / 64] & bit)) continue;
        const uint64_t *more = g->earlier + (size_t)n * (size_t)g->words;
        for (int32_t w = 0; w < g->words; w++) earlier[w] |= more[w];
        earlier[n / 64] |= bit;
        g->after[count++] = g->nodes[n];
        if (g->kernel[n]) continue;
        g->after[count - 1] = g->after[*copies];
        g->after[(*copies)++] = g->nodes[n];
    }
    memset(g->needs, 0, (size_t)g->words * sizeof *g->needs);
    return count;
}

/* ---- nodes ---- */

static pd_copy_side side(int host, void *at) {
    pd_copy_side s = {.kind = host ? HOST : DEVICE};
    if (host) s.host = at;
    else s.device = (uint64_t)(uintptr_t)at;
    return s;
}

int32_t pd_nodes_copy(pd_context *c, pd_nodes *g, int32_t way, void *to, const void *from, int64_t bytes, const char *what) {
    pd_device *d = c->program->place;
    pd_copy_node n = {.bytes = (size_t)bytes, .height = 1, .depth = 1};
    n.from = side(way == PD_HOST_TO_DEVICE, (void *)from);
    n.to = side(way == PD_DEVICE_TO_HOST, to);
    if (way != PD_HOST_TO_DEVICE) touch(g, from, NONE, 0);
    if (way != PD_DEVICE_TO_HOST) touch(g, to, NONE, 1);
    size_t copies, count = settle(g, &copies);
    TRY(cuGraphAddMemcpyNode(&g->nodes[g->count], g->graph, g->after, count, &n, d->context), what);
    g->count++;
    return PD_OK;
}

/* Declares all memory that a kernel of launch k may access, and its dependency on the previous kernel of the same
 * launch. */
static void touch_all(const pd_context *c, pd_nodes *g, int32_t k, const pd_candidate *n) {
    const pd_cuda *x = c->place;
    const pd_launch_entry *l = &plan->launches[k];
    for (int32_t i = 0; i < l->touches; i++) {
        int32_t touched = plan->touches[l->first_touch + i];
        touch(g, c->buffers[touched / 2], touched / 2, touched % 2);
    }
    for (int32_t b = 0; b < n->buffers; b++)
        if (plan->launch_buffers[n->first_buffer + b] < 0) touch(g, (void *)(uintptr_t)x->workspace, NONE, 1);
    if (g->launch == k) need(g, g->last);
    if (l->touches >= 0) return;
    for (int32_t i = 0; i < g->count; i++) need(g, i); /* it may access everything */
    g->barrier = g->count;
}

int32_t pd_nodes_start(pd_context *c, pd_nodes *g, int32_t k, const pd_candidate *n, void **parameters) {
    pd_device *d = c->program->place;
    pd_kernel_node node = {d->functions[n->kernel], {(uint32_t)c->values[n->tasks], 1, 1}, {(uint32_t)n->threads, 1, 1},
                           (uint32_t)c->values[n->scratch], parameters, NULL};
    pd_edge edge = {.from_port = EARLY_PORT, .type = EARLY_TYPE};
    const char *label = plan->launches[k].label;
    touch_all(c, g, k, n);
    size_t copies, count = settle(g, &copies), full = d->early[n->kernel] ? copies : count;
    TRY(cuGraphAddKernelNode(&g->nodes[g->count], g->graph, g->after, full, &node), label);
    for (; full < count; full++) /* it may begin while kernels are running, but not while copies are */
        TRY(cuGraphAddDependencies_v2(g->graph, &g->after[full], &g->nodes[g->count], &edge, 1), label);
    g->kernel[g->count] = 1;
    g->launch = k, g->last = g->count++;
    return PD_OK;
}

/* ---- graphs ---- */

int32_t pd_cuda_most_nodes(const pd_context *c) {
    int32_t all = plan->input_count + plan->copy_count + plan->output_count + plan->device_check_count;
    for (int32_t k = 0; k < plan->launch_count; k++) all += pd_chosen(c, k) ? 1 + pd_chosen(c, k)->after : 0;
    return all;
}

/* Reserves memory for the maximum number of nodes; PD_MEMORY: out of memory. */
static int32_t make_room(const pd_context *c, pd_nodes *g) {
    int32_t links = 0;
    for (int32_t k = 0; k < plan->launch_count; k++) {
        const pd_candidate *n = pd_chosen(c, k);
        if (!n) continue;
        for (int32_t a = 0; a <= n->after; a++) links += (int32_t)pd_max(plan->launches[k].touches, 0) + n[a].buffers;
    }
    g->room = pd_cuda_most_nodes(c);
    g->words = g->room / 64 + 1;
    links += 2 * g->room;
    g->nodes = calloc((size_t)g->room + 1, sizeof *g->nodes);
    g->after = calloc((size_t)g->room + 1, sizeof *g->after);
    g->kernel = calloc((size_t)g->room + 1, sizeof *g->kernel);
    g->earlier = calloc((size_t)(g->room + 1) * (size_t)g->words, sizeof *g->earlier);
    g->needs = calloc((size_t)g->words, sizeof *g->needs);
    g->memory = calloc((size_t)links + 1, sizeof *g->memory);
    g->links = calloc((size_t)links + 1, sizeof *g->links);
    int all = g->nodes && g->after && g->kernel && g->earlier && g->needs && g->memory && g->links;
    return all ? PD_OK : pd_fail(PD_MEMORY, "out of memory");
}

/* Makes an executable graph of the nodes; without nodes there is nothing to launch. */
static int32_t instantiate(pd_device *d, const pd_nodes *g, void **executable) {
    char what[64];
    snprintf(what, sizeof what, "%d nodes of a call", g->count);
    if (g->count) TRY(cuGraphInstantiateWithFlags(executable, g->graph, 0), what);
    return PD_OK;
}

static int32_t build(pd_context *c, pd_call *call, pd_recorded *made) {
    pd_device *d = c->program->place;
    int64_t before = c->copied_bytes;
    int32_t code = make_room(c, call->nodes);
    if (code != PD_OK) return code;
    TRY(cuGraphCreate(&call->nodes->graph, 0), "recording a call");
    code = pd_cuda_issue(c, call, NULL);
    *made = (pd_recorded){NULL, call->nodes->count, c->copied_bytes - before};
    c->copied_bytes = before;
    if (code == PD_OK) code = instantiate(d, call->nodes, &made->graph);
    d->cuda.cuGraphDestroy(call->nodes->graph);
    return code;
}

int32_t pd_cuda_build(pd_context *c, const pd_call *call, pd_recorded *made) {
    pd_nodes g = {.launch = NONE, .last = NONE, .barrier = NONE};
    pd_call recorded = *call;
    recorded.nodes = &g;
    int32_t code = build(c, &recorded, made);
    free(g.nodes);
    free(g.after);
    free(g.kernel);
    free(g.earlier);
    free(g.needs);
    free(g.memory);
    free(g.links);
    return code;
}

void pd_cuda_destroy(pd_context *c, pd_recorded *made) {
    const pd_device *d = c->program->place;
    if (made->graph) d->cuda.cuGraphExecDestroy(made->graph);
    made->graph = NULL;
}
