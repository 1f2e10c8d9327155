// What the kernels share: vectors of floats, the functions of the method on them, and products of small matrices.
// Compilers' own vectors, not one CPU's: the same source is AVX-512, AVX2 or NEON.
#pragma once

#include <ATen/core/Tensor.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdint>
#include <cstring>

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
// Of a product's tile: so many rows by so many vectors stay in registers.
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

// log2(1 + 2^t), to a few units in the last place also where it is small, for any finite t.
inline Vector softplus2(Vector t) {
  constexpr float c[] = {1.4426950216f, -0.7213401794f, 0.4806929231f, -0.3584082723f, 0.2756406367f,
                         -0.1971172988f, 0.1128542200f, -0.04256584868f, 0.007548878901f};
  Vector e = exp2(largest(least(t, -t), all(-126.f)));
  return largest(t, Vector{}) + e * polynomial(e, c);
}

// The derivative of softplus2, from its value: 1 - 2^-f.
inline Vector slope_of_softplus2(Vector f) {
  Vector scale, r = split(largest(-f, all(-126.f)), &scale);
  return (1 - scale) - scale * (r * polynomial(r, EXP2_MINUS_1));
}

// For positive normal x.
inline Vector log2(Vector x) {
  constexpr float c[] = {1.4426950216f, -0.7213473320f, 0.4809106588f, -0.3607037961f, 0.2879154384f,
                         -0.2389414310f, 0.2157207876f, -0.2072983831f, 0.1258593202f};
  Integers bits = (Integers)x;
  Integers exponent = (bits - 0x3f3504f3) >> 23;  // x = 2^exponent * m, m from sqrt(1/2) on
  Vector m = (Vector)(bits - (exponent << 23)) - 1.f;
  return __builtin_convertvector(exponent, Vector) + m * polynomial(m, c);
}

// c[i][j] = [c[i][j] +] sum_k a[i * a_row + k * a_step] * b[k][j], for a tile of ROWS by VECTORS.
template <int ROWS, int VECTORS>
inline void tile(int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b, int64_t b_row, float* c,
                 int64_t c_row, bool add) {
  Vector sums[ROWS][VECTORS];
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < VECTORS; j++) sums[i][j] = add ? load(c + i * c_row + j * WIDTH) : Vector{};
  for (int64_t k = 0; k < depth; k++) {
    Vector right[VECTORS];
    for (int j = 0; j < VECTORS; j++) right[j] = load(b + k * b_row + j * WIDTH);
    for (int i = 0; i < ROWS; i++) {
      Vector left = all(a[i * a_row + k * a_step]);
      for (int j = 0; j < VECTORS; j++) sums[i][j] += left * right[j];
    }
  }
  for (int i = 0; i < ROWS; i++)
    for (int j = 0; j < VECTORS; j++) store(c + i * c_row + j * WIDTH, sums[i][j]);
}

template <int VECTORS, int ROWS = TILE_ROWS>
inline void rows_left(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b,
                      int64_t b_row, float* c, int64_t c_row, bool add) {
  if constexpr (ROWS > 1) {
    if (rows < ROWS) return rows_left<VECTORS, ROWS - 1>(rows, depth, a, a_row, a_step, b, b_row, c, c_row, add);
  }
  tile<ROWS, VECTORS>(depth, a, a_row, a_step, b, b_row, c, c_row, add);
}

template <int VECTORS>
inline void panel(int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_step, const float* b,
                  int64_t b_row, float* c, int64_t c_row, bool add) {
  int64_t i = 0;
  for (; i + TILE_ROWS <= rows; i += TILE_ROWS)
    tile<TILE_ROWS, VECTORS>(depth, a + i * a_row, a_row, a_step, b, b_row, c + i * c_row, c_row, add);
  if (i < rows)
    rows_left<VECTORS>(rows - i, depth, a + i * a_row, a_row, a_step, b, b_row, c + i * c_row, c_row, add);
}

template <int VECTORS = TILE_VECTORS>
inline void vectors_left(int64_t vectors, int64_t rows, int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                         const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
  if constexpr (VECTORS > 1) {
    if (vectors < VECTORS)
      return vectors_left<VECTORS - 1>(vectors, rows, depth, a, a_row, a_step, b, b_row, c, c_row, add);
  }
  panel<VECTORS>(rows, depth, a, a_row, a_step, b, b_row, c, c_row, add);
}

// C (rows x columns) = [C +] A B, where A(i, k) is a[i * a_row + k * a_step] and ``columns`` are whole vectors.
inline void multiply(int64_t rows, int64_t columns, int64_t depth, const float* a, int64_t a_row, int64_t a_step,
                     const float* b, int64_t b_row, float* c, int64_t c_row, bool add) {
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
