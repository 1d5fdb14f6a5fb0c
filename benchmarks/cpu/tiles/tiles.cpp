// SPDX-License-Identifier: BSD-3-Clause
//
// lean_decode of the CPU with other tiles, as operators with its schema. The line of tiles is all
// that changes: the kernels are the product's own.
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>
#include <vector>

#include "common/fixup.h"
#include "common/partition.h"
#include "common/softmax_state.h"
#include "cpu/decode.h"
#include "cpu/kernel/decode_kernel.h"
#include "cpu/kernel/merge_rows.h"
#include "cpu/merge.h"
#include "cpu/parallel.h"
#include "cpu/shares.h"
#include "operators.h"
#include "page_ids.h"

#define TILE_KEYS 32
#include "one_tile.inl"
#define TILE_KEYS 64
#include "one_tile.inl"
#define TILE_KEYS 128
#include "one_tile.inl"
#define TILE_KEYS 256
#include "one_tile.inl"
#define TILE_KEYS 1024
#include "one_tile.inl"
