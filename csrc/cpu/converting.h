// SPDX-License-Identifier: BSD-3-Clause
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "common/dtype.h"

namespace tree_attention::cpu {

// The class of c10 in an element's format, which converts to float and back.
template <typename Element>
struct Converting {
  using type = Element;
};
template <>
struct Converting<BFloat16> {
  using type = c10::BFloat16;
};
template <>
struct Converting<Float16> {
  using type = c10::Half;
};

}  // namespace tree_attention::cpu
