// What the kernels share: the namespace of their operators, in which every source adds its own, and vectors of floats.
#pragma once

#include <torch/library.h>

#define SOFTPLUS_ATTENTION_OPS(m) TORCH_LIBRARY_FRAGMENT(softplus_attention_native, m)
