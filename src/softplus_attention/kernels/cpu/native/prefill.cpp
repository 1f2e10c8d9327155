#include "native.h"

#include <string>

namespace {

std::string instructions() {
#if defined(__AMX_BF16__)
  return "AVX-512 and AMX";
#elif defined(__AVX512BF16__)
  return "AVX-512 with bfloat16";
#elif defined(__AVX512F__)
  return "AVX-512";
#elif defined(__AVX2__)
  return "AVX2";
#elif defined(__ARM_NEON)
  return "NEON";
#else
  return "no vector instructions known";
#endif
}

}  // namespace

SOFTPLUS_ATTENTION_OPS(m) {
  m.def("instructions() -> str", instructions);
}
