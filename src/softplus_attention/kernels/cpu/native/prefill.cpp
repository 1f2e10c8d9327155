// Attention over ranges of keys, forward and backward: docs/method.md in blocks of rows, as ../chunked.py computes it.
//
// A block is some rows of one head. Scores are stored as [key][row]. Sums over keys are then sums of vectors, products
// with queries and gradients read K and V in their own layout, and each row is one lane.
// Logarithms and exponentials are in base 2: f here is softplus / ln 2.

#include "native.h"

#include <ATen/Parallel.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/zeros.h>

#include <atomic>
#include <cmath>
#include <optional>
#include <string>
#include <vector>

namespace softplus_attention {
namespace {

using at::Tensor;

constexpr int64_t LANES = 64;           // rows per block
constexpr int64_t KEYS = 60;            // keys whose scores and values fit into the L1 cache together
constexpr int64_t WORTH_THREADS = 1 << 15;  // (row, key) pairs; fewer are not worth threads
constexpr int64_t LARGEST_POWER = 1 << 16;  // a larger one needs u = 1 exactly: ../chunked.py
constexpr int64_t HEADS_AT_ONCE = 8;    // key heads that keep all threads busy in the backward

enum class Kind { none, integer, real };

// Rows of a float32 tensor (B, H, T, D).
struct Rows {
  const float* data;
  int64_t batch, head, row;
  explicit Rows(const Tensor& x)
      : data(x.const_data_ptr<float>()), batch(x.stride(0)), head(x.stride(1)), row(x.stride(2)) {}
  const float* at(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * row; }
};

// x, or a float32 copy whose rows are padded with zeros to whole vectors.
Tensor whole_vectors(const Tensor& x) {
  int64_t width = rounded_up(x.size(3), WIDTH);
  if (x.scalar_type() == at::kFloat && width == x.size(3) && x.stride(3) == 1) return x;
  auto options = x.options().dtype(at::kFloat);
  auto shape = {x.size(0), x.size(1), x.size(2), width};
  Tensor copy = width == x.size(3) ? at::empty(shape, options) : at::zeros(shape, options);
  copy.narrow(3, 0, x.size(3)).copy_(x);
  return copy;
}

// x, or a copy without gaps between the rows of a head. Models transpose (B, T, H, D), so rows are KiBs apart. They map
// to a few sets of the L1 cache, and every block of rows reads them again.
Tensor close_rows(const Tensor& x, int64_t reads) {
  return reads > 4 * LANES && x.stride(2) != x.size(3) ? x.contiguous() : x;
}

// Converts an internal tensor, float32 with rows of whole vectors, to the dtype and width of ``like``.
Tensor as_given(const Tensor& x, const Tensor& like) {
  return x.narrow(3, 0, like.size(3)).to(like.scalar_type()).contiguous();
}

template <class Work>
void for_each(int64_t items, int64_t pairs, const Work& work) {
  int64_t threads = pairs < WORTH_THREADS ? 1 : std::min<int64_t>(at::get_num_threads(), items);
  if (threads <= 1) {
    for (int64_t i = 0; i < items; i++) work(i, 0);
    return;
  }
  std::atomic<int64_t> next{0};
  at::parallel_for(0, threads, 1, [&](int64_t begin, int64_t end) {
    for (int64_t thread = begin; thread < end; thread++)
      for (int64_t i = next++; i < items; i = next++) work(i, thread);
  });
}

double exact_sum(Vector x) {
  double total = 0;
  for (int i = 0; i < WIDTH; i++) total += x[i];
  return total;
}

// For each sequence, the range from the first to the last visible key, or from the first to the last row that sees a
// key. Anything outside may be uninitialized.
using Seen = std::vector<std::pair<int64_t, int64_t>>;

struct Norms {
  bool finite, normal, moderate;  // normal: no finite norm is near float32's limits; moderate: nor a product
};

// 1 / |x| of each row; 0 for a zero row, NaN for one that is not finite.
Norms inverse_norms(const Tensor& x, const Seen& seen, float* found) {
  Rows rows(x);
  int64_t heads = x.size(1), length = x.size(2), width = x.size(3);
  std::atomic<bool> all_finite{true}, all_normal{true}, all_moderate{true};
  at::parallel_for(0, x.size(0) * heads, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, length * width)),
                   [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++)
      for (int64_t i = seen[item / heads].first; i < seen[item / heads].second; i++) {
        const float* row = rows.at(item / heads, item % heads, i);
        Vector squares{}, high{};
        for (int64_t d = 0; d < width; d += WIDTH) high = largest(high, largest(load(row + d), -load(row + d)));
        float size = largest(high);
        // A power of two keeps the squares in the range of float32 without rounding.
        float scale = size > 0 ? std::ldexp(1.f, -std::ilogb(size)) : 1;
        for (int64_t d = 0; d < width; d += WIDTH) {
          Vector y = load(row + d) * scale;
          squares += y * y;
        }
        double square = exact_sum(squares);
        bool zero = size == 0 && square == 0, finite = std::isfinite(square);
        if (!finite) all_finite = false;
        if (finite && !zero && !(size > 0x1p-90f && size < 0x1p90f)) all_normal = false;
        if (finite && !zero && !(size > 0x1p-40f && size < 0x1p40f)) all_moderate = false;
        found[item * length + i] = zero ? 0 : finite ? scale / std::sqrt(square) : NAN;
      }
  });
  return {all_finite, all_normal, all_moderate};
}

