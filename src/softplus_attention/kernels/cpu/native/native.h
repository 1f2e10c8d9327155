// Shared by the kernels: vectors of floats, the functions of the method on them, and products of small matrices.
// The compiler's vector types compile to AVX-512, AVX2 or NEON from the same source.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#if defined(__AVX512BF16__)
#include <immintrin.h>
#endif

// Each source adds its operators to torch.ops.softplus_attention_native.
#define SOFTPLUS_ATTENTION_OPS(m) TORCH_LIBRARY_FRAGMENT(softplus_attention_native, m)

namespace softplus_attention {

#if defined(__AVX512F__)
constexpr int WIDTH = 16;
#elif defined(__AVX__)
constexpr int WIDTH = 8;
#else
constexpr int WIDTH = 4;
#endif
// Register tile of a matrix product: rows and vectors.
#if defined(__AVX512F__) || defined(__ARM_NEON)
constexpr int TILE_ROWS = 6, TILE_VECTORS = 4;
#else
constexpr int TILE_ROWS = 6, TILE_VECTORS = 2;
#endif

// A row whose largest x is below this has equal scores (reference.EQUAL_SCORES).
constexpr float EQUAL_SCORES = 0x1p-10f;
constexpr float LOG2_E = 1.44269504f, LN_2 = 0.69314718f;

using Vector = float __attribute__((vector_size(WIDTH * 4)));
using Integers = int32_t __attribute__((vector_size(WIDTH * 4)));

inline Vector load(const float* from) {
  Vector x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline Integers load(const int32_t* from) {
  Integers x;
  std::memcpy(&x, from, sizeof x);
  return x;
}
inline void store(float* to, Vector x) { std::memcpy(to, &x, sizeof x); }
inline void accumulate(float* to, Vector x) { store(to, load(to) + x); }
inline Vector all(float x) { return x - Vector{}; }
inline Vector largest(Vector x, Vector y) { return x > y ? x : y; }
inline Vector least(Vector x, Vector y) { return x < y ? x : y; }
inline float sum(Vector x) {
  float total = 0;
  for (int i = 0; i < WIDTH; i++) total += x[i];
  return total;
}
inline float largest(Vector x) {
  float found = x[0];
  for (int i = 1; i < WIDTH; i++) found = std::max(found, x[i]);
  return found;
}

template <int N>
inline Vector polynomial(Vector x, const float (&c)[N]) {
  Vector y = all(c[N - 1]);
  for (int i = N - 2; i >= 0; i--) y = y * x + c[i];
  return y;
}

// x = n + r with |r| <= 1/2: r, and the bits of 2^n, for -126 <= x <= 127.
inline Vector split(Vector x, Vector* power_of_two) {
  constexpr float magic = 0x1.8p23f;
  Vector shifted = x + magic;
  *power_of_two = (Vector)(((Integers)shifted << 23) + 0x3f800000);
  return x - (shifted - magic);
}
constexpr float EXP2_MINUS_1[] = {0.6931471825f, 0.2402264923f, 0.05550357327f, 0.009618237615f, 0.001339073526f,
                                  0.0001540349913f};
inline Vector exp2(Vector x) {
  Vector scale, r = split(x, &scale);
  return scale * (r * polynomial(r, EXP2_MINUS_1)) + scale;
}

// log2(1 + x) / x without the first coefficient, for x in [0, 1] and in [sqrt(1/2) - 1, sqrt(2) - 1].
constexpr float LOG2_FAR[] = {-0.7213461399f, 0.4808497131f, -0.3600119948f,  0.2838634551f,  -0.2208120674f,
                              0.1529767662f,  -0.08217362314f, 0.02863874659f, -0.004679948092f};
constexpr float LOG2_NEAR[] = {-0.7213473320f, 0.4808982313f, -0.3606967032f, 0.2885675728f, -0.2396162748f,
                               0.2045967281f,  -0.1910687983f, 0.1862045974f, -0.1099718437f};

// log2(1 + 2^t) for any finite t, with an error of one or two units in the last place, also where it is small.
inline Vector softplus2(Vector t) {
  Vector e = exp2(largest(least(t, -t), all(-126.f)));
  return e * (e * polynomial(e, LOG2_FAR) + LOG2_E) + largest(t, Vector{});
}

// The derivative of softplus2, from its value: 1 - 2^-f.
inline Vector slope_of_softplus2(Vector f) {
  Vector scale, r = split(largest(-f, all(-126.f)), &scale);
  return (1 - scale) - scale * (r * polynomial(r, EXP2_MINUS_1));
}

// For positive normal x.
inline Vector log2(Vector x) {
  Integers bits = (Integers)x;
  Integers exponent = (bits - 0x3f3504f3) >> 23;  // x = 2^exponent * (1 + m)
  Vector m = (Vector)(bits - (exponent << 23)) - 1.f;
  return (m * m * polynomial(m, LOG2_NEAR) + m * LOG2_E) + __builtin_convertvector(exponent, Vector);
}

// Operands of a product: floats, or pairs of bfloat16 that are adjacent in the summed dimension (AVX512_BF16).
using Pair = uint32_t;
template <class T>
struct Factor;
template <>
struct Factor<float> {
  Vector x;
  static Factor one(const float* from) { return {all(*from)}; }
  static Factor many(const float* from) { return {load(from)}; }
  static Vector add(Vector sum, Factor a, Factor b) { return sum + a.x * b.x; }
};
#if defined(__AVX512BF16__)
constexpr bool HAS_PAIRS = true;
template <>
struct Factor<Pair> {
  __m512i x;
  static Factor one(const Pair* from) {
    int32_t both;
    std::memcpy(&both, from, sizeof both);
    return {_mm512_set1_epi32(both)};
  }
  static Factor many(const Pair* from) { return {_mm512_loadu_si512(from)}; }
  static Vector add(Vector sum, Factor a, Factor b) {
    return (Vector)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a.x, (__m512bh)b.x);
  }
};

// Both round to bfloat16. to_pairs packs rows 2i and 2i + 1 into row i of pairs.
inline void to_halves(const float* x, int64_t count, uint16_t* to) {
  for (int64_t i = 0; i < count; i += WIDTH)
    _mm256_storeu_si256((__m256i*)(to + i), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + i)));
}
inline void to_pairs(const float* x, int64_t rows, int64_t width, Pair* to) {
  for (int64_t i = 0; i < rows; i += 2)
    for (int64_t j = 0; j < width; j += WIDTH) {
      auto halves = [&](int64_t row) {
        return _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(x + row * width + j)));
      };
      __m512i pairs = halves(i);
      if (i + 1 < rows) pairs = _mm512_or_si512(pairs, _mm512_slli_epi32(halves(i + 1), 16));
      _mm512_storeu_si512(to + i / 2 * width + j, pairs);
    }
}
#else
constexpr bool HAS_PAIRS = false;
template <>
struct Factor<Pair> {  // never called
  static Factor one(const Pair*) { return {}; }
  static Factor many(const Pair*) { return {}; }
  static Vector add(Vector sum, Factor, Factor) { return sum; }
};
inline void to_halves(const float*, int64_t, uint16_t*) {}
inline void to_pairs(const float*, int64_t, int64_t, Pair*) {}
#endif

