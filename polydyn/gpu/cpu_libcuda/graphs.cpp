
// ---- graphs: capture on a stream, nodes one by one, replay in both orders -------------------------------------------
// A captured graph is a chain of nodes. For other graphs, every order that respects the edges is correct: the first
// replay runs two orders that are as different as possible, and compares all device memory.
API(cuStreamBeginCapture_v2)(Handle s, int mode) {
  NEED_CONTEXT;
  if (!setting("PDEMU_GRAPHS", 1)) return NOT_SUPPORTED;
  if (!is_stream(s)) return INVALID_HANDLE;
  if (is_legacy(s)) return CAPTURE_UNSUPPORTED;
  if ((uintptr_t)s == 2) return NOT_SUPPORTED;  // the thread's own default stream; a real driver captures it
  if (mode < GLOBAL || mode > RELAXED) return INVALID_VALUE;
  if (capture_of(s)) return ILLEGAL_STATE;
  ((Stream *)s)->capture = new Capture{mode, std::this_thread::get_id(), false, {}};
  return 0;
}
API(cuStreamEndCapture)(Handle s, Graph **graph) {
  NEED_CONTEXT;
  if (!is_stream(s)) return INVALID_HANDLE;
  Capture *c = capture_of(s);
  if (!c) return ILLEGAL_STATE;
  if (c->mode != RELAXED && c->thread != std::this_thread::get_id()) return CAPTURE_WRONG_THREAD;
  int code = c->invalid ? CAPTURE_INVALIDATED : 0;
  *graph = code ? nullptr : *graphs.insert(new Graph{}).first;
  for (size_t i = 0; !code && i < c->work.size(); i++)
    (*graph)->nodes.push_back({c->work[i], i ? std::vector<Node *>{&(*graph)->nodes[i - 1]} : std::vector<Node *>{}, {}, nullptr});
  ((Stream *)s)->capture = nullptr;
  delete c;
  return code;
}
API(cuStreamIsCapturing)(Handle s, int *status) {
  NEED_CONTEXT;
  if (!is_stream(s)) return INVALID_HANDLE;
  for (Stream *t : streams)
    if (is_legacy(s) && t->capture && t->blocking && t->owner == here()) return CAPTURE_IMPLICIT;
  *status = !capture_of(s) ? 0 : capture_of(s)->invalid ? 2 : 1;
  return 0;
}
API(cuThreadExchangeStreamCaptureMode)(int *mode) {
  LOCK;
  if (*mode < GLOBAL || *mode > RELAXED) return INVALID_VALUE;
  std::swap(*mode, thread_mode);
  return 0;
}
API(cuGraphCreate)(Graph **graph, unsigned flags) {
  NEED_CONTEXT;
  if (!setting("PDEMU_GRAPHS", 1)) return NOT_SUPPORTED;
  if (flags) return INVALID_VALUE;
  graphs.insert(*graph = new Graph{});
  return 0;
}
static bool is_node(Graph *g, Node *n) {
  return std::any_of(g->nodes.begin(), g->nodes.end(), [n](const Node &o) { return &o == n; });
}
static int add_node(Node **node, Graph *g, Node *const *after, size_t n, const Work &work, Host host, std::shared_ptr<Launch> launch) {
  for (size_t i = 0; i < n; i++)
    if (!is_node(g, after[i])) return INVALID_VALUE;
  g->nodes.push_back({work, {after, after + n}, host, launch});
  *node = &g->nodes.back();
  return 0;
}
struct KernelNode { Function *function; unsigned grid[3], block[3], smem; void **params, **extra; };  // CUDA_KERNEL_NODE_PARAMS_v1
API(cuGraphAddKernelNode)(Node **node, Graph *g, Node *const *after, size_t n, const KernelNode *k) {
  NEED_CONTEXT;
  if (!graphs.count(g)) return INVALID_VALUE;
  Launch l;
  if (int code = describe(&l, k->function, k->grid, k->block, k->smem, k->params, k->extra)) return code;
  std::shared_ptr<Launch> kept = std::make_shared<Launch>(l);
  return add_node(node, g, after, n, [kept] { return run_kernel(*kept); }, {}, kept);
}
struct Edge { uint8_t from_port, to_port, type, reserved[5]; };  // CUgraphEdgeData
API(cuGraphAddDependencies_v2)(Graph *g, Node *const *from, Node *const *to, const Edge *edges, size_t n) {
  NEED_CONTEXT;
  enum { PROGRAMMATIC = 1 };  // the edge type, and the port: all blocks have allowed the next kernel to begin
  if (!graphs.count(g)) return INVALID_VALUE;
  for (size_t i = 0; i < n; i++) {
    Edge e = edges ? edges[i] : Edge{};
    if (!is_node(g, from[i]) || !is_node(g, to[i]) || e.to_port || e.type != e.from_port || e.type > PROGRAMMATIC) return INVALID_VALUE;
    if (e.type && (!from[i]->launch || !to[i]->launch)) return INVALID_VALUE;
    if (e.type && capability() < 90) return NOT_SUPPORTED;
    if (std::count(to[i]->after.begin(), to[i]->after.end(), from[i])) return INVALID_VALUE;
    to[i]->after.push_back(from[i]);
    if (e.type) to[i]->launch->overlaps = true;
  }
  return 0;
}
struct CopySide { size_t x, y, z, lod; unsigned kind; void *host; Address device; void *array, *reserved; size_t pitch, height; };
struct CopyNode { CopySide from, to; size_t bytes, height, depth; };  // CUDA_MEMCPY3D
API(cuGraphAddMemcpyNode)(Node **node, Graph *g, Node *const *after, size_t n, const CopyNode *c, Context *context) {
  NEED_CONTEXT;
  enum { HOST = 1, DEVICE = 2 };
  if (!graphs.count(g) || context != here() || c->height != 1 || c->depth != 1 || !c->bytes) return INVALID_VALUE;
  for (const CopySide *s : {&c->from, &c->to}) {
    if (s->x || s->y || s->z || s->lod || s->array || s->reserved) return NOT_SUPPORTED;
    if (s->kind != HOST && s->kind != DEVICE) return INVALID_VALUE;
  }
  CopyNode k = *c;
  auto place = [](const CopySide &s) { return s.kind == HOST ? s.host : (void *)s.device; };
  auto there = [](const CopySide &s, size_t bytes) {  // stricter than the driver: host memory must be pinned
    return s.kind == HOST ? inside_pinned(s.host, bytes) : inside(s.device, bytes);
  };
  if (!there(k.from, k.bytes) || !there(k.to, k.bytes)) return INVALID_VALUE;
  return add_node(node, g, after, n, [=] {
    if (!there(k.from, k.bytes) || !there(k.to, k.bytes)) return fault("a copy of memory that was freed");
    memmove(place(k.to), place(k.from), k.bytes);
    if (k.to.kind == DEVICE) write_to(k.to.device);
    return 0;
  }, {(const char *)k.to.host, k.to.kind == HOST ? k.bytes : 0}, nullptr);
}
API(cuGraphGetNodes)(Graph *g, Handle *nodes, size_t *n) {
  LOCK;
  if (!graphs.count(g)) return INVALID_VALUE;
  for (size_t i = 0; nodes && i < *n; i++) nodes[i] = i < g->nodes.size() ? &g->nodes[i] : nullptr;
  *n = g->nodes.size();
  return 0;
}
// For tests: the longest chain of nodes in the last instantiated graph.
extern "C" __attribute__((visibility("default"))) uint64_t pdemu_graph_depth;
uint64_t pdemu_graph_depth;
static uint64_t depth_of(const Executable &e) {
  std::vector<uint64_t> depth;
  for (const Step &s : e.steps) {
    depth.push_back(1);
    for (size_t a : s.after) depth.back() = std::max(depth.back(), depth[a] + 1);
  }
  return depth.empty() ? 0 : *std::max_element(depth.begin(), depth.end());
}
API(cuGraphInstantiateWithFlags)(Executable **e, Graph *g, unsigned long long flags) {
  NEED_CONTEXT;
  if (!graphs.count(g) || flags > 15) return INVALID_VALUE;
  if (int code = unsafe()) return code;
  size_t bytes = 65536 + 1024 * g->nodes.size();  // graphs use some device memory
  if (memory_used + bytes > memory_size()) return OUT_OF_MEMORY;
  memory_used += bytes;
  std::map<const Node *, size_t> number;
  for (const Node &n : g->nodes) number.emplace(&n, number.size());
  executables.insert(*e = new Executable{{}, here(), bytes, false});
  for (const Node &n : g->nodes) {
    (*e)->steps.push_back({n.work, {}, n.host});
    for (Node *before : n.after) (*e)->steps.back().after.push_back(number.at(before));
  }
  pdemu_graph_depth = depth_of(**e);
  return 0;
}
// Orders the steps along the edges: of the steps that are ready it takes the first, or the last.
static std::vector<size_t> order_of(const Executable &e, bool last) {
  std::vector<size_t> order;
  std::vector<bool> done(e.steps.size());
  while (order.size() < e.steps.size()) {
    size_t next = e.steps.size();
    for (size_t i = 0; i < e.steps.size() && (last || next == e.steps.size()); i++) {
      const std::vector<size_t> &after = e.steps[i].after;
      if (!done[i] && std::all_of(after.begin(), after.end(), [&](size_t a) { return done[a]; })) next = i;
    }
    order.push_back(next), done[next] = true;
  }
  return order;
}
static int run_steps(const Executable &e, const std::vector<size_t> &order) {
  for (size_t i : order) {
    if (int code = e.steps[i].work()) return code;
    if (here()->broken) return 0;  // nothing runs after a failed kernel
  }
  return 0;
}
// Returns the content of the context's memory and what the graph has copied to the host. (Other threads may write more
// there.)
static std::vector<std::string> contents(const Executable &e) {
  std::vector<std::string> all;
  for (auto &a : memory)
    if (a.second.owner == here()) all.emplace_back((const char *)a.first, a.second.bytes);
  for (const Step &s : e.steps) all.emplace_back(s.host.bytes ? s.host.at : "", s.host.bytes);
  return all;
}
static void restore(const std::vector<std::string> &all) {
  size_t i = 0;
  for (auto &a : memory)
    if (a.second.owner == here()) memcpy((void *)a.first, all[i].data(), all[i].size()), i++;
}
static int run_graph(Executable *e) {
  bool reverse = setting("PDEMU_REVERSE", 0) != 0;
  std::vector<size_t> order = order_of(*e, reverse), other = order_of(*e, !reverse);
  if (e->compared || order == other) return run_steps(*e, order);
  e->compared = true;
  uint64_t counters[PDEMU_COUNTERS];
  std::vector<std::string> before = contents(*e);
  memcpy(counters, pdemu_counters, sizeof counters);
  if (int code = run_steps(*e, other)) return code;
  std::vector<std::string> after = contents(*e);
  restore(before);
  memcpy(pdemu_counters, counters, sizeof counters);
  if (here()->broken) return 0;
  int code = run_steps(*e, order);
  if (!code && !here()->broken && contents(*e) != after) return fault("branches of a graph race: their order changes memory");
  return code;
}
API(cuGraphUpload)(Executable *e, Handle s) { NEED_CONTEXT; return executables.count(e) && is_stream(s) ? 0 : INVALID_VALUE; }
API(cuGraphLaunch)(Executable *e, Handle s) {
  NEED_CONTEXT;
  if (!executables.count(e) || e->owner != here()) return INVALID_VALUE;
  if (!is_stream(s)) return INVALID_HANDLE;
  if (int code = not_captured(s, NOT_SUPPORTED)) return code;  // a real driver would make it a node
  return enqueue(s, [e] { return executables.count(e) ? run_graph(e) : fault("a graph that was destroyed"); });
}
API(cuGraphExecDestroy)(Executable *e) { LOCK; if (!executables.count(e)) return INVALID_VALUE; destroy(e); return 0; }
API(cuGraphDestroy)(Graph *g) { LOCK; if (!graphs.erase(g)) return INVALID_VALUE; delete g; return 0; }
