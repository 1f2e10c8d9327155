// Decode: one new token per sequence over its cache. Reads all keys, and only the values whose weights matter:
// docs/method.md, "Values that a decode step leaves unread".
#include "native.h"

#include <ATen/Parallel.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/empty.h>
#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <atomic>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>
#include <vector>

namespace {

using namespace softplus_attention;

constexpr int64_t CHUNK = 512;  // keys per piece of work; makes the order of additions independent of the threads
constexpr int HEADS = 8;        // query heads that share one read of a key
constexpr int AHEAD = 32;       // rows to prefetch ahead; saves half of the time
constexpr int WIDEST = 256;     // largest head dimension
constexpr int64_t WORTH_THREADS = 1 << 20;  // bytes; less is not worth threads

using Words = uint32_t __attribute__((vector_size(WIDTH * 4)));
using Shorts = uint16_t __attribute__((vector_size(WIDTH * 2)));

inline Vector widened(const float* from) { return load(from); }
inline Vector widened(const at::BFloat16* from) {
  Shorts x;
  std::memcpy(&x, from, sizeof x);
  return (Vector)(__builtin_convertvector(x, Words) << 16);
}
// A multiplication converts the exponent from float16 to float32, also for subnormals; Inf and NaN are set apart.
inline Vector widened(const at::Half* from) {
  Shorts x;
  std::memcpy(&x, from, sizeof x);
  Words wide = __builtin_convertvector(x, Words), size = wide & 0x7fffu;
  Words finite = (Words)((Vector)(size << 13) * 0x1p112f);
  return (Vector)((size < 0x7c00u ? finite : (size << 13) | 0x7f800000u) | (wide & 0x8000u) << 16);
}

// Lane i comes from x, or from y if bit BIT of i is 1. The source lane is i with that bit set to HIGH.
template <size_t BIT, bool HIGH, size_t... I>
inline Vector mixed(Vector x, Vector y, std::index_sequence<I...>) {
#if defined(__clang__) || __GNUC__ >= 12
  return __builtin_shufflevector(x, y, ((I & BIT ? WIDTH : 0) + (HIGH ? I | BIT : I & ~BIT))...);
#else
  return __builtin_shuffle(x, y, Integers{int32_t((I & BIT ? WIDTH : 0) + (HIGH ? I | BIT : I & ~BIT))...});
#endif
}
// Lane i is the sum of x[i], for WIDTH vectors, which are overwritten.
template <size_t BIT = 1>
inline Vector sums(Vector* x) {
  if constexpr (BIT == WIDTH) {
    return x[0];
  } else {
    constexpr auto lanes = std::make_index_sequence<WIDTH>();
    for (size_t i = 0; i < WIDTH / BIT; i += 2)
      x[i / 2] = mixed<BIT, false>(x[i], x[i + 1], lanes) + mixed<BIT, true>(x[i], x[i + 1], lanes);
    return sums<2 * BIT>(x);
  }
}

// A key or value as N vectors of floats; N = 0 means a number known at run time.
template <class T, int N>
struct Row {
  static constexpr int MOST = N ? N : WIDEST / WIDTH;
  Vector x[MOST];
  int n;

  Row(const T* from, int64_t width) : n(N ? N : int(width + WIDTH - 1) / WIDTH) {
    int whole = N ? N : int(width) / WIDTH;
    for (int i = 0; i < whole; i++) x[i] = widened(from + i * WIDTH);
    if (whole == n) return;
    T rest[WIDTH] = {};
    std::memcpy(rest, from + whole * WIDTH, (width - whole * WIDTH) * sizeof(T));
    x[whole] = widened(rest);
  }
  int size() const { return N ? N : n; }

  template <class From>
  Vector product(const From* with) const {  // the sum of its lanes is the product
    Vector even{}, odd{};
    for (int i = 0; i + 1 < size(); i += 2) {
      even += x[i] * load((const float*)(with + i * WIDTH));
      odd += x[i + 1] * load((const float*)(with + (i + 1) * WIDTH));
    }
    if (size() % 2) even += x[size() - 1] * load((const float*)(with + (size() - 1) * WIDTH));
    return even + odd;
  }
};

template <class T>
inline void fetch(const T* row, int64_t width) {
  for (int64_t byte = 0; byte < width * int64_t(sizeof(T)); byte += 64) __builtin_prefetch((const char*)row + byte);
}

// The keys or values of one head; token j is in page table[j / page].
template <class T>
struct Pages {
  const T* base;
  const int32_t* table;
  uint32_t page;
  int64_t page_stride, stride;

