// SPDX-License-Identifier: BSD-3-Clause
//
// The requests for queries, keys and values. They run ahead of the products by as many tiles as the
// ring has stages, across outputs: the first tiles of the next output are under way while the
// current one is finished.
#pragma once

#include "output_cursor.cuh"
#include "ring.cuh"
#include "tile_copies.cuh"

namespace tree_attention::cuda {

template <typename Element>
constexpr int kChunkElements = 16 / static_cast<int>(sizeof(Element));

// Requests 16 bytes from `row`, or writes zeros where `exists` is false.
template <typename Rows, typename Element>
__device__ __forceinline__ void request_chunk(char* tile, int tile_row, int chunk,
                                              const Element* row, bool exists) {
  cp_async_16(shared_address(tile + Rows::offset(tile_row, chunk)),
              row + chunk * kChunkElements<Element>, exists ? 16 : 0, createpolicy_evict_first());
}

// Where the keys and values of an output lie: the rows of its kv head in its sequence, or in all
// pages.
template <typename Cached>
struct CachePointers {
  const Cached *k, *v;
  const int32_t* page_ids;  // of the sequence; not set without pages

  __device__ void set(const DecodeParams& p, const OutputRows& rows) {
    k = static_cast<const Cached*>(p.k) + rows.head_kv * p.k_stride[1];
    v = static_cast<const Cached*>(p.v) + rows.head_kv * p.v_stride[1];
    if (p.page_table == nullptr) {
      k += rows.batch * p.k_stride[0];
      v += rows.batch * p.v_stride[0];
    } else {
      page_ids = p.page_table + rows.batch * p.page_table_stride[0] +
                 rows.head_kv * p.page_table_stride[1];
    }
  }
};

// The pages of this thread's copies of a tile. Their ids are read one tile ahead of their use, and
// only where a range needs them.
template <typename Copies>
class TilePages {
 public:
  __device__ void read(const int32_t* page_ids, const Divisor& page_size, int first_key,
                       const SeenCopies<Copies>& seen) {
#pragma unroll
    for (int i = 0; i < Copies::kCount; i += Copies::kOfRow) {
      const int key = first_key + Copies::row(i);
      const bool needed = Copies::exists(i) && seen[i];
      ids_[i / Copies::kOfRow] = needed ? page_ids[page_size.quotient(key)] : 0;
    }
  }

  __device__ int32_t of_copy(int i) const { return ids_[i / Copies::kOfRow]; }

 private:
  int32_t ids_[Copies::kCount / Copies::kOfRow];
};

template <typename Element, typename Config>
class Loader {
 public:
  __device__ Loader(const LaunchParams& params, const BlockRange& range, char* shared)
      : params_(params), queries_(shared + Config::kQueries), next_(params, range) {
    if (next_.done()) return;
    cache_.set(params_.decode, next_.output().rows());
    read_pages();
  }

  // Requests tiles into the ring's free stages, as far as those of output `last_output`, counted
  // over the outputs of which the block has tiles. There is room for the queries of no more than
  // the current output and the next.
  __device__ void fill(Ring<Config>& ring, int last_output) {
    while (ring.has_free_stage() && !next_.done() && next_.output_number() <= last_output) {
      request_tile(ring.free_stage());
      ring.push();
    }
  }

  __device__ const char* queries(int output_number) const { return query_slot(output_number); }

 private:
  using Cached = typename Config::Cached;
  using Chunks = ChunkCopies<Config>;
  using Scales = ScaleCopies<Config>;

  __device__ char* query_slot(int output_number) const {
    return queries_ + output_number % Config::kQuerySlots * Config::kQueryBytes;
  }

  // An output's queries travel with its first keys.
  __device__ void request_tile(char* tile) {
    if (next_.begins_output()) request_queries();
    const DecodeParams& p = params_.decode;
    const auto seen = seen_copies<Chunks>();
    request_rows(tile, cache_.k, p.k_stride, p.head_dim, seen);
    if constexpr (Config::kHasScales) {
      request_scales(tile + Config::kKeyScales, p.k_scale, p.k_scale_stride);
    }
    cp_async_commit_group();
    request_rows(tile + Config::kTileBytes, cache_.v, p.v_stride, p.head_dim_v, seen);
    if constexpr (Config::kHasScales) {
      request_scales(tile + Config::kValueScales, p.v_scale, p.v_scale_stride);
    }
    cp_async_commit_group();

    next_.next();
    if (next_.done()) return;
    if (next_.begins_output()) cache_.set(p, next_.output().rows());
    read_pages();
  }

