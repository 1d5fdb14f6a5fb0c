// SPDX-License-Identifier: BSD-3-Clause
//
// The requests for queries, keys and values. They run ahead of the products by as many tiles as the
// ring has stages, across outputs: the first tiles of the next output are under way while the
// current one is finished.
#pragma once

#include "instances.cuh"
#include "output_cursor.cuh"
#include "ring.cuh"
#include "tile_copies.cuh"

namespace tree_attention::cuda {

template <typename Element>
constexpr int kChunkElements = 16 / static_cast<int>(sizeof(Element));

// Requests 16 bytes, or writes zeros where `exists` is false. The device might touch the source of
// a copy of no bytes, so that it is one that exists, too.
template <typename Element>
__device__ __forceinline__ void request_chunk(uint32_t destination, const Element* source,
                                              bool exists) {
  cp_async_16(destination, source, exists ? 16 : 0);
}

template <typename Element, typename Config>
class Loader {
 public:
  __device__ Loader(const LaunchParams& params, const OutputCursor<Config>& first, char* shared)
      : params_(params), queries_(shared + Config::kQueries), next_(first) {}

  // Requests tiles into the ring's free stages, up to the tiles of output `last_output`, counted
  // over the outputs that the block has tiles of. There is room for the queries of no more than the
  // current output and the next. To be called by whole warps, whose lanes may come back apart.
  __device__ void fill(Ring<Config>& ring, int last_output) {
    while (ring.has_free_stage() && next_.output_number() <= last_output) {
      if (!next_.begins_output() || begin_output()) {
        request_tile(ring.free_stage());
        ring.push();
      }
      enter_next_tile();
    }
  }

  __device__ const char* queries(int output_number) const { return query_slot(output_number); }

 private:
  using Cached = typename Config::Cached;
  using Copies = ChunkCopies<Config>;
  using Destinations = ChunkDestinations<Config>;
  template <typename T>
  using OfKeys = WhatLanesKnow<Config, T>;

  __device__ bool paged() const { return params_.decode.page_table != nullptr; }

  __device__ char* query_slot(int output_number) const {
    return queries_ + output_number % Config::kQuerySlots * Config::kQueryBytes;
  }

  // An output's queries travel with its first keys. Returns whether there is an output: the first
  // one is entered by the same code as the others.
  __device__ bool begin_output() const {
    if (next_.has_begun()) request_queries();
    return next_.has_begun();
  }

  __device__ void request_tile(char* tile) const {
    if (next_.tile() >= num_whole_tiles_) {
      request_some_chunks(tile);
    } else if (paged()) {
      request_from_pages(tile);
    } else {
      request_rows(tile);
    }
  }

  __device__ void enter_next_tile() {
    if (next_.next()) {
      if (!paged()) {
        const int keys = Config::kTileKeys << cluster_bits<Config>(params_);
        // Without this: the next tile has the keys of this one.
        k_ += keys * params_.decode.k_stride[2];
        v_ += keys * params_.decode.v_stride[2];
      }
    } else {
      if (next_.done()) return;
      enter_output();
    }
    if (next_.tile() >= num_whole_tiles_) find_seen_keys();
    if (paged()) read_pages();
  }

  __device__ void enter_output() {
    const DecodeParams& p = params_.decode;
    const OutputRows rows = next_.output().rows();
    const Keys& keys = next_.output().keys();
    k_ = static_cast<const Cached*>(p.k) + rows.head_kv * p.k_stride[1] + column(p.head_dim, 0);
    v_ = static_cast<const Cached*>(p.v) + rows.head_kv * p.v_stride[1] + column(p.head_dim_v, 0);
    if (paged()) {
      page_ids_ = p.page_table + rows.batch * p.page_table_stride[0] +
                  rows.head_kv * p.page_table_stride[1];
    } else {
      const int64_t key = next_.first_key() + Copies::first_key() + Copies::key(0);
      k_ += rows.batch * p.k_stride[0] + key * p.k_stride[2];
      v_ += rows.batch * p.v_stride[0] + key * p.v_stride[2];
    }
    num_whole_tiles_ = keys.has_gaps ? 0 : (keys.end - keys.begin) / Config::kTileKeys;
  }

