// pd_emu_hopper.h -- strict CPU semantics of pd_hopper.cuh: mbarrier, TMA, wgmma.
//
// As late as the ISA allows: a TMA copy poisons its destination when issued and lands only when no thread can go on
// without it (in reverse order: the newest first); a TMA store reads shared memory at the wait, and what it reads may
// not change meanwhile; wgmma reads operands and writes accumulators at the wait that retires its group, until then the
// accumulator registers hold NaN.
// A copy to several blocks of a cluster lands in each by itself, and counts on each one's own mbarrier.
// Also checked: mbarrier use before init or its fence, over-arrival, descriptors equal in a warpgroup, wgmma.fence,
// operands that TMA still writes when wgmma is issued (a later wait on their mbarrier would hide it), copies over such
// places, anything sent to a block of the cluster that has not got its mbarrier ready or that has left,
// another block's words that it may still store, or that it stores while they may be read (both: no barrier between;
// pd_cluster_start is none, it orders mbarriers alone), another block reached between the halves of a barrier,
// plain shared stores not fenced before TMA or wgmma reads them or TMA writes there, tf32 operands that nothing has
// rounded, asynchronous work nobody waited for, registers that setmaxnreg waits for and nobody gives.
// Not modelled: stores to another block's shared memory.
#pragma once

#define PD_TMAP(name) const pd_tmap name
struct alignas(64) pd_tmap { uint64_t opaque[16]; };
static_assert(sizeof(pdemu_tensor_map) <= sizeof(pd_tmap), "CUtensorMap is 128 bytes");