  const T* operator[](uint32_t j) const { return base + table[j / page] * page_stride + j % page * stride; }

  // The rows of tokens j to j + n.
  void find(uint32_t j, int n, const T** rows) const {
    for (int i = 0; i < n;) {
      int run = std::min<uint32_t>(n - i, page - j % page);
      const T* row = (*this)[j];
      for (j += run; run > 0; run--, row += stride) rows[i++] = row;
    }
  }
};

struct Power {
  bool sharpen, offset;
  double base, slope, n0;
  const float* rows;  // (B, H), or null

  double at(int64_t row, double n) const { return rows ? rows[row] : base + slope * std::log(std::max(n, n0) / n0); }
};

// u = slope * f - subtracted, and the weight is u^power. The weight is negligible if f < cut.
struct RowTerms {
  bool sharp;
  float slope, subtracted, power, cut, top;
};

struct Piece {
  int64_t sequence, head, begin, end;  // a range of the visible keys, relative to the first
};

template <class T>
struct Decode {
  const at::Tensor &q, &k, &v;
  const int32_t* table;  // (B, blocks)
  int64_t blocks;
  Power power;
  double score_scale;
  bool normalized_keys;
  at::Tensor out;
  std::vector<int64_t> start, count;  // per sequence
  std::vector<Piece> pieces;
  std::vector<int64_t> first_piece;  // per sequence and key head
  int64_t heads = q.size(1), kv_heads = k.size(1), shared = heads / kv_heads, depth = q.size(-1), width = v.size(3);
  int64_t padded_depth = rounded_up(depth, WIDTH), padded_width = rounded_up(width, WIDTH), stride = 0;
  float *unit = nullptr, *f = nullptr, *totals = nullptr, *tops = nullptr, *norms = nullptr, *outs = nullptr;
  // Bound on the total weight left out, relative to the largest weight of a row.
  static constexpr double NEGLIGIBLE = sizeof(T) == 4 ? 0x1p-24 : 0x1p-14;
  std::atomic<bool> bad{false};  // a number is not finite: the general path decides which outputs it affects

  Pages<T> pages(const at::Tensor& x, const Piece& piece) const {
    return {x.const_data_ptr<T>() + piece.head * x.stride(1), table + piece.sequence * blocks, uint32_t(x.size(2)),
            x.stride(0), x.stride(2)};
  }

  // The normalized query times the scale of its scores, in base 2.
  void scale_query(int64_t row) {
    const T* x = q.const_data_ptr<T>() + row / heads * q.stride(0) + row % heads * q.stride(1);
    double n = double(count[row / heads]), square = 0;  // the square of any float fits into a double
    for (int64_t i = 0; i < depth; i++) square += double(x[i]) * double(x[i]);
    double scale = square == 0 || n == 0 ? 0 : score_scale * std::log(n) * M_LOG2E / std::sqrt(square);
    for (int64_t i = 0; i < padded_depth; i++) unit[row * padded_depth + i] = i < depth ? float(double(x[i]) * scale) : 0;
  }

  void invert_norms(Vector squares, const T** keys, int n, double* inverse) const {
    for (int i = 0; i < WIDTH; i++) inverse[i] = 1 / std::sqrt(double(squares[i]));
    for (int i = 0; i < n; i++) {
      if (squares[i] > 1e-30f && squares[i] < 1e30f) continue;
      double exact = 0;  // the square of any float fits into a double
      for (int64_t d = 0; d < depth; d++) exact += double(keys[i][d]) * double(keys[i][d]);
      inverse[i] = exact == 0 ? 0 : 1 / std::sqrt(exact);
    }
  }