  __device__ int key_of_lane(int i) const {
    return next_.first_key() + Copies::first_key() + OfKeys<int>::key(i);
  }

  __device__ void find_seen_keys() {
    const OutputCursor<Config>& output = next_.output();
    const Keys& keys = output.keys();
#pragma unroll
    for (int i = 0; i < OfKeys<int>::kCount; ++i) {
      const int key = key_of_lane(i);
      seen_.value[i] =
          key < keys.end && (!keys.has_gaps || Units<Config>::is_seen(params_, output.rows(), key));
    }
  }

  __device__ void read_pages() {
    const bool whole = next_.tile() < num_whole_tiles_;
#pragma unroll
    for (int i = 0; i < OfKeys<int>::kCount; ++i) {
      const int key = key_of_lane(i);
      const int entry = params_.page_size.quotient(key);
      slots_.value[i] = key - entry * params_.page_size.divisor;
      pages_.value[i] = whole || seen_.value[i] ? page_ids_[entry] : 0;
    }
  }

  // Where the lane's keys, or their scales, lie in all pages.
  __device__ OfKeys<int64_t> places_in_pages(const int64_t (&stride)[3]) const {
    OfKeys<int64_t> places;
#pragma unroll
    for (int i = 0; i < places.kCount; ++i) {
      places.value[i] = pages_.value[i] * stride[0] + slots_.value[i] * stride[2];
    }
    return places;
  }

  // Requests this thread's part of K and of V, or of latents of both at once. `request(offset,
  // source, stride, head_dim)` requests chunks of one of them to that offset in the tile, where
  // copy 0 comes from `source`.
  template <typename Request>
  __device__ __forceinline__ void request_both(char* tile, Request request) const {
    const DecodeParams& p = params_.decode;
    request(0, k_, p.k_stride, p.head_dim);
    if constexpr (Config::kHasScales) {
      request_scales(tile + Config::kKeyScales, p.k_scale, p.k_scale_stride);
      request_scales(tile + Config::kValueScales, p.v_scale, p.v_scale_stride);
    }
    cp_async_commit_group();
    if constexpr (!Config::kValuesInKeys) {
      request(Config::kTileBytes, v_, p.v_stride, p.head_dim_v);
    }
    cp_async_commit_group();
  }

  // Keys that follow one another at their stride.
  __device__ void request_rows(char* tile) const {
    const Destinations destinations(tile);
    const auto request = [&](int offset, const Cached* source, const int64_t (&stride)[3],
                             int head_dim) {
      const Cached* chunks[Copies::kPeriod];
#pragma unroll
      for (int i = 0; i < Copies::kPeriod; ++i) {
        const int64_t key = Copies::key(i) - Copies::key(0);
        chunks[i] = source + key * stride[2] + columns(head_dim, i);
      }
#pragma unroll
      for (int i = 0; i < Copies::kCount; ++i) {
        const Cached*& chunk = chunks[i % Copies::kPeriod];
        request_chunk(destinations[i] + offset, chunk, is_in(head_dim, i));
        chunk += Copies::kPeriodKeys * stride[2];
      }
    };
    request_both(tile, request);
  }

  __device__ void request_from_pages(char* tile) const {
    const Destinations destinations(tile);
    const auto request = [&](int offset, const Cached* source, const int64_t (&stride)[3],
                             int head_dim) {
      const OfKeys<int64_t> places = places_in_pages(stride);
#pragma unroll
      for (int i = 0; i < Copies::kCount; ++i) {
        request_chunk(destinations[i] + offset, source + places.of_copy(i) + columns(head_dim, i),
                      is_in(head_dim, i));
      }
    };
    request_both(tile, request);
  }