bool is_finite(const Tensor& x, const Seen& seen) {
  Rows rows(x);
  int64_t heads = x.size(1), length = x.size(2), width = x.size(3);
  std::atomic<bool> fine{true};
  at::parallel_for(0, x.size(0) * heads, std::max<int64_t>(1, 16384 / std::max<int64_t>(1, length * width)),
                   [&](int64_t begin, int64_t end) {
    for (int64_t item = begin; item < end; item++) {
      Vector none{};
      for (int64_t i = seen[item / heads].first; i < seen[item / heads].second; i++)
        for (int64_t d = 0; d < width; d += WIDTH)
          none += load(rows.at(item / heads, item % heads, i) + d) * 0.f;
      if (!(sum(none) == 0)) fine = false;
    }
  });
  return fine;
}

// x as rows of bfloat16 pairs; copied only if it cannot be read that way.
Tensor halves(const Tensor& x) {
  bool even = x.stride(3) == 1 && reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 4 == 0;
  for (int d = 0; d < 3; d++) even = even && x.stride(d) % 2 == 0;
  return even ? x : x.contiguous();
}

// Rows of pairs of a tensor (B, H, T, D / 2).
struct PairRows {
  const Pair* data;
  int64_t batch, head, row;
  explicit PairRows(const Tensor& x)
      : data(static_cast<const Pair*>(x.const_data_ptr())), batch(x.stride(0) / 2), head(x.stride(1) / 2),
        row(x.stride(2) / 2) {}
  const Pair* at(int64_t b, int64_t h, int64_t i) const { return data + b * batch + h * head + i * row; }
};

struct Block {
  int64_t row, rows;         // first row, number of rows
  int32_t low, high;         // keys that at least one row sees
  int32_t all_from, all_to;  // keys that all rows see
};

// Rows with disjoint ranges (packed documents) go into different blocks.
std::vector<Block> blocks_of(const int32_t* start, const int32_t* end, int64_t length) {
  std::vector<Block> blocks;
  for (int64_t row = 0; row < length; row++) {
    int32_t from = start[row], to = end[row];
    bool none = from >= to;
    if (!blocks.empty()) {
      Block& last = blocks.back();
      bool bare = last.low == last.high, apart = !none && !bare && (from >= last.high || to <= last.low);
      if (last.rows < LANES && !(apart && last.rows >= WIDTH)) {
        last.rows++;
        if (none) {
          last.all_to = INT32_MIN;
        } else {
          last.low = bare ? from : std::min(last.low, from), last.high = bare ? to : std::max(last.high, to);
          last.all_from = std::max(last.all_from, from), last.all_to = std::min(last.all_to, to);
        }
        continue;
      }
    }
    if (none) from = to = 0;
    blocks.push_back({row, 1, from, to, from, none ? INT32_MIN : to});
  }
  return blocks;
}

// The checked inputs of a call.
struct Problem {
  int64_t batch, heads, key_heads, shared, length, keys, width, value_width, first;
  Tensor q, k, v;              // float32, rows of whole vectors; k and v start at ``first``
  Tensor start, end;           // (1 or B, T_q), relative to ``first``
  Tensor query_norms, key_norms;  // 1 / |x|
  std::vector<std::vector<Block>> blocks;  // per sequence, or one for all
  int64_t longest = 0, pairs = 0;
  Kind kind = Kind::none;
  int integer = 0;
  float power = 1;
  Tensor power_rows;           // (B, H, T_q), expanded
  std::vector<double> by_length;
  bool offset = true;
  double score_scale = 1;
  bool normalized_keys = false;
  // For bfloat16 inputs, products use bfloat16: q, k, v and grad_out as given, and rounded weights.
  bool half = false;
  Tensor q_half, k_half, v_half, v_pairs;  // v_pairs: keys 2i and 2i + 1 as row i; 0 for a key that no row sees

  const std::vector<Block>& blocks_of_sequence(int64_t b) const { return blocks[blocks.size() == 1 ? 0 : b]; }
  const int32_t* starts(int64_t b) const {
    return start.const_data_ptr<int32_t>() + (start.size(0) == 1 ? 0 : b * length);
  }
  const int32_t* ends(int64_t b) const { return end.const_data_ptr<int32_t>() + (end.size(0) == 1 ? 0 : b * length); }
};

void take_halves(Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, const Seen& seen) {
  p.q_half = halves(q), p.k_half = halves(k.narrow(2, p.first, p.keys)), p.v_half = halves(v.narrow(2, p.first, p.keys));
  for (auto& blocks : p.blocks)  // keys come in pairs; no row of the block sees an added key
    for (Block& block : blocks) block.low &= ~1, p.longest = std::max<int64_t>(p.longest, block.high - block.low);
  int64_t pairs = (p.keys + 1) / 2;
  p.v_pairs = at::empty({p.batch, p.key_heads, pairs, p.value_width}, q.options().dtype(at::kInt));
  Rows rows(p.v);
  at::parallel_for(0, p.batch * p.key_heads, 1, [&](int64_t begin, int64_t end) {
    std::vector<float> two(2 * p.value_width);
    for (int64_t item = begin; item < end; item++)
      for (int64_t i = 0; i < pairs; i++) {
        for (int64_t j = 0; j < 2; j++) {
          auto [from, to] = seen[item / p.key_heads];
          bool is_seen = 2 * i + j >= from && 2 * i + j < to;
          const float* row = rows.at(item / p.key_heads, item % p.key_heads, is_seen ? 2 * i + j : 0);
          for (int64_t d = 0; d < p.value_width; d++) two[j * p.value_width + d] = is_seen ? row[d] : 0;
        }
        auto* to = reinterpret_cast<Pair*>(p.v_pairs.mutable_data_ptr<int32_t>());
        to_pairs(two.data(), 2, p.value_width, to + (item * pairs + i) * p.value_width);
      }
  });
}