namespace pdemu {
constexpr int WARPGROUP = 128, MBAR_MAGIC = 0xB5;
struct MBarrier { uint64_t magic : 7, fenced : 1, phase : 1, init : 11, pending : 12; int64_t tx : 32; };
static_assert(sizeof(MBarrier) == 8, "an mbarrier has 8 bytes");
// `to`: the block whose shared memory is meant, `bar` its mbarrier; `tap`: offsets of pixels, in im2col mode.
struct Bulk { const pdemu_tensor_map *map; unsigned char *shared; int at[5], owner; uint32_t group; MBarrier *bar; std::vector<unsigned char> seen; Block *to; int tap[3]; };
struct Accumulator { uint32_t *key; int n, pending; uint32_t *registers[WARPGROUP]; uint32_t value[64][256]; };
enum Kind { WG_F16, WG_BF16, WG_TF32, WG_E4M3, WG_E5M2, WG_E4M3E5M2, WG_E5M2E4M3, WG_S8, WG_U8, WG_S8U8, WG_U8S8 };
// operands of a byte come behind the others, integers last
struct Product { uint64_t a, b; Accumulator *acc; Kind kind; int n, scale_d, trans_b; uint32_t group; const uint32_t *rows[WARPGROUP]; };
struct Warpgroup { Meeting meeting; uint32_t groups; std::vector<Product> products; Accumulator acc[4]; };

static std::vector<Bulk> loads;
static unsigned meetings;                             // of the whole cluster, so far
static int arrived;                                   // threads, for the next one
static struct Hopper {                                // of a block
  std::vector<Bulk> stores;
  unsigned meeting[MAX_THREADS], met[MAX_THREADS];    // that a thread arrived for, and waited for, last
  unsigned ordered[MAX_THREADS];                      // that it waited for last, of those that order plain stores
  int registers[MAX_THREADS / WARP], given;           // of a thread of each warp; given back and not taken, of a warp's thread
  Warpgroup groups[MAX_THREADS / WARPGROUP];
  uint32_t store_groups[MAX_THREADS];
  bool wg_fenced[MAX_THREADS];
  struct { MBarrier *bar; unsigned parity; } waits[MAX_THREADS];
  std::vector<uint16_t> dirty;                        // per 16 bytes of shared memory: 1 + thread of an unfenced store
  std::vector<uint32_t> dirty_of[MAX_THREADS];
  std::vector<unsigned> stored, read;                 // per word: meetings that who stored it, or read it from elsewhere, had arrived for
} hopper[MAX_CLUSTER];
static Hopper *own() { return &hopper[B->rank]; }
// What lies in another block where `p` does in this one.
template <class T> static T *in_block(T *p, const Block &b) { return (T *)(b.smem + shared_offset(p)); }

// ---- generic proxy against async proxy --------------------------------------------------------------------------
static void shared_store(const void *p, uint32_t bytes) {
  for (uint32_t w = shared_offset(p) / 4; w <= (shared_offset(p) + bytes - 1) / 4; w++) {
    PD_RULE(own()->read[w] <= own()->ordered[B->current], PDEMU_FAILED, "stored over what another block of the cluster may still read");
    own()->stored[w] = own()->meeting[B->current];
  }
  for (uint32_t c = shared_offset(p) / 16; c <= (shared_offset(p) + bytes - 1) / 16; c++)
    if (own()->dirty[c] != B->current + 1) own()->dirty[c] = (uint16_t)(B->current + 1), own()->dirty_of[B->current].push_back(c);
}
static void check_fenced(const Hopper &h, uint32_t offset, const char *what, int site) {
  PD_RULE(!h.dirty[offset / 16], PDEMU_FAILED, "%s shared memory at line %d that thread %d stored without pd_fence_proxy_async",
          what, site, h.dirty[offset / 16] - 1);
}
// What lies in another block may be anything before a barrier of the cluster has been waited for, and gone behind an arrival.
static void check_together(int rank, int site) {
  PD_RULE(rank == B->rank || own()->meeting[B->current] == own()->met[B->current], PDEMU_FAILED,
          "block %d of the cluster is reached at line %d between arrival and wait", rank, site);
}

// ---- mbarrier ---------------------------------------------------------------------------------------------------
static void settle(MBarrier *m) {
  if (m->pending || m->tx) return;
  unsigned done = m->phase;
  m->phase ^= 1, m->pending = m->init;
  for (Block &b : cluster)
    for (int t = 0; t < b.threads; t++) {
      const auto &w = hopper[b.rank].waits[t];
      if (b.fiber[t].state == WAITING && w.bar == m && w.parity == done) b.fiber[t].state = READY;
    }
}
// The mbarrier at the same place in a block of the cluster. Of another block it must be known to be initialised.
static MBarrier *mbarrier_of(uint64_t *bar, int rank, bool fenced, int site) {
  PD_RULE(rank >= 0 && rank < (int)cluster.size(), PDEMU_FAILED, "block %d of a cluster of %d at line %d", rank, (int)cluster.size(), site);
  check_shared(bar, 8, 8, site);
  check_together(rank, site);
  Block *here = B, *there = &cluster[(size_t)rank];
  PD_RULE(there->live > 0, PDEMU_FAILED, "shared memory of block %d of the cluster, which has left, used at line %d", rank, site);
  MBarrier *m = (MBarrier *)in_block(bar, *there);
  PD_RULE(m->magic == (MBAR_MAGIC & 0x7f), PDEMU_FAILED, "mbarrier used before pd_mbar_init at line %d", site);
  PD_RULE((!fenced && there == here) || m->fenced, PDEMU_FAILED, "mbarrier used by TMA or another block before pd_fence_mbar_init at line %d", site);
  return m;
}
static MBarrier *mbarrier(uint64_t *bar, int site) { return mbarrier_of(bar, B->rank, false, site); }
static void mbar_arrive(MBarrier *m, int site) {
  PD_RULE(m->pending > 0, PDEMU_FAILED, "mbarrier over-arrival at line %d", site);
  m->pending--;
  settle(m);
}

// ---- TMA --------------------------------------------------------------------------------------------------------
static const pdemu_tensor_map *tensor_map(const pd_tmap *t, int rank, int site, bool pixels = false) {
  const pdemu_tensor_map *m = (const pdemu_tensor_map *)t;
  PD_RULE((uint64_t)t % 64 == 0 && m->magic == PDEMU_TENSOR_MAP, PDEMU_FAILED, "not a tensor map at line %d", site);
  PD_RULE(m->rank == rank, PDEMU_FAILED, "tensor map of rank %d used as rank %d at line %d", m->rank, rank, site);
  PD_RULE(pixels == (m->steps[0] > 0), PDEMU_FAILED, "a tensor map of the other mode (tile, im2col) at line %d", site);
  return m;
}
static uint32_t box_bytes(const pdemu_tensor_map *m) {
  uint32_t bytes = m->element_bytes;
  for (int i = 0; i < m->rank; i++) bytes *= m->box[i];
  return bytes;
}
// A float in shared memory to 10 bits of mantissa: to nearest, ties to even; infinities and NaN as they are.
static void round_to_tf32(unsigned char *s) {
  uint32_t x;
  memcpy(&x, s, 4);
  if ((x & 0x7f800000u) != 0x7f800000u) x = (x + 0xfffu + (x >> 13 & 1)) & 0xffffe000u;
  memcpy(s, &x, 4);
}
// Where the element that comes next is in the tensor: in a box, or a channel of the next pixel of a column.
struct Walk {
  const Bulk &q;
  int64_t at[5];
  uint32_t channel = 0;
  explicit Walk(const Bulk &of) : q(of) { std::copy(q.at, q.at + 5, at); }
  int64_t coordinate(uint32_t i, uint32_t d) const {
    const pdemu_tensor_map *m = q.map;
    if (m->steps[0]) return at[d] + (d == 0 ? (int64_t)channel : d + 1u < m->rank ? q.tap[d - 1] : 0);
    for (uint32_t k = 0; k < d; k++) i /= m->box[k];
    return at[d] + i % m->box[d];
  }
  // Past the last channel of a pixel: the next one in the bounding box, in the next image behind the last one.
  void next() {
    const pdemu_tensor_map *m = q.map;
    if (!m->steps[0] || ++channel < m->box[0]) return;
    channel = 0;
    for (int d = 1; d + 1 < m->rank; d++) {
      at[d] += m->steps[d - 1];
      if (at[d] < (int64_t)m->dims[d] + m->upper[d - 1]) return;
      at[d] = m->lower[d - 1];
    }
    at[m->rank - 1]++;
  }
};
// Moves a box element by element: into shared memory with zeros outside the tensor, or out of it, clipped. On the way
// in a map of type tf32 rounds.
static void move_box(const Bulk &q, bool load) {
  const pdemu_tensor_map *m = q.map;
  uint32_t e = m->element_bytes, n = box_bytes(m) / e, start = shared_offset(q.shared);
  Walk walk(q);
  for (uint32_t i = 0; i < n; i++, walk.next()) {
    uint64_t address = m->base;
    bool inside = true;
    for (uint32_t d = 0; d < m->rank; d++) {
      int64_t x = walk.coordinate(i, d);
      inside &= x >= 0 && x < (int64_t)m->dims[d];
      address += (uint64_t)(x * (d ? (int64_t)m->strides[d - 1] : e));
    }
    uint32_t o = start + i * e;
    if (m->swizzle == 3) o ^= (o >> 7 & 7) << 4;
    unsigned char *s = B->smem + o;
    if (inside) check_global((void *)address, e, 1, 0);
    if (broken) return;  // the scheduler got here: fail() only recorded
    if (load && inside) memcpy(s, (void *)address, e);
    if (load && !inside) memset(s, 0, e);
    if (load && m->tf32) round_to_tf32(s);
    if (!load && inside) memcpy((void *)address, s, e);
  }
}
// The manual does not say what becomes of a column that does not begin at a pixel of the walk (in the bounding box, a
// whole number of steps from its lower corner), nor of offsets beyond their bits. Both are refused.
static void check_column(const pdemu_tensor_map *m, const int *at, const int *tap, int site) {
  static const int bits[] = {16, 8, 5};
  for (int d = 1; d + 1 < m->rank; d++) {
    int64_t low = m->lower[d - 1], high = (int64_t)m->dims[d] + m->upper[d - 1];
    PD_RULE(at[d] >= low && at[d] < high, PDEMU_FAILED, "a column of pixels at line %d begins at %d of dim %d, outside its bounding box from %d to %d",
            site, at[d], d, (int)low, (int)high - 1);
    PD_RULE((at[d] - low) % m->steps[d - 1] == 0, PDEMU_FAILED, "a column of pixels at line %d begins at %d of dim %d, between the steps of %d from %d on",
            site, at[d], d, m->steps[d - 1], (int)low);
    PD_RULE(tap[d - 1] >= 0 && tap[d - 1] < 1 << bits[m->rank - 3], PDEMU_FAILED, "the offset %d of dim %d at line %d has more than %d bits",
            tap[d - 1], d, site, bits[m->rank - 3]);
  }
}
// A copy to the same place in all blocks of a mask, this one alone if the mask is 0. `tap`: in im2col mode.
static void issue_load(void *s, const pd_tmap *t, int rank, const int *at, uint64_t *bar, int mask, int site, const int *tap = nullptr) {
  const pdemu_tensor_map *m = tensor_map(t, rank, site, tap != nullptr);
  if (tap) check_column(m, at, tap, site);
  uint32_t bytes = box_bytes(m);
  check_begun(site);
  check_shared(s, bytes, m->swizzle ? 1024 : 128, site);
  mask = mask ? mask : 1 << B->rank;
  for (int block = 0; mask >> block; block++)
    if (mask >> block & 1) {
      Bulk q = {m, nullptr, {0}, B->current, 0, mbarrier_of(bar, block, true, site), {}, nullptr, {0}};
      q.to = &cluster[(size_t)block], q.shared = in_block((unsigned char *)s, *q.to);
      std::copy(at, at + rank, q.at);
      if (tap) std::copy(tap, tap + rank - 2, q.tap);
      for (const Bulk &o : loads)
        PD_RULE(q.shared + bytes <= o.shared || o.shared + box_bytes(o.map) <= q.shared, PDEMU_FAILED,
                "TMA at line %d overwrites what another copy still writes", site);
      for (uint32_t o = 0, start = (uint32_t)(q.shared - q.to->smem); o < bytes; o += 16)
        check_fenced(hopper[block], start + o, "TMA overwrites", site);
      memset(q.shared, 0xff, bytes);
      loads.push_back(q);
    }
  count(PDEMU_TMA);
}
static bool land_one_load() {
  if (loads.empty()) return false;
  Bulk q = B->reverse ? loads.back() : loads.front();
  loads.erase(B->reverse ? loads.end() - 1 : loads.begin());
  B = q.to;
  PD_RULE(B->live > 0, PDEMU_FAILED, "a TMA copy to a block that has left");
  move_box(q, true);
  q.bar->tx -= box_bytes(q.map);
  settle(q.bar);
  return !broken;
}
static void issue_store(const pd_tmap *t, const void *s, int rank, const int *at, int site) {
  const pdemu_tensor_map *m = tensor_map(t, rank, site);
  check_begun(site);
  check_shared(s, box_bytes(m), m->swizzle ? 1024 : 128, site);
  for (uint32_t o = 0; o < box_bytes(m); o += 16) check_fenced(*own(), shared_offset(s) + o, "TMA reads", site);
  const unsigned char *p = (const unsigned char *)s;
  Bulk q = {m, (unsigned char *)s, {0}, B->current, own()->store_groups[B->current], nullptr, {p, p + box_bytes(m)}, B, {0}};
  std::copy(at, at + rank, q.at);
  own()->stores.push_back(q);
  count(PDEMU_TMA);
}
static void retire_stores(uint32_t keep, int site) {
  auto done = [keep](const Bulk &q) { return q.owner == B->current && q.group + keep < own()->store_groups[B->current]; };
  for (const Bulk &q : own()->stores)
    if (done(q)) {
      PD_RULE(std::equal(q.seen.begin(), q.seen.end(), q.shared), PDEMU_FAILED,
              "a TMA store that is waited for at line %d reads shared memory that was written after it was issued", site);
      move_box(q, false);
    }
  own()->stores.erase(std::remove_if(own()->stores.begin(), own()->stores.end(), done), own()->stores.end());
}

// ---- wgmma ------------------------------------------------------------------------------------------------------
template <class F>
static void warpgroup_collective(const char *what, int site, const void *a0, const void *a1, F act) {
  Fiber *f = self();
  f->arg[0] = a0, f->arg[1] = a1;
  int w = B->current / WARPGROUP;
  PD_RULE((w + 1) * WARPGROUP <= B->threads, PDEMU_FAILED, "%s at line %d outside a whole warpgroup", what, site);
  if (!arrive(own()->groups[w].meeting, WARPGROUP, what, site)) return wait(what, site);
  for (int i = 0; i < WARPGROUP / WARP; i++) settle_accesses(w * 4 + i);
  act(own()->groups[w], &B->fiber[w * WARPGROUP]);
  wake(w * WARPGROUP, (w + 1) * WARPGROUP);
}
// The accumulator element that register i of a thread holds (PTX ISA, "Register Fragments for wgmma").
template <class F> static void each_register(Accumulator &acc, F f) {
  for (int t = 0; t < WARPGROUP; t++)
    for (int i = 0; i < acc.n / 2; i++)
      f(acc.value[t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + t % 4 * 2 + i % 2], acc.registers[t][i]);
}
// Element (row, k) of an operand of `e`-byte elements, 128-byte swizzle. K-major: 8-row groups SBO apart.
// MN-major (16-bit): panels of 64 rows LBO apart, 8-k groups SBO apart.
static uint32_t operand(uint64_t d, int row, int k, int e, bool mn_major) {
  uint32_t start = (d & 0x3fff) << 4, lbo = (d >> 16 & 0x3fff) << 4, sbo = (d >> 32 & 0x3fff) << 4, word = 0;
  uint32_t o = mn_major ? start + row / 64 * lbo + k / 8 * sbo + k % 8 * 128 + row % 64 * 2
                        : start + row / 8 * sbo + row % 8 * 128 + k * e;
  o ^= (o >> 7 & 7) << 4;
  PD_RULE(o + e <= B->smem_bytes, PDEMU_ILLEGAL_ADDRESS, "wgmma descriptor reaches offset %u of %u bytes of shared memory", o,
          B->smem_bytes);
  check_fenced(*own(), o, "wgmma reads", 0);
  memcpy(&word, B->smem + o, (size_t)e);
  return word;
}
template <class Acc> static Acc decode(Kind kind, bool is_a, uint32_t word) {
  switch (kind) {
    case WG_F16: return (Acc)F16()(word, 0);
    case WG_BF16: return (Acc)BF16()(word, 0);
    case WG_TF32:
      PD_RULE(!(word & 0x1fffu) || (word & 0x7fffffffu) > 0x7f800000u, PDEMU_FAILED,
              "wgmma.tf32: operand %08x is not rounded to tf32, the hardware would truncate it", word);
      return (Acc)TF32()(word, 0);
    case WG_E4M3: return (Acc)E4M3()(word, 0);
    case WG_E5M2: return (Acc)E5M2()(word, 0);
    case WG_E4M3E5M2: return is_a ? (Acc)E4M3()(word, 0) : (Acc)E5M2()(word, 0);
    case WG_E5M2E4M3: return is_a ? (Acc)E5M2()(word, 0) : (Acc)E4M3()(word, 0);
    case WG_U8: return (Acc)U8()(word, 0);
    case WG_U8S8: return is_a ? (Acc)U8()(word, 0) : (Acc)S8()(word, 0);
    case WG_S8U8: return is_a ? (Acc)S8()(word, 0) : (Acc)U8()(word, 0);
    default: return (Acc)S8()(word, 0);
  }
}
template <class Acc> static void multiply(const Product &p) {
  static Acc a[64][32], b[32][256], d[256];
  int e = p.kind == WG_TF32 ? 4 : p.kind >= WG_E4M3 ? 1 : 2, K = 32 / e;
  for (int k = 0; k < K; k++) {
    for (int r = 0; r < 64 && !p.rows[0]; r++) a[r][k] = decode<Acc>(p.kind, true, operand(p.a, r, k, e, false));
    for (int c = 0; c < p.n; c++) b[k][c] = decode<Acc>(p.kind, false, operand(p.b, c, k, e, p.trans_b));
  }
  for (int t = 0; t < WARPGROUP && p.rows[0]; t++)  // read at the wait, so that registers used again too early are seen
    for (int i = 0; i < 8; i++)
      a[t / 32 * 16 + t % 32 / 4 + i / 2 % 2 * 8][i / 4 * 8 + t % 4 * 2 + i % 2] =
          decode<Acc>(p.kind, true, p.rows[t][i / 2] >> i % 2 * 16 & 0xffff);
  for (int r = 0; r < 64; r++) {
    if (p.scale_d) memcpy(d, p.acc->value[r], sizeof d);
    else memset(d, 0, sizeof d);
    if (p.kind >= WG_E4M3 && p.kind < WG_S8) {
      for (int c = 0; c < p.n; c++) {
        float products[32];
        for (int k = 0; k < K; k++) products[k] = (float)(a[r][k] * b[k][c]);
        d[c] = (Acc)aligned_sum((float)d[c], products, K);
      }
    } else {
      for (int k = 0; k < K; k++)
        for (int c = 0; c < p.n; c++) d[c] += a[r][k] * b[k][c];
    }
    memcpy(p.acc->value[r], d, sizeof d);
  }
}
static Accumulator *accumulator(Warpgroup &w, Fiber *lanes, int n, int site) {
  uint32_t *key = (uint32_t *)lanes[0].arg[0];
  Accumulator *free_one = nullptr;
  for (Accumulator &x : w.acc) {
    if (x.pending && x.key == key) return &x;
    if (!x.pending) free_one = &x;
  }
  PD_RULE(free_one, PDEMU_FAILED, "more than 4 accumulator tiles in flight at line %d", site);
  free_one->key = key, free_one->n = n;
  for (int t = 0; t < WARPGROUP; t++) free_one->registers[t] = (uint32_t *)lanes[t].arg[0];
  each_register(*free_one, [](uint32_t &value, uint32_t &reg) { value = reg, reg = 0xffffffffu; });
  return free_one;
}
// An operand that TMA still writes: the wait on its mbarrier is missing.
static void check_landed(uint64_t descriptor, int site) {
  uint32_t start = (descriptor & 0x3fff) << 4;
  for (const Bulk &q : loads) {
    uint32_t from = (uint32_t)(q.shared - q.to->smem);
    PD_RULE(q.to != B || start < from || start >= from + box_bytes(q.map), PDEMU_FAILED, "wgmma at line %d reads what a TMA copy still writes", site);
  }
}
static void issue_wgmma(const char *what, Kind kind, int n, void *d, uint64_t da, uint64_t db, int scale_d, int trans_b, int site,
                        const uint32_t *rows = nullptr) {
  const Product mine = {da, db, nullptr, kind, n, scale_d != 0, trans_b, 0, {rows}};
  PD_RULE(own()->wg_fenced[B->current], PDEMU_FAILED, "wgmma at line %d without pd_wgmma_fence since the last commit", site);
  PD_RULE(!((da | db) & 0x38), PDEMU_FAILED, "wgmma descriptor at line %d does not start in row 0 of a 1024-byte atom", site);
  if (!rows) check_landed(da, site);
  check_landed(db, site);
  warpgroup_collective(what, site, d, &mine, [&mine, site](Warpgroup &w, Fiber *lanes) {
    Product p = mine;
    for (int t = 0; t < WARPGROUP; t++) {
      const Product *q = (const Product *)lanes[t].arg[1];
      p.rows[t] = q->rows[0];
      PD_RULE(q->a == p.a && q->b == p.b && q->scale_d == p.scale_d, PDEMU_FAILED,
              "wgmma operands differ in a warpgroup at line %d", site);
    }
    p.acc = accumulator(w, lanes, p.n, site), p.group = w.groups, p.acc->pending++;
    w.products.push_back(p);
    count(PDEMU_WGMMA);
  });
}
static void retire_wgmma(uint32_t keep, int site) {
  warpgroup_collective("wgmma.wait_group", site, nullptr, nullptr, [keep](Warpgroup &w, Fiber *) {
    auto done = [&w, keep](const Product &p) { return p.group + keep < w.groups; };
    for (const Product &p : w.products)
      if (done(p)) {
        p.kind >= WG_S8 ? multiply<int32_t>(p) : multiply<float>(p);
        if (--p.acc->pending == 0) each_register(*p.acc, [](uint32_t &value, uint32_t &reg) { reg = value; });
      }
    w.products.erase(std::remove_if(w.products.begin(), w.products.end(), done), w.products.end());
  });
}

// ---- per block --------------------------------------------------------------------------------------------------
static void hopper_reset() {
  meetings = 0, arrived = 0, own()->given = 0;
  std::fill_n(own()->registers, MAX_THREADS / WARP, B->registers);
  loads.clear(), own()->stores.clear();
  own()->dirty.assign(B->smem_bytes / 16 + 1, 0);
  own()->stored.assign(B->smem_bytes / 4 + 1, 0), own()->read.assign(B->smem_bytes / 4 + 1, 0);
  for (Warpgroup &w : own()->groups) {
    w.products.clear(), w.groups = 0, w.meeting.arrived = 0;
    for (Accumulator &x : w.acc) x.pending = 0;
  }
  for (int t = 0; t < MAX_THREADS; t++) own()->dirty_of[t].clear(), own()->store_groups[t] = 0, own()->wg_fenced[t] = false, own()->waits[t].bar = nullptr, own()->meeting[t] = own()->met[t] = own()->ordered[t] = 0;
}
static void hopper_finish() {
  PD_RULE(loads.empty(), PDEMU_FAILED, "a TMA copy was never waited for");
  PD_RULE(own()->stores.empty(), PDEMU_FAILED, "a TMA store was never waited for");
  for (int w = 0; w < B->threads / WARP; w++)
    PD_RULE(own()->registers[w] == own()->registers[w / 4 * 4], PDEMU_FAILED, "setmaxnreg by some warps of a warpgroup");
  for (const Warpgroup &w : own()->groups) PD_RULE(w.products.empty(), PDEMU_FAILED, "a wgmma was never waited for");
}
[[maybe_unused]] static const bool hopper_installed =
    (hardware_step = land_one_load, hardware_reset = hopper_reset, hardware_finish = hopper_finish, on_shared_store = shared_store, true);
}  // namespace pdemu