  // Where no row sees some keys: a short loop, because such tiles are few.
  __device__ void request_some_chunks(char* tile) const {
    // The last key of the output, from where the warp's copies of the tile begin.
    const int last = next_.output().keys().end - 1 - next_.first_key() - Copies::first_key();
    const auto request = [&](int offset, const Cached* source, const int64_t (&stride)[3],
                             int head_dim) {
      OfKeys<int64_t> places;
      if (paged()) places = places_in_pages(stride);
#pragma unroll 1
      for (int i = 0; i < Copies::kCount; ++i) {
        const bool exists = seen_.of_copy(i) != 0 && is_in(head_dim, i);
        const int64_t key = min(Copies::key(i), last) - Copies::key(0);
        const int64_t place = paged() ? places.of_copy(i) : key * stride[2];
        const int64_t from_first = place + columns(head_dim, i);
        request_chunk(Destinations::of(tile, i) + offset, source + from_first, exists);
      }
    };
    request_both(tile, request);
  }

  static __device__ bool is_in(int head_dim, int i) {
    return Copies::chunk(i) * kChunkElements<Cached> < head_dim;
  }

  // The first column of copy i, or 0 if there is no such column; and its distance from copy 0's.
  static __device__ int column(int head_dim, int i) {
    return is_in(head_dim, i) ? Copies::chunk(i) * kChunkElements<Cached> : 0;
  }
  static __device__ int columns(int head_dim, int i) {
    return Copies::kPeriod == 1 ? 0 : column(head_dim, i) - column(head_dim, 0);
  }

  // The scales of a tile's keys, or of its values, if there are any.
  __device__ void request_scales(char* scales, const float* base,
                                 const int64_t (&stride)[3]) const {
    if (base == nullptr) return;
    const OutputRows rows = next_.output().rows();
    base += rows.head_kv * stride[1];
    if (!paged()) base += rows.batch * stride[0];
    const bool whole = next_.tile() < num_whole_tiles_;
    OfKeys<int64_t> places;
    if (paged()) places = places_in_pages(stride);
#pragma unroll
    for (int i = 0; i < places.kCount; ++i) {
      if (!places.is_first()) continue;
      const int key = min(key_of_lane(i), next_.output().keys().end - 1);
      const int64_t place = paged() ? places.value[i] : key * stride[2];
      const int row = Copies::first_key() + places.key(i);
      cp_async_4(shared_address(scales + row * 4), base + place, whole || seen_.value[i] ? 4 : 0);
    }
  }

  __device__ void request_queries() const {
    const DecodeParams& p = params_.decode;
    const OutputRows rows = next_.output().rows();
    char* queries = query_slot(next_.output_number());
    using Rows = typename Config::QueryRows;
#pragma unroll 1
    for (int i = threadIdx.x; i < Config::kRows * Rows::kChunks; i += Config::kThreads) {
      const int row = i / Rows::kChunks, chunk = i % Rows::kChunks;
      const int column = chunk * kChunkElements<Element>;
      const auto [token, head] = place_of_row(params_, rows, min(row, rows.count - 1));
      const Element* source = static_cast<const Element*>(p.q) + rows.batch * p.q_stride[0] +
                              head * p.q_stride[1] + token * p.q_stride[2] +
                              (column < p.head_dim ? column : 0);
      const bool exists = row < rows.count && column < p.head_dim;
      request_chunk(shared_address(queries + Rows::offset(row, chunk)), source, exists);
    }
  }

  const LaunchParams& params_;
  char* queries_;
  TileCursor<Config> next_;  // the next tile to request
  // The first chunks that this thread copies of its keys and values, or with pages, where they
  // would be if all pages began with the tile.
  const Cached *k_, *v_;
  int num_whole_tiles_;      // of the output: the first tiles, of which every chunk exists
  OfKeys<int> seen_;         // whether some row sees the key; not set for whole tiles
  const int32_t* page_ids_;  // of the sequence; not set without pages, as are these:
  OfKeys<int32_t> pages_;    // of the next tile's keys, read one tile ahead of their use
  OfKeys<int32_t> slots_;
};

}  // namespace tree_attention::cuda