// False if these kernels do not support the call: non-finite numbers, norms near the limits, large powers.
bool prepare(Problem& p, const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& start, const Tensor& end,
             bool sharpen, double power, const std::optional<Tensor>& power_rows,
             const std::optional<std::vector<double>>& by_length, bool offset, double score_scale,
             bool normalized_keys, bool forward) {
  p.batch = q.size(0), p.heads = q.size(1), p.key_heads = k.size(1), p.shared = p.heads / p.key_heads;
  p.length = q.size(2), p.offset = offset, p.score_scale = score_scale, p.normalized_keys = normalized_keys;
  if (sharpen) {
    p.kind = Kind::real;
    p.power = float(power);
    if (power_rows) {
      Tensor rows = power_rows->to(at::kFloat);
      auto [low, high] = rows.aminmax();
      if (!(low.item<float>() >= 1 && high.item<float>() <= LARGEST_POWER)) return false;
      p.power_rows = rows.expand({p.batch, p.heads, p.length});
    } else if (by_length) {
      p.by_length = *by_length;
      if (p.by_length[0] + p.by_length[1] * 64 > LARGEST_POWER) return false;
    } else {
      if (power > LARGEST_POWER) return false;
      if (power == std::floor(power)) p.kind = Kind::integer, p.integer = int(power);
    }
  }
  auto integers = [](const Tensor& x) { return x.to(at::kInt).contiguous(); };
  p.start = integers(start), p.end = integers(end);
  p.first = p.start.min().item<int32_t>();
  p.keys = std::max<int64_t>(0, p.end.max().item<int32_t>() - p.first);
  p.start = p.start.sub(p.first), p.end = p.end.sub(p.first);
  p.blocks.resize(p.start.size(0));
  for (size_t b = 0; b < p.blocks.size(); b++) {
    p.blocks[b] = blocks_of(p.starts(b), p.ends(b), p.length);
    for (const Block& block : p.blocks[b]) {
      p.longest = std::max<int64_t>(p.longest, block.high - block.low);
      p.pairs += block.rows * (block.high - block.low) * p.heads * (p.blocks.size() == 1 ? p.batch : 1);
    }
  }
  p.q = whole_vectors(q);
  p.k = whole_vectors(close_rows(k.narrow(2, p.first, p.keys), p.length));
  p.v = whole_vectors(close_rows(v.narrow(2, p.first, p.keys), p.length));
  p.width = p.k.size(3), p.value_width = p.v.size(3);
  auto floats = q.options().dtype(at::kFloat);
  p.query_norms = at::zeros({p.batch, p.heads, p.length}, floats);
  p.key_norms = at::zeros({p.batch, p.key_heads, p.keys}, floats);
  p.half = HAS_PAIRS && q.scalar_type() == at::kBFloat16 && p.width == q.size(3) && p.value_width == v.size(3);
  Seen seen(p.batch), rows(p.batch);
  for (int64_t b = 0; b < p.batch; b++) {
    const int32_t *starts = p.starts(b), *ends = p.ends(b);
    int64_t low = p.keys, high = 0, from = p.length, to = 0;
    for (int64_t i = 0; i < p.length; i++) {
      if (starts[i] >= ends[i]) continue;
      low = std::min<int64_t>(low, starts[i]), high = std::max<int64_t>(high, ends[i]);
      from = std::min(from, i), to = i + 1;
    }
    if (p.half && high > low) low &= ~int64_t(1);
    seen[b] = {low, std::max(low, high)}, rows[b] = {from, std::max(from, to)};
  }
  // A non-finite query affects only its own row of the output, but the gradients of all keys.
  Norms of_q = inverse_norms(p.q, rows, p.query_norms.mutable_data_ptr<float>());
  Norms of_k = inverse_norms(p.k, seen, p.key_norms.mutable_data_ptr<float>());
  bool fine = of_q.normal && (of_q.finite || forward) && of_k.normal && of_k.finite && is_finite(p.v, seen);
  if (normalized_keys) p.key_norms.fill_(1);
  p.half = p.half && fine && of_q.moderate && of_k.moderate;
  if (p.half) take_halves(p, q, k, v, seen);
  return fine;
}

// u^n for n >= 1.
inline Vector raised(Vector u, int n) {
  Vector y = u;
  for (int bit = 30 - __builtin_clz(n); bit >= 0; bit--) {
    y *= y;
    if (n >> bit & 1) y *= u;
  }
  return y;
}

// u^power per lane, and u^(power - 1) with log2 u. u is 0 or large enough that no weight is below 2^-100; 0^0 is 0.
template <Kind kind>
struct Power {
  int whole;
  Vector real;
  Vector operator()(Vector u) const {
    if constexpr (kind == Kind::integer) return raised(u, whole);
    Vector exponent = real * log2(u);
    return exponent > -126.f ? exp2(largest(exponent, all(-126.f))) : Vector{};
  }
  Vector slope(Vector u, Vector* log_u) const {
    *log_u = Vector{};
    if constexpr (kind == Kind::integer) {
      if (whole > 1) return raised(u, whole - 1);
      return u > 0.f ? all(1) : Vector{};
    }
    *log_u = u > 0.f ? log2(u) : Vector{};
    Vector exponent = (real - 1.f) * *log_u;
    return u > 0.f ? exp2(largest(exponent, all(-126.f))) : Vector{};
  }
};

// Lane sums in float64: rows with nearly equal scores need all digits of R.
struct LaneSums {
  using Half = float __attribute__((vector_size(WIDTH * 2)));
  using Doubles = double __attribute__((vector_size(WIDTH * 4)));
  Doubles low{}, high{};
  void add(const float* x) {
    Half parts[2];
    std::memcpy(parts, x, sizeof parts);
    low += __builtin_convertvector(parts[0], Doubles), high += __builtin_convertvector(parts[1], Doubles);
  }
  void add_to(double* x) const {
    for (int i = 0; i < WIDTH / 2; i++) x[i] += low[i], x[i + WIDTH / 2] += high[i];
  }
};