  // f = softplus(score) of a piece's keys, with its sum and maximum.
  template <int N>
  void score(int64_t number) {
    const Piece& piece = pieces[number];
    Pages<T> cache = pages(k, piece);
    int count_here = int(piece.end - piece.begin);
    // Includes the start of the next piece, which the same thread usually takes.
    int known = int(std::min(piece.end + AHEAD, count[piece.sequence]) - piece.begin);
    const T* keys[CHUNK + AHEAD];
    cache.find(uint32_t(start[piece.sequence] + piece.begin), known, keys);
    for (int64_t g = 0; g < shared; g += HEADS) {
      int now = int(std::min<int64_t>(HEADS, shared - g));
      int64_t row = piece.sequence * heads + piece.head * shared + g;
      Vector total[HEADS] = {}, top[HEADS] = {};
      Integers finite = Integers{} - 1;
      for (int j = 0; j < count_here; j += WIDTH) {
        int n = std::min(WIDTH, count_here - j);
        Vector products[HEADS][WIDTH], squares[WIDTH];
        for (int i = 0; i < WIDTH; i++) {
          fetch(keys[std::min(j + i + AHEAD, known - 1)], depth);
          Row<T, N> key(keys[j + std::min(i, n - 1)], depth);
          for (int h = 0; h < now; h++) products[h][i] = key.product(unit + (row + h) * padded_depth);
          if (!normalized_keys) squares[i] = key.product((const float*)key.x);
        }
        double inverse[WIDTH];
        if (!normalized_keys) invert_norms(sums(squares), keys + j, n, inverse);
        for (int h = 0; h < now; h++) {
          Vector s = sums(products[h]);
          if (!normalized_keys)
            for (int i = 0; i < WIDTH; i++) s[i] = float(s[i] * inverse[i]);
          finite &= largest(s, -s) <= std::numeric_limits<float>::max();
          Vector own = softplus2(s);
          for (int i = n; i < WIDTH; i++) own[i] = 0;
          total[h] += own;
          top[h] = largest(own, top[h]);
          store(f + (row + h) * stride + piece.begin + j, own);
        }
      }
      for (int h = 0; h < now; h++) {
        totals[number * shared + g + h] = sum(total[h]);
        tops[number * shared + g + h] = largest(top[h]);
      }
      for (int i = 0; i < WIDTH; i++)
        if (!finite[i]) bad = true;
    }
  }

  RowTerms terms(int64_t pair, int64_t g) {
    double total = 0, n = double(count[pair / kv_heads]);
    float top = 0;
    for (int64_t i = first_piece[pair]; i < first_piece[pair + 1]; i++) {
      total += totals[i * shared + g];
      top = std::max(top, tops[i * shared + g]);
    }
    if (!(total > 1e-30 && total < std::numeric_limits<float>::max())) bad = true;
    double offset = power.offset && n > 3 ? 1 : 0, height = n * top / total - offset;
    if (!power.sharpen || !(height > EQUAL_SCORES)) return {false, 1 / top, 0, 1, float(NEGLIGIBLE / n * top), top};
    double p = power.at(pair * shared + g, n), slope = n / total / height, subtracted = offset / height;
    double cut = (std::pow(NEGLIGIBLE / n, 1 / p) + subtracted) / slope * (1 - 0x1p-20);
    return {true, float(slope), float(subtracted), float(p), std::min(float(cut), top), top};
  }