  template <typename Copies>
  __device__ SeenCopies<Copies> seen_copies() const {
    const OutputCursor<Config>& output = next_.output();
    return SeenCopies<Copies>::of_tile(params_, output.rows(), output.keys(), next_.first_key());
  }

  __device__ void read_pages() {
    const DecodeParams& p = params_.decode;
    if (p.page_table == nullptr) return;
    const int first_key = next_.first_key();
    pages_.read(cache_.page_ids, params_.page_size, first_key, seen_copies<Chunks>());
    if constexpr (Config::kHasScales) {
      if (p.k_scale == nullptr) return;
      scale_pages_.read(cache_.page_ids, params_.page_size, first_key, seen_copies<Scales>());
    }
  }

  // Where the row of copy i lies on its page.
  template <typename Copies>
  __device__ int64_t place_in_pages(const TilePages<Copies>& pages, int i,
                                    const int64_t (&stride)[3]) const {
    const int key = next_.first_key() + Copies::row(i);
    const int slot = key - params_.page_size.quotient(key) * params_.page_size.divisor;
    return pages.of_copy(i) * stride[0] + slot * stride[2];
  }

  // This thread's part of a tile of K or of V.
  __device__ void request_rows(char* tile, const Cached* base, const int64_t (&stride)[3],
                               int head_dim, const SeenCopies<Chunks>& seen) const {
    using Copies = Chunks;
    const auto request = [&](int i, const Cached* row, bool exists) {
      request_chunk<typename Config::CachedRows>(tile, Copies::row(i), Copies::piece(i), row,
                                                 exists);
    };
    const auto exists = [&](int i) {
      return seen[i] && Copies::piece(i) * kChunkElements<Cached> < head_dim;
    };
    if (params_.decode.page_table != nullptr) {
#pragma unroll
      for (int i = 0; i < Copies::kCount; ++i) {
        request(i, base + place_in_pages(pages_, i, stride), exists(i));
      }
      return;
    }
    const Cached* first_row = base + next_.first_key() * stride[2];
    if (seen.all() && head_dim == Config::kHeadDim) {
#pragma unroll
      for (int i = 0; i < Copies::kCount; ++i) {
        request(i, first_row + Copies::row(i) * stride[2], true);
      }
    } else {
      for (int i = 0; i < Copies::kCount; ++i) {
        request(i, first_row + Copies::row(i) * stride[2], exists(i));
      }
    }
  }

  // This thread's scales of a tile's keys, or of its values, if there are any.
  __device__ void request_scales(char* scales, const float* base,
                                 const int64_t (&stride)[3]) const {
    if (base == nullptr) return;
    using Copies = Scales;
    const OutputRows rows = next_.output().rows();
    const bool paged = params_.decode.page_table != nullptr;
    base += rows.head_kv * stride[1] + (paged ? 0 : rows.batch * stride[0]);
    const auto seen = seen_copies<Copies>();
#pragma unroll
    for (int i = 0; i < Copies::kCount; ++i) {
      if (!Copies::exists(i)) continue;
      const int row = Copies::row(i);
      const int64_t place =
          paged ? place_in_pages(scale_pages_, i, stride) : (next_.first_key() + row) * stride[2];
      cp_async_4(shared_address(scales + row * 4), base + place, seen[i] ? 4 : 0);
    }
  }

  __device__ void request_queries() const {
    const DecodeParams& p = params_.decode;
    const OutputRows rows = next_.output().rows();
    char* queries = query_slot(next_.output_number());
    using Rows = typename Config::QueryRows;
    for (int i = threadIdx.x; i < Config::kRows * Rows::kChunks; i += Config::kThreads) {
      const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
      const auto [token, head] = place_of_row(params_, rows, row);
      const Element* source = static_cast<const Element*>(p.q) + rows.batch * p.q_stride[0] +
                              head * p.q_stride[1] + token * p.q_stride[2];
      const bool exists = row < rows.count && chunk * kChunkElements<Element> < p.head_dim;
      request_chunk<Rows>(queries, row, chunk, source, exists);
    }
  }

  const LaunchParams& params_;
  char* queries_;
  TileCursor<Config> next_;  // the next tile to request
  CachePointers<Cached> cache_;
  // The pages of the next tile's keys and of their scales; not set without pages.
  TilePages<Chunks> pages_;
  TilePages<Scales> scale_pages_;
};

}  // namespace tree_attention::cuda