// ---- primitives -------------------------------------------------------------------------------------------------
PD_DEV int pd_cluster_rank() { return pdemu::B->rank; }
PD_DEV void pd_cluster_arrive(PD_SITE) {
  using namespace pdemu;
  unsigned &mine = own()->meeting[B->current];
  PD_RULE(mine <= meetings, PDEMU_FAILED, "cluster barrier: a second arrival at line %d without a wait", site);
  for (const Block &b : cluster)
    PD_RULE(b.live == b.threads, PDEMU_FAILED, "cluster barrier at line %d: threads of block %d have left the kernel", site, b.rank);
  mine = meetings + 1;
  if (++arrived < B->threads * (int)cluster.size()) return;
  arrived = 0, meetings++;
  for (Block &b : cluster)
    for (int t = 0; t < b.threads; t++)
      if (b.fiber[t].state == WAITING && b.fiber[t].arg[0] == &meetings) b.fiber[t].state = READY;
}
namespace pdemu {
static void cluster_wait(int site) {
  PD_RULE(own()->meeting[B->current] > own()->met[B->current], PDEMU_FAILED, "cluster barrier: a wait at line %d without an arrival", site);
  own()->met[B->current] = own()->meeting[B->current];
  self()->arg[0] = &meetings;
  while (meetings < own()->meeting[B->current]) wait("cluster barrier", site);
}
}  // namespace pdemu
PD_DEV void pd_cluster_wait(PD_SITE) {
  using namespace pdemu;
  cluster_wait(site);
  own()->ordered[B->current] = own()->met[B->current];
}
PD_DEV void pd_cluster_start(PD_SITE) { pd_cluster_arrive(site), pdemu::cluster_wait(site); }
template <int N, class R> PD_DEV void pd_lds_wide_at(R *r, const void *p, int block, PD_SITE) {
  using namespace pdemu;
  PD_RULE(block >= 0 && block < (int)cluster.size(), PDEMU_FAILED, "block %d of a cluster of %d at line %d", block, (int)cluster.size(), site);
  check_shared(p, N * 4, N * 4, site);
  check_together(block, site);
  const Block &there = cluster[(size_t)block];
  Hopper &of = hopper[block];
  PD_RULE(there.live == there.threads, PDEMU_FAILED, "shared memory of block %d of the cluster, which has left, used at line %d", block, site);
  for (uint32_t w = shared_offset(p) / 4; w < shared_offset(p) / 4 + N; w++) {
    PD_RULE(of.stored[w] < own()->ordered[B->current], PDEMU_FAILED, "read at line %d from block %d, with no barrier of the cluster behind the store", site, block);
    of.read[w] = std::max(of.read[w], own()->meeting[B->current] + 1);
  }
  note(true, shared_offset(p), N * 4, site);
  memcpy(r, in_block((unsigned char *)p, there), N * 4);
}
template <class T> PD_DEV T pd_lds_at(const T *p, int block, PD_SITE) {
  T v;
  pd_lds_wide_at<1>(&v, p, block, site);
  return v;
}
PD_DEV uint32_t pd_saddr(const void *p) { return pdemu::shared_offset(p); }
PD_DEV void pd_mbar_init(uint64_t *b, int arrivals, PD_SITE) {
  pdemu::check_shared(b, 8, 8, site);
  pdemu::MBarrier *m = (pdemu::MBarrier *)b;
  m->magic = pdemu::MBAR_MAGIC & 0x7f, m->fenced = 0, m->phase = 0, m->tx = 0;
  m->init = (unsigned)arrivals, m->pending = (unsigned)arrivals;
  pdemu::shared_store(b, 8);
}
PD_DEV void pd_fence_mbar_init() {
  using namespace pdemu;
  for (uint32_t c : own()->dirty_of[B->current])
    for (int half = 0; half < 2; half++) {
      MBarrier *m = (MBarrier *)(B->smem + c * 16 + half * 8);
      if (m->magic == (MBAR_MAGIC & 0x7f)) m->fenced = 1;
    }
}
PD_DEV void pd_mbar_arrive(uint64_t *b, PD_SITE) { pdemu::mbar_arrive(pdemu::mbarrier(b, site), site); }
PD_DEV void pd_mbar_arrive_at(uint64_t *b, int block, PD_SITE) { pdemu::mbar_arrive(pdemu::mbarrier_of(b, block, false, site), site); }
PD_DEV void pd_mbar_expect_tx(uint64_t *b, int bytes, PD_SITE) {
  pdemu::MBarrier *m = pdemu::mbarrier(b, site);
  m->tx += bytes;
  pdemu::mbar_arrive(m, site);
}
PD_DEV void pd_mbar_wait(uint64_t *b, int parity, PD_SITE) {
  using namespace pdemu;
  MBarrier *m = mbarrier(b, site);
  own()->waits[B->current] = {m, (unsigned)parity & 1};
  self()->arg[0] = m;
  while (m->phase == ((unsigned)parity & 1)) wait("mbarrier wait", site);
  own()->waits[B->current].bar = nullptr;
}
// Loads have the box's coordinates, then the mbarrier; a copy to several blocks of the cluster also their mask.
#define PD_TMA_LOAD(rank, xs, list)                                                                                   \
  PD_DEV void pd_tma_load_##rank##d(void *s, const pd_tmap *t, PD_ARGS xs, uint64_t *bar, PD_SITE) {                   \
    const int at[] = {PD_ARGS list};                                                                                  \
    pdemu::issue_load(s, t, rank, at, bar, 0, site);                                                                  \
  }                                                                                                                   \
  PD_DEV void pd_tma_load_##rank##d_to(void *s, const pd_tmap *t, PD_ARGS xs, uint64_t *bar, int blocks, PD_SITE) {     \
    const int at[] = {PD_ARGS list};                                                                                  \
    pdemu::issue_load(s, t, rank, at, bar, blocks, site);                                                             \
  }