// A block of one head, with per-row values.
struct Work {
  const Problem& p;
  int64_t b, h, key_head, vectors, lanes;
  Block block;
  alignas(64) int32_t start[LANES], end[LANES];
  alignas(64) float query_norm[LANES];
  double scale[LANES];
  alignas(64) float mean[LANES], slope[LANES], rest[LANES];  // u = (f - mean) * slope - rest
  alignas(64) float floor[LANES], power[LANES];                     // u = 0 below floor
  alignas(64) float highest[LANES] = {};
  alignas(64) double total[LANES] = {};  // R
  alignas(64) float plain[LANES];  // nonzero for rows of equal scores, which use the weights of the first stage
  alignas(64) float counts[LANES], height[LANES], offset[LANES];
  bool some_plain = false;

  Work(const Problem& problem, int64_t b_, int64_t h_, const Block& block_)
      : p(problem), b(b_), h(h_), key_head(h_ / problem.shared), block(block_) {
    vectors = (block.rows + WIDTH - 1) / WIDTH, lanes = vectors * WIDTH;
    const int32_t *starts = p.starts(b) + block.row, *ends = p.ends(b) + block.row;
    const float* norms = p.query_norms.const_data_ptr<float>() + (b * p.heads + h) * p.length + block.row;
    for (int64_t i = 0; i < lanes; i++) {
      bool there = i < block.rows;
      start[i] = there ? starts[i] : block.low, end[i] = there ? ends[i] : block.high;
      int n = end[i] - start[i];
      counts[i] = n, offset[i] = p.kind != Kind::none && p.offset && n > 3;
      scale[i] = p.score_scale * std::log(std::max(1., double(n)));
      query_norm[i] = there ? norms[i] : 0;
      power[i] = p.power;
      if (!p.by_length.empty())
        power[i] = p.by_length[0] + p.by_length[1] * std::log(std::max(double(n), p.by_length[2]) / p.by_length[2]);
      if (p.power_rows.defined() && there)
        power[i] = p.power_rows.const_data_ptr<float>()[b * p.power_rows.stride(0) + h * p.power_rows.stride(1) +
                                                        (block.row + i) * p.power_rows.stride(2)];
    }
  }

  const float* key(int64_t j) const { return Rows(p.k).at(b, key_head, j); }
  const float* value(int64_t j) const { return Rows(p.v).at(b, key_head, j); }
  const float* key_norms() const {
    return p.key_norms.const_data_ptr<float>() + (b * p.key_heads + key_head) * p.keys;
  }

  // Writes the block's rows of x, each times a factor, as [d][row].
  void transpose(const float* x, int64_t row, int64_t width, const float* factor, float* to) const {
    for (int64_t i = 0; i < lanes; i++)
      for (int64_t d = 0; d < width; d++) to[d * lanes + i] = i < block.rows && factor[i] != 0 ? x[i * row + d] * factor[i] : 0;
  }

  const Pair* value_pairs(int64_t j) const {  // j must be even
    return reinterpret_cast<const Pair*>(p.v_pairs.const_data_ptr<int32_t>()) +
           ((b * p.key_heads + key_head) * p.v_pairs.size(2) + j / 2) * p.value_width;
  }

  // Writes the block's rows of x as [d / 2][row].
  void transpose_pairs(const Tensor& x, int64_t width, Pair* to) const {
    PairRows pairs(x);
    const Pair* from = pairs.at(b, h, block.row);
    for (int64_t i = 0; i < lanes; i++)
      for (int64_t d = 0; d < width / 2; d++) to[d * lanes + i] = i < block.rows ? from[i * pairs.row + d] : 0;
  }

  void pack_queries(float* to) const {
    if (p.half) return transpose_pairs(p.q_half, p.width, reinterpret_cast<Pair*>(to));

    alignas(64) float factor[LANES];
    for (int64_t i = 0; i < lanes; i++) factor[i] = query_norm[i] * scale[i] / M_LN2;
    Rows q(p.q);
    transpose(q.at(b, h, block.row), q.row, p.width, factor, to);
  }

  // Adds the values of ``keys`` keys from j, times w [key][row], to sums [row][d]. ``w`` has space for pairs after it.
  void add_values(const float* w, int64_t j, int64_t keys, float* sums) const {
    if (p.half) {
      Pair* pairs = reinterpret_cast<Pair*>(const_cast<float*>(w) + KEYS * lanes);
      to_pairs(w, keys, lanes, pairs);
      multiply<Pair>(block.rows, p.value_width, (keys + 1) / 2, pairs, 1, lanes, value_pairs(j), p.value_width, sums,
                     p.value_width, true);
    } else {
      multiply(block.rows, p.value_width, keys, w, 1, lanes, value(j), Rows(p.v).row, sums, p.value_width, true);
    }
  }

  // f of ``keys`` keys from j, 0 if the row does not see the key. Updates R and the largest f.
  void softplus(const float* queries, int64_t j, int64_t keys, float* f) {
    if (p.half)
      multiply(keys, lanes, p.width / 2, PairRows(p.k_half).at(b, key_head, j), PairRows(p.k_half).row, 1,
               reinterpret_cast<const Pair*>(queries), lanes, f, lanes, false);
    else for (int64_t d = 0; d < p.width; d += 32)  // blocked summation: powers amplify rounding errors of scores
      multiply(keys, lanes, std::min<int64_t>(32, p.width - d), key(j) + d, Rows(p.k).row, 1, queries + d * lanes,
               lanes, f, lanes, d > 0);
    const float* norms = key_norms() + j;
    bool edge = j < block.all_from || j + keys > block.all_to;
    for (int64_t v = 0; v < lanes; v += WIDTH) {
      Integers from = load(start + v), to = load(end + v);
      Vector high = load(highest + v), factor = all(1);
      if (p.half)
        for (int i = 0; i < WIDTH; i++) factor[i] = query_norm[v + i] * scale[v + i] / M_LN2;
      LaneSums sums;
      for (int64_t i = 0; i < keys; i++) {
        Vector x = softplus2(load(f + i * lanes + v) * (factor * norms[i]));
        if (edge) {
          Integers number = int32_t(j + i) - Integers{};
          x = ((from <= number) & (number < to)) ? x : Vector{};
        }
        high = largest(high, x);
        store(f + i * lanes + v, x);
        sums.add(f + i * lanes + v);
      }
      store(highest + v, high);
      sums.add_to(total + v);
    }
  }

