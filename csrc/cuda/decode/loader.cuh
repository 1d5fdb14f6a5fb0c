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

// Requests 16 bytes from `row`, or writes zeros where `exists` is false.
template <typename Config, typename Element>
__device__ __forceinline__ void request_chunk(char* tile, int tile_row, int chunk,
                                              const Element* row, bool exists) {
  cp_async_16(shared_address(tile + Config::chunk_offset(tile_row, chunk)),
              row + chunk * Config::kChunkElements, exists ? 16 : 0, createpolicy_evict_first());
}

// Where the keys and values of an output lie: the rows of its kv head in its sequence, or in all
// pages.
template <typename Element>
struct CachePointers {
  const Element *k, *v;
  const int32_t* page_ids;  // of the sequence; not set without pages

  __device__ void set(const DecodeParams& p, const OutputRows& rows) {
    k = static_cast<const Element*>(p.k) + rows.head_kv * p.k_stride[1];
    v = static_cast<const Element*>(p.v) + rows.head_kv * p.v_stride[1];
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
template <typename Config>
class TilePages {
 public:
  using Copies = TileCopies<Config>;

  __device__ void read(const int32_t* page_ids, const Divisor& page_size, int first_key,
                       const SeenCopies<Config>& seen) {
#pragma unroll
    for (int i = 0; i < Copies::kCount; i += Copies::kOfRow) {
      const int key = first_key + Copies::row(i);
      ids_[i / Copies::kOfRow] = seen[i] ? page_ids[page_size.quotient(key)] : 0;
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
  using Copies = TileCopies<Config>;

  __device__ char* query_slot(int output_number) const {
    return queries_ + output_number % Config::kQuerySlots * Config::kQueryBytes;
  }

  // An output's queries travel with its first keys.
  __device__ void request_tile(char* tile) {
    if (next_.begins_output()) request_queries();
    const DecodeParams& p = params_.decode;
    const SeenCopies<Config> seen = seen_copies();
    request_rows(tile, cache_.k, p.k_stride, p.head_dim, seen);
    cp_async_commit_group();
    request_rows(tile + Config::kTileBytes, cache_.v, p.v_stride, p.head_dim_v, seen);
    cp_async_commit_group();

    next_.next();
    if (next_.done()) return;
    if (next_.begins_output()) cache_.set(p, next_.output().rows());
    read_pages();
  }

  __device__ SeenCopies<Config> seen_copies() const {
    const OutputCursor<Config>& output = next_.output();
    return SeenCopies<Config>::of_tile(params_, output.rows(), output.keys(), next_.first_key());
  }

  __device__ void read_pages() {
    if (params_.decode.page_table == nullptr) return;
    pages_.read(cache_.page_ids, params_.page_size, next_.first_key(), seen_copies());
  }

  // This thread's part of a tile of K or of V.
  __device__ void request_rows(char* tile, const Element* base, const int64_t (&stride)[3],
                               int head_dim, const SeenCopies<Config>& seen) const {
    const auto request = [&](int i, const Element* row, bool exists) {
      request_chunk<Config>(tile, Copies::row(i), Copies::chunk(i), row, exists);
    };
    const auto exists = [&](int i) {
      return seen[i] && Copies::chunk(i) * Config::kChunkElements < head_dim;
    };
    if (params_.decode.page_table != nullptr) {
#pragma unroll
      for (int i = 0; i < Copies::kCount; ++i) {
        const int key = next_.first_key() + Copies::row(i);
        const int slot = key - params_.page_size.quotient(key) * params_.page_size.divisor;
        request(i, base + pages_.of_copy(i) * stride[0] + slot * stride[2], exists(i));
      }
      return;
    }
    const Element* first_row = base + next_.first_key() * stride[2];
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

  __device__ void request_queries() const {
    const DecodeParams& p = params_.decode;
    const OutputRows rows = next_.output().rows();
    char* queries = query_slot(next_.output_number());
    for (int i = threadIdx.x; i < Config::kRows * Config::kChunks; i += Config::kThreads) {
      const int row = i / Config::kChunks, chunk = i % Config::kChunks;
      const auto [token, head] = place_of_row(params_, rows, row);
      const Element* source = static_cast<const Element*>(p.q) + rows.batch * p.q_stride[0] +
                              head * p.q_stride[1] + token * p.q_stride[2];
      const bool exists = row < rows.count && chunk * Config::kChunkElements < p.head_dim;
      request_chunk<Config>(queries, row, chunk, source, exists);
    }
  }

  const LaunchParams& params_;
  char* queries_;
  TileCursor<Config> next_;  // the next tile to request
  CachePointers<Element> cache_;
  TilePages<Config> pages_;  // of the next tile, if there are pages
};

}  // namespace tree_attention::cuda
