// SPDX-License-Identifier: BSD-3-Clause
//
// The operators' entry points on CUDA, on the current stream of the current device. The host waits
// for nothing.
#pragma once

#include <tuple>

#include "common/append_params.h"
#include "common/merge_params.h"
#include "common/range_params.h"
#include "decode/launch.h"
#include "one_shot/one_shot.cuh"

namespace tree_attention::cuda {

void lean_decode(const DecodeParams& params);

// Refuses what lean_decode refuses, and launches nothing.
void check_decode(const DecodeParams& params);

// Blocks on a multiprocessor, planned, and resident by the driver; whether the kernel is that by
// wgmma.
std::tuple<int64_t, int64_t, bool> lean_decode_plan(const DecodeParams& params);

void merge_states(const MergeParams& params);

void split_ranges(const RangeParams& params);

void append_kv(const AppendParams& params);

// params.host is an address of the host's; the kernel gets the device's address of that memory.
void launch_one_shot(OneShotParams& params);

}  // namespace tree_attention::cuda
