// SPDX-License-Identifier: BSD-3-Clause
//
// The ring of K and V tiles in shared memory. Requests run ahead of the products by as many tiles
// as the ring has stages, across outputs: the first tiles of the next output are under way while
// the current one is finished. Each key group fetches and waits for its own keys, so that the warps
// of a block with 16 rows do not wait for one another inside an output.
#pragma once

#include "schedule.cuh"

namespace tree_attention::cuda {

template <typename Element, typename Config>
class LoadRing {
 public:
  __device__ LoadRing(const Schedule<Config>& schedule, char* shared)
      : params_(schedule.params()), shared_(shared), cursor_(schedule) {
    enter_output();
    locate_pages();
  }

  // Requests tiles into the free stages, as far as those of output `last_output`, counted over the
  // outputs of which the block has tiles. Queries have a place for no more than the current output
  // and the next.
  __device__ void fill(int last_output) {
    while (ahead_ < params_.num_stages && !cursor_.done() && output_ <= last_output) request_tile();
  }

  // Waits until the keys (values) of the oldest tile are there for all threads of the key group.
  // The stage of the tile before it is free then.
  __device__ void wait_for_keys() const { wait<1>(); }
  __device__ void wait_for_values() const { wait<0>(); }

  // Between threads that fetch the same keys.
  static __device__ void sync_key_group() {
    if constexpr (Config::kRowGroups == 1) {
      __syncwarp();
    } else {
      __syncthreads();
    }
  }

  __device__ const char* queries(int output) const {
    return shared_ + Config::kQueries + output % Config::kQuerySlots * Config::kQueryBytes;
  }
  __device__ const char* keys() const { return stage(oldest_); }
  __device__ const char* values() const { return stage(oldest_) + Config::kTileBytes; }

  // Leaves the oldest tile.
  __device__ void pop() {
    --ahead_;
    oldest_ = next_stage(oldest_);
  }

 private:
  // Until at most kPending of the oldest tile's two groups are incomplete. Comparisons in turn:
  // of a switch the compiler makes an indirect jump.
  template <int kPending>
  __device__ void wait() const {
    if (ahead_ > 3) return cp_async_wait_group<6 + kPending>();
    if (ahead_ > 2) return cp_async_wait_group<4 + kPending>();
    if (ahead_ > 1) return cp_async_wait_group<2 + kPending>();
    cp_async_wait_group<kPending>();
  }

  // 16-byte copies of one thread for the K of a tile, and again for the V.
  static constexpr int kLoaders = 32 * Config::kRowGroups;
  static constexpr int kCopies = Config::kGroupKeys * Config::kChunks / kLoaders;
  static_assert(Config::kGroupKeys * Config::kChunks % kLoaders == 0);
  static constexpr uint32_t kAllCopies = 0xffffffff;
  static constexpr int kCopiesOfRow =
      Config::kChunks % kLoaders == 0 ? Config::kChunks / kLoaders : 1;

  // Copy i of this thread: chunk of a row of the tile.
  static __device__ int row_of_copy(int i) {
    const int index = threadIdx.x % kLoaders + i * kLoaders;
    return threadIdx.x / kLoaders * Config::kGroupKeys + index / Config::kChunks;
  }
  static __device__ int chunk_of_copy(int i) {
    return (threadIdx.x % kLoaders + i * kLoaders) % Config::kChunks;
  }

  __device__ char* stage(int index) const {
    return shared_ + Config::kRing + index * Config::kStageBytes;
  }
  __device__ int next_stage(int index) const {
    return index + 1 == params_.num_stages ? 0 : index + 1;
  }

  // From the cursor's output on, to the first of which the block has tiles.
  __device__ void enter_output() {
    const DecodeParams& p = params_.decode;
    while (!cursor_.done() && cursor_.tile_begin() == cursor_.tile_end()) cursor_.next();
    if (cursor_.done()) return;
    tile_ = cursor_.tile_begin();
    const OutputRows rows = cursor_.rows();
    const int64_t k_begin = rows.head_kv * p.k_stride[1], v_begin = rows.head_kv * p.v_stride[1];
    k_ = static_cast<const Element*>(p.k) + k_begin;
    v_ = static_cast<const Element*>(p.v) + v_begin;
    if (p.page_table == nullptr) {
      k_ += rows.batch * p.k_stride[0];
      v_ += rows.batch * p.v_stride[0];
    } else {
      pages_of_sequence_ = p.page_table + rows.batch * p.page_table_stride[0] +
                           rows.head_kv * p.page_table_stride[1];
    }
  }

  __device__ int first_key() const { return cursor_.keys().begin + tile_ * Config::kTileKeys; }