  // Per-row terms that follow from R and max f.
  void use_sums() {
    for (int64_t i = 0; i < lanes; i++) {
      double share = counts[i] / (counts[i] > 0 ? total[i] : 1), above = share * highest[i] - offset[i];
      bool equal = !(above > EQUAL_SCORES);
      plain[i] = p.kind != Kind::none && equal && i < block.rows;
      some_plain |= plain[i] != 0;
      if (equal) above = 1;
      double average = offset[i] ? offset[i] / share : 0, steepness = share / above;
      height[i] = above, mean[i] = average, slope[i] = steepness;
      rest[i] = (average - mean[i]) * steepness;  // keeps all digits of u in rows with nearly equal scores
      floor[i] = std::exp2(-100 / power[i]);
    }
  }

  Vector excess(Vector f, int64_t v) const {
    Vector u = least((f - load(mean + v)) * load(slope + v) - load(rest + v), all(1));
    return u >= load(floor + v) ? u : Vector{};
  }

  // w of ``keys`` keys from their f; adds to W.
  template <Kind kind>
  void weigh(const float* f, int64_t keys, float* w, float* total) const {
    for (int64_t v = 0; v < lanes; v += WIDTH) {
      Power<kind> raise{p.integer, load(power + v)};
      Vector sums{}, is_plain = load(plain + v);
      for (int64_t i = 0; i < keys; i++) {
        Vector x = load(f + i * lanes + v);
        Vector y = raise(excess(x, v));
        if (some_plain) y = is_plain != 0.f ? x : y;
        sums += y;
        store(w + i * lanes + v, y);
      }
      accumulate(total + v, sums);
    }
  }
};

struct Buffer {
  Tensor memory;
  int64_t each;
  Buffer(int64_t threads, int64_t floats, const Tensor& like)
      : memory(at::empty({threads, rounded_up(floats, 16) + 16}, like.options().dtype(at::kFloat))),
        each(memory.size(1)) {}
  float* of(int64_t thread) {
    auto address = reinterpret_cast<uintptr_t>(memory.mutable_data_ptr<float>() + thread * each);
    return reinterpret_cast<float*>(rounded_up(address, 64));
  }
};

template <Kind kind>
void forward_block(Work& work, float* buffer, Tensor& out, float* const stats[3]) {
  const Problem& p = work.p;
  const Block& block = work.block;
  int64_t lanes = work.lanes, keys = block.high - block.low;
  float* queries = buffer;
  float* sums = queries + p.width * lanes;  // weighted values, [row][d]
  float* w = sums + lanes * p.value_width;
  float* f = w + 2 * KEYS * lanes;
  alignas(64) float norm[LANES] = {};

  std::fill(sums, sums + lanes * p.value_width, 0.f);
  work.pack_queries(queries);
  for (int64_t j = 0; j < keys; j += KEYS) {
    int64_t count = std::min(KEYS, keys - j);
    float* part = kind == Kind::none ? w : f + j * lanes;
    work.softplus(queries, block.low + j, count, part);
    if (kind == Kind::none) work.add_values(part, block.low + j, count, sums);
  }
  if constexpr (kind != Kind::none) {
    work.use_sums();
    for (int64_t j = 0; j < keys; j += KEYS) {
      int64_t count = std::min(KEYS, keys - j);
      work.weigh<kind>(f + j * lanes, count, w, norm);
      work.add_values(w, block.low + j, count, sums);
    }
  }
  float* to = out.mutable_data_ptr<float>() + ((work.b * p.heads + work.h) * p.length + block.row) * p.value_width;
  for (int64_t i = 0; i < block.rows; i++) {
    bool plain = kind == Kind::none || work.plain[i] != 0, none = work.counts[i] == 0;
    double total = none ? 1 : work.total[i];
    if (std::isnan(work.query_norm[i])) total = NAN;
    float factor = none ? 0 : std::isnan(total) ? NAN : 1 / (plain ? total : norm[i]);
    for (int64_t d = 0; d < p.value_width; d += WIDTH)
      store(to + i * p.value_width + d, load(sums + i * p.value_width + d) * factor);
    int64_t row = (work.b * p.heads + work.h) * p.length + block.row + i;
    stats[0][row] = none ? 1 : total * M_LN2, stats[1][row] = work.highest[i] * M_LN2;
    stats[2][row] = plain ? stats[0][row] : norm[i];
  }
}

// Shared by the blocks of a backward, float32: (B, H, T_q, ...), and (chunks, B, H_kv, keys, ...) for dk and dv.
struct Gradients {
  const Tensor &grad_out, &stats;
  Tensor dq, dk, dv, d_power, grad_half;
};