  // The weighted sum of a piece's values, and the sum of the weights.
  template <int N>
  void gather(int64_t number) {
    const Piece& piece = pieces[number];
    Pages<T> cache = pages(v, piece);
    const float* scores = f + (piece.sequence * heads + piece.head * shared) * stride;
    uint32_t chosen[CHUNK + WIDTH];
    float weights[CHUNK + WIDTH];
    const T* rows[CHUNK + WIDTH];
    RowTerms term[HEADS];
    for (int64_t first = 0; first < shared; first += HEADS) {
      int now = int(std::min<int64_t>(HEADS, shared - first)), n = 0;
      for (int h = 0; h < now; h++) term[h] = terms(piece.sequence * kv_heads + piece.head, first + h);
      for (int64_t j = piece.begin; j < piece.end; j += WIDTH) {
        Integers counts{};
        for (int h = 0; h < now; h++) counts |= load(scores + (first + h) * stride + j) >= term[h].cut;
        for (int i = 0; i < WIDTH; i++) {
          chosen[n] = uint32_t(j) + i;
          n -= counts[i];
        }
      }
      while (n && chosen[n - 1] >= piece.end) n--;  // padding is chosen when every key is
      for (int i = 0; i < n; i++) rows[i] = cache[uint32_t(start[piece.sequence]) + chosen[i]];
      for (int h = 0; h < now; h++) {
        const RowTerms& own = term[h];
        const float* from = scores + (first + h) * stride;
        Vector total{};
        for (int i = 0; i < n; i += WIDTH) {
          Vector x{};
          for (int l = 0; l < WIDTH && i + l < n; l++) x[l] = from[chosen[i + l]];
          Vector w = x * own.slope - own.subtracted;
          if (own.sharp) {
            Integers positive = w > 0x1p-120f;
            Vector exponent = log2(least(positive ? w : all(1), all(1))) * own.power;
            w = exp2(largest(exponent, all(-126)));
            w = positive & (exponent > -126.f) ? w : Vector{};
            w = x == own.top ? all(1) : w;
          }
          w = x >= own.cut ? w : Vector{};
          total += w;
          store(weights + i, w);
        }
        norms[number * shared + first + h] = sum(total);
        add<N>(rows, weights, n, h == 0, outs + (number * shared + first + h) * padded_width);
      }
    }
  }

  template <int N>
  void add(const T** rows, const float* weights, int n, bool first, float* to) {
    Vector sums[Row<T, N>::MOST] = {};
    for (int i = 0; i < n; i++) {
      if (first) fetch(rows[std::min(i + AHEAD, n - 1)], width);
      Row<T, N> value(rows[i], width);
      for (int d = 0; d < value.size(); d++) sums[d] += value.x[d] * weights[i];
    }
    for (int64_t d = 0; d < padded_width / WIDTH; d++) store(to + d * WIDTH, sums[d]);
  }

  void join(int64_t row) {
    int64_t pair = row / shared, g = row % shared;
    T* to = out.mutable_data_ptr<T>() + row * width;
    double norm = 0;
    float total[WIDEST] = {};
    for (int64_t i = first_piece[pair]; i < first_piece[pair + 1]; i++) {
      norm += norms[i * shared + g];
      for (int64_t d = 0; d < width; d++) total[d] += outs[(i * shared + g) * padded_width + d];
    }
    float inverse = count[row / heads] ? float(1 / norm) : 0;
    bool finite = true;
    for (int64_t d = 0; d < width; d++) {
      float x = total[d] * inverse;
      finite &= std::isfinite(x);
      to[d] = T(x);
    }
    if (!finite) bad = true;
  }

  template <int N, int N_VALUES>
  void run() {
    for (int64_t row = 0; row < int64_t(count.size()) * heads; row++) scale_query(row);
    int64_t keys = 0, n = int64_t(pieces.size());
    for (const Piece& piece : pieces) keys += piece.end - piece.begin;
    auto each = [&](int64_t number, int64_t bytes, auto&& work) {
      at::parallel_for(0, number, bytes < WORTH_THREADS ? std::max<int64_t>(number, 1) : 1, [&](int64_t a, int64_t b) {
        for (int64_t i = a; i < b; i++) work(i);
      });
    };
    int64_t bytes = keys * depth * int64_t(sizeof(T));
    each(n, bytes, [&](int64_t i) { score<N>(i); });
    each(n, bytes, [&](int64_t i) { gather<N_VALUES>(i); });
    each(int64_t(count.size()) * heads, n * shared * width * 4, [&](int64_t i) { join(i); });
  }

