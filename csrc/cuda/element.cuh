// SPDX-License-Identifier: BSD-3-Clause
//
// Conversions between the element types of dtype.h and float, and what moves several elements at
// once.
#pragma once

#include "common/dtype.h"
#include "device.h"

namespace tree_attention::cuda {

__device__ __forceinline__ float to_float(float x) { return x; }
__device__ __forceinline__ float to_float(BFloat16 x) {
  return __builtin_bit_cast(float, static_cast<uint32_t>(x.bits) << 16);
}
__device__ __forceinline__ float to_float(Float16 x) { return cvt_f32_f16(x.bits); }

// The nearest Element; ties go to the even one.
template <typename Element>
__device__ __forceinline__ Element from_float(float x);

template <>
__device__ __forceinline__ float from_float<float>(float x) {
  return x;
}
template <>
__device__ __forceinline__ BFloat16 from_float<BFloat16>(float x) {
  return {static_cast<uint16_t>(cvt_bf16x2(x, 0.0f))};
}
template <>
__device__ __forceinline__ Float16 from_float<Float16>(float x) {
  return {static_cast<uint16_t>(cvt_f16x2(x, 0.0f))};
}

// Two 16-bit elements in a register, `low` in the lower half, as mma takes them.
template <typename Element>
__device__ __forceinline__ uint32_t pack(float low, float high);

template <>
__device__ __forceinline__ uint32_t pack<BFloat16>(float low, float high) {
  return cvt_bf16x2(low, high);
}
template <>
__device__ __forceinline__ uint32_t pack<Float16>(float low, float high) {
  return cvt_f16x2(low, high);
}

struct Float1 {
  float value[1];
};

// Two floats that move in one 8-byte access.
struct __align__(8) Float2 {
  float value[2];
};

__device__ __forceinline__ Float2 load_float2(const float* aligned) {
  return *reinterpret_cast<const Float2*>(aligned);
}

// Four floats that move in one 16-byte access.
struct __align__(16) Float4 {
  float value[4];
};

__device__ __forceinline__ Float4 load_float4(const float* aligned) {
  return *reinterpret_cast<const Float4*>(aligned);
}

__device__ __forceinline__ void store_global_float4(float* aligned, const Float4& x) {
  st_global_v4(aligned, x.value);
}

// One, two or four floats.
template <typename Floats>
__device__ __forceinline__ void store_shared(float* aligned, const Floats& x) {
  *reinterpret_cast<Floats*>(aligned) = x;
}

}  // namespace tree_attention::cuda