template <Kind kind>
void backward_block(Work& work, float* buffer, Gradients& g, int64_t chunk) {
  const Problem& p = work.p;
  const Block& block = work.block;
  int64_t lanes = work.lanes, rows = block.rows, keys = block.high - block.low;
  if (keys == 0) {
    float* to = g.dq.mutable_data_ptr<float>() + ((work.b * p.heads + work.h) * p.length + block.row) * p.width;
    std::fill(to, to + rows * p.width, 0.f);
    return;
  }
  float* queries = buffer;                            // [d][row], as in the forward
  float* scaled = queries + p.width * lanes;          // [row][d]: normalized queries times their scale
  float* grads = scaled + p.width * lanes;            // [d][row]: grad_out
  float* dq = grads + p.value_width * lanes;          // [row][d]
  float* w = dq + p.width * lanes;
  float* grad_pairs = w + 2 * KEYS * lanes;           // [row / 2][d]
  float* f = grad_pairs + p.value_width * lanes / 2;
  float* dw = f + p.longest * lanes;                  // dP of docs/method.md
  alignas(64) float norm[LANES];
  alignas(64) float delta[LANES] = {}, dx_sum[LANES] = {}, log_sum[LANES] = {};
  Rows k(p.k), v(p.v), grad_out(g.grad_out), q(p.q);

  int64_t first = (work.b * p.heads + work.h) * p.length + block.row, all_rows = p.batch * p.heads * p.length;
  const float* stats = g.stats.const_data_ptr<float>() + first;
  work.pack_queries(queries);
  const float* given = q.at(work.b, work.h, block.row);
  for (int64_t i = 0; i < rows; i++)
    for (int64_t d = 0; d < p.width; d += WIDTH)
      store(scaled + i * p.width + d,
            work.query_norm[i] ? load(given + i * q.row + d) * float(work.query_norm[i] * work.scale[i]) : Vector{});
  alignas(64) float ones[LANES];
  std::fill(ones, ones + LANES, 1.f);
  const float* grad = grad_out.at(work.b, work.h, block.row);
  if (p.half) {
    work.transpose_pairs(g.grad_half, p.value_width, reinterpret_cast<Pair*>(grads));
    std::vector<float> padded(lanes * p.value_width);
    for (int64_t i = 0; i < rows; i++)
      std::copy(grad + i * grad_out.row, grad + i * grad_out.row + p.value_width, padded.data() + i * p.value_width);
    to_pairs(padded.data(), lanes, p.value_width, reinterpret_cast<Pair*>(grad_pairs));
  } else {
    work.transpose(grad, grad_out.row, p.value_width, ones, grads);
  }

  int64_t key_head = (chunk * p.batch + work.b) * p.key_heads + work.key_head;
  float* dk = g.dk.mutable_data_ptr<float>() + (key_head * p.keys + block.low) * p.width;
  float* dv = g.dv.mutable_data_ptr<float>() + (key_head * p.keys + block.low) * p.value_width;

  for (int64_t j = 0; j < keys; j += KEYS)
    work.softplus(queries, block.low + j, std::min(KEYS, keys - j), f + j * lanes);
  work.use_sums();
  for (int64_t i = 0; i < lanes; i++) {
    bool plain = kind == Kind::none || work.plain[i] != 0;
    norm[i] = work.counts[i] == 0 ? 1 : plain ? float(work.total[i]) : i < rows ? stats[2 * all_rows + i] : 1;
  }

  // The weights, delta = sum w dw, and dv.
  for (int64_t j = 0; j < keys; j += KEYS) {
    int64_t count = std::min(KEYS, keys - j);
    float *f_part = f + j * lanes, *dw_part = dw + j * lanes;
    if (p.half)
      multiply(count, lanes, p.value_width / 2, PairRows(p.v_half).at(work.b, work.key_head, block.low + j),
               PairRows(p.v_half).row, 1, reinterpret_cast<const Pair*>(grads), lanes, dw_part, lanes, false);
    else
      multiply(count, lanes, p.value_width, work.value(block.low + j), v.row, 1, grads, lanes, dw_part, lanes, false);
    for (int64_t x = 0; x < lanes; x += WIDTH) {
      Power<kind> power{p.integer, load(work.power + x)};
      Vector inverse = 1 / load(norm + x), is_plain = load(work.plain + x), sums{};
      for (int64_t i = 0; i < count; i++) {
        Vector f_ = load(f_part + i * lanes + x), weight;
        if constexpr (kind == Kind::none) {
          weight = f_ * inverse;
        } else {
          weight = power(work.excess(f_, x)) * inverse;
          if (work.some_plain) weight = is_plain != 0.f ? f_ * inverse : weight;
        }
        sums += weight * load(dw_part + i * lanes + x);
        store(w + i * lanes + x, weight);
      }
      accumulate(delta + x, sums);
    }
    if (p.half) {
      auto* rounded = reinterpret_cast<uint16_t*>(w + KEYS * lanes);
      to_halves(w, count * lanes, rounded);
      multiply<Pair>(count, p.value_width, lanes / 2, reinterpret_cast<const Pair*>(rounded), lanes / 2, 1,
                     reinterpret_cast<const Pair*>(grad_pairs), p.value_width, dv + j * p.value_width, p.value_width,
                     true);
    } else {
      multiply(count, p.value_width, rows, w, lanes, 1, grad, grad_out.row, dv + j * p.value_width, p.value_width,
               true);
    }
  }

  // dx = rise * u^(p-1) * (dP - delta), ds = (dx - eps) * N / R * slope of softplus. This pass overwrites dP by dx and
  // f by the slope, and sums dx. It needs the complete delta, which is nearly the dP of a key with most of the weight.
  alignas(64) float rise[LANES], eps[LANES], fall[LANES];
  for (int64_t i = 0; i < lanes; i++) {
    bool plain = kind == Kind::none || work.plain[i] != 0;
    float n = std::max(1.f, work.counts[i]);
    fall[i] = i < rows && work.counts[i] > 0 ? n / (work.total[i] * M_LN2) : 0;
    rise[i] = plain ? 1 / n : work.power[i] / norm[i] / work.height[i];
  }
  for (int64_t x = 0; x < lanes; x += WIDTH) {
    Power<kind> power{p.integer, load(work.power + x)};
    Vector delta_ = load(delta + x), rise_ = load(rise + x), is_plain = load(work.plain + x);
    for (int64_t j = 0; j < keys; j += KEYS) {
      Vector sums{}, log_sums{};
      for (int64_t i = j; i < std::min(j + KEYS, keys); i++) {
        Vector f_ = load(f + i * lanes + x), dx = (load(dw + i * lanes + x) - delta_) * rise_;
        if constexpr (kind != Kind::none) {
          Vector log_u, u = work.excess(f_, x), s = power.slope(u, &log_u);
          if constexpr (kind == Kind::real) log_sums += dx * s * u * log_u;
          if (work.some_plain) s = is_plain != 0.f ? all(1) : s;
          dx *= s;
          sums += dx;
        }
        store(dw + i * lanes + x, dx);
        store(f + i * lanes + x, slope_of_softplus2(f_));
      }
      accumulate(dx_sum + x, sums), accumulate(log_sum + x, log_sums);
    }
  }
  for (int64_t i = 0; i < lanes; i++) {
    bool plain = kind == Kind::none || work.plain[i] != 0;
    eps[i] = plain ? 0 : work.offset[i] / std::max(1.f, work.counts[i]) * dx_sum[i];
    // sum w ln u (dP - delta); log_sum still has the factors of dx
    if (g.d_power.defined() && i < rows)
      g.d_power.mutable_data_ptr<float>()[first + i] =
          plain ? 0 : LN_2 * log_sum[i] * work.height[i] / work.power[i];
  }
  const float* norms = work.key_norms() + block.low;
  std::fill(dq, dq + lanes * p.width, 0.f);
  for (int64_t j = 0; j < keys; j += KEYS) {
    int64_t count = std::min(KEYS, keys - j);
    for (int64_t x = 0; x < lanes; x += WIDTH) {
      Vector eps_ = load(eps + x), fall_ = load(fall + x);
      for (int64_t i = 0; i < count; i++) {
        Vector dx = load(dw + (j + i) * lanes + x), slope = load(f + (j + i) * lanes + x);
        store(w + i * lanes + x, (dx - eps_) * (slope * fall_) * norms[j + i]);
      }
    }
    multiply(rows, p.width, count, w, 1, lanes, work.key(block.low + j), k.row, dq, p.width, true);
    multiply(count, p.width, rows, w, lanes, 1, scaled, p.width, dk + j * p.width, p.width, true);
  }

  // Backward of the L2 normalization of the queries.
  float* to = g.dq.mutable_data_ptr<float>() + first * p.width;
  for (int64_t i = 0; i < rows; i++) {
    Vector dot{};
    const float* x = given + i * q.row;
    for (int64_t d = 0; d < p.width; d += WIDTH) dot += load(x + d) * load(dq + i * p.width + d);
    float norm_i = work.query_norm[i], along = sum(dot) * norm_i;
    for (int64_t d = 0; d < p.width; d += WIDTH) {
      Vector across = load(dq + i * p.width + d) - load(x + d) * norm_i * along;
      store(to + i * p.width + d, norm_i ? across * float(norm_i * work.scale[i]) : Vector{});
    }
  }
}