  // Page ids are read one tile ahead of their use, and only where a range needs them.
  __device__ void locate_pages() {
    if (params_.decode.page_table == nullptr || cursor_.done()) return;
    const uint32_t seen = seen_copies();
#pragma unroll
    for (int i = 0; i < kCopies; i += kCopiesOfRow) {
      const int key = first_key() + row_of_copy(i);
      pages_[i / kCopiesOfRow] = (seen >> i & 1) && key < cursor_.keys().end
                                     ? pages_of_sequence_[params_.page_size.quotient(key)]
                                     : 0;
    }
  }

  __device__ void request_tile() {
    if (tile_ == cursor_.tile_begin()) request_queries();
    const DecodeParams& p = params_.decode;
    char* tile = stage(newest_);
    request(tile, k_, p.k_stride, p.head_dim);
    cp_async_commit_group();
    request(tile + Config::kTileBytes, v_, p.v_stride, p.head_dim_v);
    cp_async_commit_group();
    ++ahead_;
    newest_ = next_stage(newest_);

    if (++tile_ == cursor_.tile_end()) {
      cursor_.next();
      ++output_;
      enter_output();
    }
    locate_pages();
  }

  __device__ void request(char* tile, const Element* base, const int64_t (&stride)[3],
                          int head_dim) const {
    const uint32_t seen = seen_copies();
    const bool whole = first_key() + Config::kTileKeys <= cursor_.keys().end &&
                       seen == kAllCopies && head_dim == Config::kHeadDim;
    if (params_.decode.page_table != nullptr) {
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        const int key = first_key() + row_of_copy(i);
        const int page = params_.page_size.quotient(key);
        const int slot = key - page * static_cast<int>(params_.page_size.divisor);
        request_chunk(tile, i, base + pages_[i / kCopiesOfRow] * stride[0] + slot * stride[2],
                      exists(i, head_dim, seen));
      }
    } else if (whole) {
      base += first_key() * stride[2];
#pragma unroll
      for (int i = 0; i < kCopies; ++i) {
        request_chunk(tile, i, base + row_of_copy(i) * stride[2], true);
      }
    } else {
      base += first_key() * stride[2];
      for (int i = 0; i < kCopies; ++i) {
        request_chunk(tile, i, base + row_of_copy(i) * stride[2], exists(i, head_dim, seen));
      }
    }
  }

  // Bit i: whether some query sees the key of copy i, unless it is past the last key.
  __device__ uint32_t seen_copies() const {
    static_assert(kCopies <= 32);
    if (!cursor_.keys().has_gaps) return kAllCopies;
    uint32_t seen = 0;
#pragma unroll 1
    for (int i = 0; i < kCopies; ++i) {
      const int key = first_key() + row_of_copy(i);
      if (Schedule<Config>::is_seen(params_, cursor_.rows(), key)) seen |= 1u << i;
    }
    return seen;
  }

  // Keys that no query sees become zero: whatever lies there, NaN too, would reach o through a
  // weight of zero. Their pages need not exist.
  __device__ bool exists(int i, int head_dim, uint32_t seen) const {
    return (seen >> i & 1) && first_key() + row_of_copy(i) < cursor_.keys().end &&
           chunk_of_copy(i) * Config::kChunkElements < head_dim;
  }

  __device__ void request_chunk(char* tile, int i, const Element* row, bool exists) const {
    const int chunk = chunk_of_copy(i);
    cp_async_16(shared_address(tile + Config::chunk_offset(row_of_copy(i), chunk)),
                row + chunk * Config::kChunkElements, exists ? 16 : 0, createpolicy_evict_first());
  }

  // The queries of an output travel with its first keys.
  __device__ void request_queries() const {
    const DecodeParams& p = params_.decode;
    const OutputRows rows = cursor_.rows();
    char* queries =
        shared_ + Config::kQueries + output_ % Config::kQuerySlots * Config::kQueryBytes;
    for (int i = threadIdx.x; i < Config::kRows * Config::kChunks; i += Config::kThreads) {
      const int row = i / Config::kChunks, chunk = i % Config::kChunks;
      const auto [token, head] = place_of_row(params_, rows, row);
      const Element* source = static_cast<const Element*>(p.q) + rows.batch * p.q_stride[0] +
                              head * p.q_stride[1] + token * p.q_stride[2] +
                              chunk * Config::kChunkElements;
      const bool exists = row < rows.count && chunk * Config::kChunkElements < p.head_dim;
      cp_async_16(shared_address(queries + Config::chunk_offset(row, chunk)), source,
                  exists ? 16 : 0, createpolicy_evict_first());
    }
  }

  const LaunchParams& params_;
  char* shared_;
  // Of the next tile to request.
  Cursor<Config> cursor_;
  int tile_, output_ = 0;
  const Element *k_, *v_;
  const int32_t* pages_of_sequence_;
  int32_t pages_[kCopies / kCopiesOfRow];
  int newest_ = 0;  // stage it goes to

  int oldest_ = 0;  // stage of the oldest tile
  int ahead_ = 0;   // tiles requested and not left
};

}  // namespace tree_attention::cuda
