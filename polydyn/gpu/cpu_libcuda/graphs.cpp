
// ---- graphs: capture on a stream, replay in the order of capture --------------------------------------------------
API(cuStreamBeginCapture_v2)(Handle s, int mode) {
  NEED_CONTEXT;
  if (!setting("PDEMU_GRAPHS", 1)) return NOT_SUPPORTED;
  if (!is_stream(s)) return INVALID_HANDLE;
  if (is_legacy(s)) return CAPTURE_UNSUPPORTED;
  if ((uintptr_t)s == 2) return NOT_SUPPORTED;  // the thread's own default stream: a real driver captures it
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
  *graph = code ? nullptr : *graphs.insert(new Graph{c->work}).first;
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
API(cuGraphGetNodes)(Graph *g, Handle *nodes, size_t *n) {
  LOCK;
  if (!graphs.count(g)) return INVALID_VALUE;
  for (size_t i = 0; nodes && i < *n; i++) nodes[i] = i < g->work.size() ? &g->work[i] : nullptr;
  *n = g->work.size();
  return 0;
}
API(cuGraphInstantiateWithFlags)(Executable **e, Graph *g, unsigned long long flags) {
  NEED_CONTEXT;
  if (!graphs.count(g) || flags > 15) return INVALID_VALUE;
  if (int code = unsafe()) return code;
  size_t bytes = 65536 + 1024 * g->work.size();  // some device memory, as graphs take there
  if (memory_used + bytes > memory_size()) return OUT_OF_MEMORY;
  memory_used += bytes;
  executables.insert(*e = new Executable{g->work, here(), bytes});
  return 0;
}
API(cuGraphUpload)(Executable *e, Handle s) { NEED_CONTEXT; return executables.count(e) && is_stream(s) ? 0 : INVALID_VALUE; }
API(cuGraphLaunch)(Executable *e, Handle s) {
  NEED_CONTEXT;
  if (!executables.count(e) || e->owner != here()) return INVALID_VALUE;
  if (!is_stream(s)) return INVALID_HANDLE;
  if (int code = not_captured(s, NOT_SUPPORTED)) return code;  // the real driver would make it a node
  return enqueue(s, [e] {
    if (!executables.count(e)) return fault("a graph that was destroyed");
    for (const Work &work : e->work) {
      int code = work();
      if (code) return code;
      if (here()->broken) return 0;  // nothing runs after a kernel that failed
    }
    return 0;
  });
}
API(cuGraphExecDestroy)(Executable *e) { LOCK; if (!executables.count(e)) return INVALID_VALUE; destroy(e); return 0; }
API(cuGraphDestroy)(Graph *g) { LOCK; if (!graphs.erase(g)) return INVALID_VALUE; delete g; return 0; }