// Adds the chunks in order into the first, then applies the backward of the L2 normalization of the keys.
void finish_keys(const Problem& p, Gradients& g, int64_t chunks) {
  int64_t key_heads = p.batch * p.key_heads;
  float *dk = g.dk.mutable_data_ptr<float>(), *dv = g.dv.mutable_data_ptr<float>();
  const float* norms = p.key_norms.const_data_ptr<float>();
  Rows k(p.k);
  auto add_chunks = [&](float* x, int64_t size) {
    for (int64_t chunk = 1; chunk < chunks; chunk++)
      for (int64_t i = 0; i < size; i += WIDTH) store(x + i, load(x + i) + load(x + i + chunk * key_heads * p.keys * size));
  };
  at::parallel_for(0, key_heads * p.keys, 1024, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; row++) {
      float* d = dk + row * p.width;
      add_chunks(d, p.width), add_chunks(dv + row * p.value_width, p.value_width);
      if (p.normalized_keys || norms[row] == 0) continue;
      const float* x = k.at(row / p.keys / p.key_heads, row / p.keys % p.key_heads, row % p.keys);
      Vector dot{};
      for (int64_t i = 0; i < p.width; i += WIDTH) dot += load(x + i) * load(d + i);
      float along = sum(dot) * norms[row];
      for (int64_t i = 0; i < p.width; i += WIDTH) store(d + i, load(d + i) - load(x + i) * norms[row] * along);
    }
  });
}

template <class Run>
void by_kind(Kind kind, const Run& run) {
  if (kind == Kind::none) run(std::integral_constant<Kind, Kind::none>{});
  if (kind == Kind::integer) run(std::integral_constant<Kind, Kind::integer>{});
  if (kind == Kind::real) run(std::integral_constant<Kind, Kind::real>{});
}

struct Item {
  int64_t b, h;
  const Block* block;
};