// c[i][j] = [c[i][j] +] sum_k a[i * a_row + k * a_step] * b[k][j], for a tile of ROWS by VECTORS.
template <int ROWS, int VECTORS, class T>
inline void tile(int64_t depth, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_row, float* c,
                 int64_t c_row, bool add) {
  Vector sums[ROWS][VECTORS];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < VECTORS; j++) sums[i][j] = Vector{};
  for (int64_t k = 0; k < depth; k++) {
    Factor<T> right[VECTORS];
    for (int j = 0; j < VECTORS; j++) right[j] = Factor<T>::many(b + k * b_row + j * WIDTH);
    for (int i = 0; i < ROWS; i++) {
      Factor<T> left = Factor<T>::one(a + i * a_row + k * a_step);
      for (int j = 0; j < VECTORS; j++) sums[i][j] = Factor<T>::add(sums[i][j], left, right[j]);
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < VECTORS; j++) {
      float* to = c + i * c_row + j * WIDTH;
      store(to, add ? load(to) + sums[i][j] : sums[i][j]);
    }
}

template <int VECTORS, int ROWS = TILE_ROWS, class T>
inline void rows_left(int64_t rows, int64_t depth, const T* a, int64_t a_row, int64_t a_step, const T* b,
                      int64_t b_row, float* c, int64_t c_row, bool add) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return rows_left<VECTORS, ROWS - 1>(rows, depth, a, a_row, a_step, b, b_row, c, c_row, add);
  }
  tile<ROWS, VECTORS>(depth, a, a_row, a_step, b, b_row, c, c_row, add);
}

template <int VECTORS, class T>
inline void panel(int64_t rows, int64_t depth, const T* a, int64_t a_row, int64_t a_step, const T* b, int64_t b_row,
                  float* c, int64_t c_row, bool add) {
  int64_t i = 0;
  for (; i + TILE_ROWS <= rows; i += TILE_ROWS)
    tile<TILE_ROWS, VECTORS>(depth, a + i * a_row, a_row, a_step, b, b_row, c + i * c_row, c_row, add);
  if (i < rows)
    rows_left<VECTORS>(rows - i, depth, a + i * a_row, a_row, a_step, b, b_row, c + i * c_row, c_row, add);
}

template <int VECTORS = TILE_VECTORS, class T>
inline void vectors_left(int64_t vectors, int64_t rows, int64_t depth, const T* a, int64_t a_row, int64_t a_step,
                         const T* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  if constexpr (VECTORS > 1) {
    if (vectors < VECTORS)
      return vectors_left<VECTORS - 1>(vectors, rows, depth, a, a_row, a_step, b, b_row, c, c_row, add);
  }
  panel<VECTORS>(rows, depth, a, a_row, a_step, b, b_row, c, c_row, add);
}

// C (rows x columns) = [C +] A B. A(i, k) is a[i * a_row + k * a_step]; ``columns`` is a multiple of WIDTH. For
// T = Pair, everything except the rows of C is counted in pairs.
template <class T>
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const T* a, int64_t a_row, int64_t a_step,
                     const T* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  int64_t left = columns / WIDTH;
  for (; left >= TILE_VECTORS; left -= TILE_VECTORS) {
    panel<TILE_VECTORS>(rows, depth, a, a_row, a_step, b, b_row, c, c_row, add);
    b += TILE_VECTORS * WIDTH;
    c += TILE_VECTORS * WIDTH;
  }
  if (left) vectors_left(left, rows, depth, a, a_row, a_step, b, b_row, c, c_row, add);
}

inline int64_t rounded_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

}  // namespace softplus_attention
