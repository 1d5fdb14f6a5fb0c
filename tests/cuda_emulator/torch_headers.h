// SPDX-License-Identifier: BSD-3-Clause
//
// What the sources that connect the kernels with torch include of it: precompiled, it begins all of
// them (tests/compilation.py).

#include <ATen/MemoryOverlap.h>
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>
#include <c10/util/Exception.h>
#include <torch/library.h>