// Returns [out, stats], or nothing if PyTorch operations must compute the call.
std::vector<Tensor> prefill_forward(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& start,
                                    const Tensor& end, bool sharpen, double power,
                                    const std::optional<Tensor>& power_rows,
                                    const std::optional<std::vector<double>>& by_length, bool offset,
                                    double score_scale, bool normalized_keys) {
  Problem p;
  if (!prepare(p, q, k, v, start, end, sharpen, power, power_rows, by_length, offset, score_scale, normalized_keys,
               true))
    return {};
  auto floats = q.options().dtype(at::kFloat);
  Tensor out = at::empty({p.batch, p.heads, p.length, p.value_width}, floats);
  Tensor stats = at::empty({3, p.batch, p.heads, p.length}, floats);
  float* const rows[3] = {stats[0].mutable_data_ptr<float>(), stats[1].mutable_data_ptr<float>(),
                          stats[2].mutable_data_ptr<float>()};
  // The longest blocks first; started last, they would leave threads idle.
  std::vector<Item> items;
  for (int64_t b = 0; b < p.batch; b++)
    for (const Block& block : p.blocks_of_sequence(b))
      for (int64_t h = 0; h < p.heads; h++) items.push_back({b, h, &block});
  std::stable_sort(items.begin(), items.end(), [](const Item& x, const Item& y) {
    return x.block->high - x.block->low > y.block->high - y.block->low;
  });
  int64_t own = LANES * (p.width + p.value_width + 2 * KEYS + (sharpen ? p.longest : 0));
  Buffer buffer(std::max(1, at::get_num_threads()), own, q);
  by_kind(p.kind, [&](auto kind) {
    for_each(items.size(), p.pairs, [&](int64_t i, int64_t thread) {
      Work work(p, items[i].b, items[i].h, *items[i].block);
      forward_block<kind>(work, buffer.of(thread), out, rows);
    });
  });
  return {as_given(out, v), stats};
}

// The gradient of all keys; zero for keys that no row sees.
Tensor of_all_keys(const Tensor& x, const Tensor& like, int64_t first) {
  if (x.size(2) == like.size(2)) return as_given(x, like);
  Tensor full = at::zeros(like.sizes(), like.options());
  full.narrow(2, first, x.size(2)).copy_(x.narrow(3, 0, like.size(3)));
  return full;
}

// Returns [dq, dk, dv, d_power], or nothing if PyTorch operations must compute the call.
std::vector<Tensor> prefill_backward(const Tensor& grad_out, const Tensor& stats, const Tensor& q, const Tensor& k,
                                     const Tensor& v, const Tensor& start, const Tensor& end, bool sharpen,
                                     double power, const std::optional<Tensor>& power_rows,
                                     const std::optional<std::vector<double>>& by_length, bool offset,
                                     double score_scale, bool normalized_keys) {
  Problem p;
  if (!prepare(p, q, k, v, start, end, sharpen, power, power_rows, by_length, offset, score_scale, normalized_keys,
               false))
    return {};
  Tensor grad = whole_vectors(grad_out), rows = stats.contiguous();
  if (!is_finite(grad, Seen(p.batch, {0, p.length}))) return {};

  // Each chunk of a key head's blocks has its own sums. The number of chunks depends only on the shape, so that the
  // order of additions does not depend on the number of threads.
  int64_t key_heads = p.batch * p.key_heads, most_blocks = 0;
  for (const auto& blocks : p.blocks) most_blocks = std::max<int64_t>(most_blocks, blocks.size() * p.shared);
  int64_t chunks = std::min((HEADS_AT_ONCE + key_heads - 1) / key_heads, most_blocks);
  auto floats = q.options().dtype(at::kFloat);
  Gradients g{grad, rows};
  if (p.half) g.grad_half = halves(grad_out);
  g.dq = at::empty({p.batch, p.heads, p.length, p.width}, floats);
  g.dk = at::zeros({chunks * p.batch, p.key_heads, p.keys, p.width}, floats);
  g.dv = at::zeros({chunks * p.batch, p.key_heads, p.keys, p.value_width}, floats);
  if (power_rows) g.d_power = at::empty({p.batch, p.heads, p.length}, floats);
  Buffer buffer(std::max(1, at::get_num_threads()),
                LANES * (3 * p.width + 2 * p.value_width + 2 * KEYS + 2 * p.longest), q);
  by_kind(p.kind, [&](auto kind) {
    for_each(key_heads * chunks, p.pairs, [&](int64_t item, int64_t thread) {
      int64_t chunk = item % chunks, b = item / chunks / p.key_heads, key_head = item / chunks % p.key_heads;
      const auto& blocks = p.blocks_of_sequence(b);
      int64_t all = blocks.size() * p.shared;
      for (int64_t i = chunk; i < all; i += chunks) {
        Work work(p, b, key_head * p.shared + i % p.shared, blocks[i / p.shared]);
        backward_block<kind>(work, buffer.of(thread), g, chunk);
      }
    });
  });
  finish_keys(p, g, chunks);
  Tensor dk = g.dk.narrow(0, 0, p.batch), dv = g.dv.narrow(0, 0, p.batch);
  return {as_given(g.dq, q), of_all_keys(dk, k, p.first), of_all_keys(dv, v, p.first),
          power_rows ? g.d_power : at::empty({0}, floats)};
}

std::string instructions() {
#if defined(__AVX512BF16__)
  return "AVX-512 with bfloat16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "four floats at a time";
#endif
}

}  // namespace

SOFTPLUS_ATTENTION_OPS(m) {
  m.def("instructions() -> str", instructions);
  m.def(
      "prefill_forward(Tensor q, Tensor k, Tensor v, Tensor start, Tensor end, bool sharpen, float power, "
      "Tensor? power_rows, float[]? power_by_length, bool offset, float score_scale, bool normalized_keys) "
      "-> Tensor[]",
      prefill_forward);
  m.def(
      "prefill_backward(Tensor grad_out, Tensor stats, Tensor q, Tensor k, Tensor v, Tensor start, Tensor end, "
      "bool sharpen, float power, Tensor? power_rows, float[]? power_by_length, bool offset, float score_scale, "
      "bool normalized_keys) -> Tensor[]",
      prefill_backward);
}

}  // namespace softplus_attention