#define PD_ARGS(...) __VA_ARGS__
PD_TMA_LOAD(2, (int x, int y), (x, y))
PD_TMA_LOAD(3, (int x, int y, int z), (x, y, z))
PD_TMA_LOAD(4, (int x, int y, int z, int w), (x, y, z, w))
#undef PD_TMA_LOAD
#undef PD_ARGS
PD_DEV void pd_tma_pixels_3d(void *s, const pd_tmap *t, int c, int w, int n, int kw, uint64_t *bar, PD_SITE) {
  const int at[] = {c, w, n}, tap[] = {kw};
  pdemu::issue_load(s, t, 3, at, bar, 0, site, tap);
}
PD_DEV void pd_tma_pixels_4d(void *s, const pd_tmap *t, int c, int w, int h, int n, int kw, int kh, uint64_t *bar, PD_SITE) {
  const int at[] = {c, w, h, n}, tap[] = {kw, kh};
  pdemu::issue_load(s, t, 4, at, bar, 0, site, tap);
}
PD_DEV void pd_tma_pixels_5d(void *s, const pd_tmap *t, int c, int w, int h, int d, int n, int kw, int kh, int kd, uint64_t *bar, PD_SITE) {
  const int at[] = {c, w, h, d, n}, tap[] = {kw, kh, kd};
  pdemu::issue_load(s, t, 5, at, bar, 0, site, tap);
}
PD_DEV void pd_tma_store_2d(const pd_tmap *t, const void *s, int x, int y, PD_SITE) {
  int at[] = {x, y};
  pdemu::issue_store(t, s, 2, at, site);
}
PD_DEV void pd_tma_store_3d(const pd_tmap *t, const void *s, int x, int y, int z, PD_SITE) {
  int at[] = {x, y, z};
  pdemu::issue_store(t, s, 3, at, site);
}
PD_DEV void pd_tma_store_4d(const pd_tmap *t, const void *s, int x, int y, int z, int w, PD_SITE) {
  int at[] = {x, y, z, w};
  pdemu::issue_store(t, s, 4, at, site);
}
PD_DEV void pd_tma_store_commit() { pdemu::own()->store_groups[pdemu::B->current]++; }
template <int N> PD_DEV void pd_tma_store_wait_read(PD_SITE) { pdemu::retire_stores(N, site); }
template <int N> PD_DEV void pd_tma_store_wait(PD_SITE) { pdemu::retire_stores(N, site); }
PD_DEV void pd_tma_prefetch(const pd_tmap *t, PD_SITE) {
  PD_RULE(((const pdemu_tensor_map *)t)->magic == PDEMU_TENSOR_MAP, PDEMU_FAILED, "not a tensor map at line %d", site);
}
PD_DEV void pd_fence_proxy_async() {
  using namespace pdemu;
  for (uint32_t c : own()->dirty_of[B->current])
    if (own()->dirty[c] == B->current + 1) own()->dirty[c] = 0;
  own()->dirty_of[B->current].clear();
}
namespace pdemu {
// A warp's threads have `wanted` registers from here on: who wants more waits for what other warps give back.
static void set_registers(int wanted, bool more, int site) {
  int &has = own()->registers[B->current / WARP], &given = own()->given;
  PD_RULE(more ? wanted >= has : wanted <= has, PDEMU_FAILED, "setmaxnreg %d at line %d, where a thread has %d registers", wanted, site, has);
  warp_collective("setmaxnreg", site, nullptr, nullptr, nullptr, [](Fiber *) {});
  self()->arg[0] = &given;
  while (given < wanted - has) wait("setmaxnreg", site);  // 0 for all but the first thread of the warp
  given -= wanted - has, has = wanted;
  for (int t = 0; t < B->threads; t++)
    if (B->fiber[t].state == WAITING && B->fiber[t].arg[0] == &given) B->fiber[t].state = READY;
}
}  // namespace pdemu
template <int R> PD_DEV void pd_reg_inc(PD_SITE) {
  static_assert(R % 8 == 0 && R >= 24 && R <= 256, "setmaxnreg");
  pdemu::set_registers(R, true, site);
}
template <int R> PD_DEV void pd_reg_dec(PD_SITE) {
  static_assert(R % 8 == 0 && R >= 24 && R <= 256, "setmaxnreg");
  pdemu::set_registers(R, false, site);
}
PD_DEV void pd_wgmma_fence() { pdemu::own()->wg_fenced[pdemu::B->current] = true; }
PD_DEV void pd_wgmma_commit() {
  using namespace pdemu;
  own()->wg_fenced[B->current] = false;
  if (B->current % WARPGROUP == 0) own()->groups[B->current / WARPGROUP].groups++;
}
template <int N> PD_DEV void pd_wgmma_wait(PD_SITE) { pdemu::retire_wgmma(N, site); }
#define PD_WGMMA_HALF(n, type, kind)                                                                                  \
  template <int TB> PD_DEV void pd_wgmma_m64n##n##k16_##type(float *d, uint64_t a, uint64_t b, int scale_d, PD_SITE) { \
    pdemu::issue_wgmma("wgmma." #type ".n" #n, pdemu::kind, n, d, a, b, scale_d, TB, site);                           \
  }