  std::optional<at::Tensor> operator()(const at::Tensor& starts, const at::Tensor& ends) {
    int64_t batch = q.size(0), page = k.size(2);
    std::vector<int64_t> shape = q.sizes().vec();
    shape.back() = width;
    out = at::empty(shape, q.options());
    for (int64_t b = 0; b < batch; b++) {
      int64_t begin = starts.const_data_ptr<int32_t>()[b % starts.numel()], end = ends.const_data_ptr<int32_t>()[b % ends.numel()];
      TORCH_CHECK_INDEX(begin >= 0 && end <= blocks * page, "decode: keys ", begin, " to ", end, " of ", blocks, " pages of ", page);
      for (int64_t j = begin; j < end; j += page - j % page) {
        int32_t number = table[b * blocks + j / page];
        TORCH_CHECK_INDEX(number >= 0 && number < k.size(0), "decode: page ", number, " of ", k.size(0));
      }
    start.push_back(begin);
      count.push_back(std::max<int64_t>(0, end - begin));
      stride = std::max(stride, rounded_up(count[b], WIDTH));
      for (int64_t head = 0; head < kv_heads; head++) {
        first_piece.push_back(int64_t(pieces.size()));
        for (int64_t j = 0; j < count[b]; j += CHUNK) pieces.push_back({b, head, j, std::min(j + CHUNK, count[b])});
      }
    }
    first_piece.push_back(int64_t(pieces.size()));
    int64_t rows = batch * heads, parts = int64_t(pieces.size()) * shared;
    at::Tensor memory = at::empty({rows * (padded_depth + stride) + parts * (padded_width + 3)}, q.options().dtype(at::kFloat));
    float* next = memory.mutable_data_ptr<float>();
    auto take = [&](int64_t n) { return std::exchange(next, next + n); };
    unit = take(rows * padded_depth), f = take(rows * stride), outs = take(parts * padded_width);
    totals = take(parts), tops = take(parts), norms = take(parts);

    constexpr int narrow = 64 / WIDTH, wide = 128 / WIDTH;
    if (depth == 64 && width == 64) run<narrow, narrow>();
    else if (depth == 128 && width == 128) run<wide, wide>();
    else run<0, 0>();
    return bad ? std::nullopt : std::optional(out);
  }
};

// q (B, H, D) or (B, H, 1, D); k and v (pages, H_kv, page, D); block_table (B, blocks): the pages of each sequence, or
// none if sequence b has only page b; start and end (B or 1): the range of visible keys. Returns nothing if a number is
// not finite.
std::optional<at::Tensor> decode(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                                 const std::optional<at::Tensor>& block_table, const at::Tensor& start,
                                 const at::Tensor& end, bool sharpen, double constant,
                                 const std::optional<at::Tensor>& rows, std::optional<at::ArrayRef<double>> by_length,
                                 bool offset, double score_scale, bool normalized_keys) {
  auto in_rows = [](const at::Tensor& x) { return x.stride(-1) == 1 ? x : x.contiguous(); };
  auto integers = [](const at::Tensor& x) { return x.to(at::kInt).contiguous(); };
  at::Tensor q = in_rows(queries), k = in_rows(keys), v = in_rows(values);
  TORCH_CHECK(k.size(3) <= WIDEST && v.size(3) <= WIDEST && q.size(-1) == k.size(3) && q.size(1) % k.size(1) == 0 &&
                  v.size(0) == k.size(0) && v.size(1) == k.size(1) && v.size(2) == k.size(2),
              "decode: shapes that do not fit");
  at::Tensor table = block_table ? integers(*block_table) : at::arange(q.size(0), at::kInt);
  Power power{sharpen, offset, constant, 0, 1, nullptr};
  if (by_length) power = {sharpen, offset, (*by_length)[0], (*by_length)[1], (*by_length)[2], nullptr};
  at::Tensor spread;
  if (rows) {
    spread = rows->to(at::kFloat).expand({q.size(0), q.size(1), 1}).contiguous();
    power.rows = spread.const_data_ptr<float>();
  }
  auto run = [&](auto one) {
    const int32_t* pages = table.const_data_ptr<int32_t>();
    int64_t blocks = block_table ? table.size(1) : 1;
    return Decode<decltype(one)>{q, k, v, pages, blocks, power, score_scale, normalized_keys}(integers(start), integers(end));
  };
  if (q.scalar_type() == at::kFloat) return run(float{});
  if (q.scalar_type() == at::kBFloat16) return run(at::BFloat16{});
  TORCH_CHECK(q.scalar_type() == at::kHalf, "decode: float32, bfloat16 or float16");
  return run(at::Half{});
}

}  // namespace

SOFTPLUS_ATTENTION_OPS(m) {
  m.def(
      "decode(Tensor q, Tensor k, Tensor v, Tensor? table, Tensor start, Tensor end, bool sharpen, float power, "
      "Tensor? power_rows, float[]? power_by_length, bool offset, float score_scale, bool normalized_keys) -> Tensor?",
      decode);
}