#define PD_WGMMA_K(n, ks, type, kind, acc)                                                                             \
  PD_DEV void pd_wgmma_m64n##n##k##ks##_##type(acc *d, uint64_t a, uint64_t b, int scale_d, PD_SITE) {                 \
    pdemu::issue_wgmma("wgmma." #type ".n" #n, pdemu::kind, n, d, a, b, scale_d, 0, site);                            \
  }
#define PD_WGMMA(n)                                                                                                   \
  PD_WGMMA_HALF(n, f16, WG_F16) PD_WGMMA_HALF(n, bf16, WG_BF16) PD_WGMMA_K(n, 8, tf32, WG_TF32, float)                \
  PD_WGMMA_K(n, 32, e4m3, WG_E4M3, float) PD_WGMMA_K(n, 32, e5m2, WG_E5M2, float)                                    \
  PD_WGMMA_K(n, 32, e4m3e5m2, WG_E4M3E5M2, float) PD_WGMMA_K(n, 32, e5m2e4m3, WG_E5M2E4M3, float)                    \
  PD_WGMMA_K(n, 32, s8, WG_S8, int32_t) PD_WGMMA_K(n, 32, u8, WG_U8, int32_t)                                        \
  PD_WGMMA_K(n, 32, s8u8, WG_S8U8, int32_t) PD_WGMMA_K(n, 32, u8s8, WG_U8S8, int32_t)
PD_WGMMA(32) PD_WGMMA(64) PD_WGMMA(96) PD_WGMMA(128) PD_WGMMA(192) PD_WGMMA(256)
#undef PD_WGMMA
#define PD_WGMMA_RS(n, type, kind)                                                                                     \
  template <int TB> PD_DEV void pd_wgmma_rs_m64n##n##k16_##type(float *d, const uint32_t *a, uint64_t b, int scale_d, PD_SITE) { \
    pdemu::issue_wgmma("wgmma.rs." #type ".n" #n, pdemu::kind, n, d, 0, b, scale_d, TB, site, a);                      \
  }
#define PD_WGMMA_RS2(n) PD_WGMMA_RS(n, f16, WG_F16) PD_WGMMA_RS(n, bf16, WG_BF16)
PD_WGMMA_RS2(32) PD_WGMMA_RS2(64) PD_WGMMA_RS2(128) PD_WGMMA_RS2(192) PD_WGMMA_RS2(256)
#undef PD_WGMMA_RS
#undef PD_WGMMA_RS2
template <int R> PD_DEV void pd_wgmma_keep(float *) {}
template <int R> PD_DEV void pd_wgmma_keep(uint32_t *) {}
