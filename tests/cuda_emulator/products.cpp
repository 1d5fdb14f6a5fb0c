// SPDX-License-Identifier: BSD-3-Clause
#include "products.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>

#include "block.h"
#include "hopper.h"
#include "machine.h"
#include "ptx_host.h"
#include "run.h"
#include "sanitizers.h"
#include "tensor_core.h"

namespace tree_attention::emulator {
namespace {

constexpr size_t kWarps = 4;               // in a warpgroup
constexpr int kM = 16, kK = 16;            // one warp's part of a product
constexpr int kMostAccumulators = 32;      // of a thread
constexpr uint32_t kUnknown = 0xffffffff;  // the bits of an accumulator before the wait
constexpr int kChunk = 16, kChunkElements = 8;

// Calls `visit` with the address and the place of each chunk that this warp reads of a and b:
// whether it is of a, its row, its k.
template <typename Visit>
void for_each_chunk(const Product& product, size_t warp, const std::source_location& where,
                    const Visit& visit) {
  const Matrix a = matrix_of(product.a, product.transposed_a, where);
  const int first = static_cast<int>(warp % kWarps) * kM;
  for (int i = 0; i < (a.transposed ? kK : kM); ++i) {
    for (int c = 0; c < 2 * kChunkElements; c += kChunkElements) {
      const int row = a.transposed ? c : i, k = a.transposed ? i : c;
      visit(a.chunk(first + row, k), true, row, k);
    }
  }
  const Matrix b = matrix_of(product.b, false, where);
  for (int row = 0; row < 2 * product.count; ++row) {
    for (int k = 0; k < kK; k += kChunkElements) visit(b.chunk(row, k), false, row, k);
  }
}

void record_reads(const Product& product, const std::source_location& where) {
  for_each_chunk(product, Run::current->index / kWarpSize, where,
                 [&](uint32_t address, bool, int, int) {
                   record_read(shared_bytes(address, kChunk, where), kChunk);
                 });
}

void record_reads_under_way() {
  for (size_t i = 0;; ++i) {
    Product product;
    std::source_location where;
    {
      const Hidden hidden;
      const auto& issued = Run::current->warp->products.issued;
      if (i == issued.size()) return;
      product = issued[i].product;
      where = issued[i].where;
    }
    record_reads(product, where);
  }
}

const char* name_of(const Product& product) { return product.bf16 ? "wgmma.bf16" : "wgmma.f16"; }

// Fails unless the four warps of a warpgroup call the same products in the same order. A warp does
// not wait for the other three.
void note_step(const char* name, const Product& product, const std::source_location& where) {
  Warp& warp = *Run::current->warp;
  const size_t group = Run::current->index / kWarpSize / kWarps;
  if ((group + 1) * kWarps > warp.block->warps.size()) {
    fail("a warpgroup is four warps, of which the block has not all", where);
  }
  auto& steps = warp.block->product_logs[group].steps;
  const ProductLog::Step step{name, product};
  if (warp.products.num_steps == steps.size()) {
    steps.push_back(step);
  } else if (!(steps[warp.products.num_steps] == step)) {
    fail(std::string("another warp of the warpgroup has issued ") +
             steps[warp.products.num_steps].name + " with other operands, or not " + name,
         where);
  }
  ++warp.products.num_steps;
}

struct LaneOperands {
  const Product* product;
  float* const* d;
  const std::source_location* where;
};

// The sums of the last product under way that adds to the same accumulators, or null.
std::shared_ptr<std::vector<float>> find_sums(const Products& products,
                                              const std::vector<float*>& d,
                                              const std::source_location& where) {
  std::vector<float*> sorted = d;
  std::ranges::sort(sorted);
  for (auto issued = products.issued.rbegin(); issued != products.issued.rend(); ++issued) {
    if (issued->d == d) return issued->sums;
    const bool shares = std::any_of(issued->d.begin(), issued->d.end(), [&](float* x) {
      return std::ranges::binary_search(sorted, x);
    });
    if (shares) fail("accumulators of a product under way in another order or number", where);
  }
  return nullptr;
}

void issue(void* const (&lanes)[kWarpSize]) {
  const auto& first = *static_cast<LaneOperands*>(lanes[0]);
  const Product& product = *first.product;
  const std::source_location& where = *first.where;
  Warp& warp = *Run::current->warp;
  Products& products = warp.products;
  Products::Issued issued{product, {}, nullptr, where};
  for (int lane = 0; lane < kWarpSize; ++lane) {
    const auto& operands = *static_cast<LaneOperands*>(lanes[lane]);
    if (!(*operands.product == product)) fail("lanes give a product other operands", where);
    issued.d.insert(issued.d.end(), operands.d, operands.d + product.count);
  }
  issued.sums = find_sums(products, issued.d, where);
  if (issued.sums == nullptr && !products.fenced) {
    fail("a product whose registers may have been touched since the last wgmma.fence", where);
  }
  note_step(name_of(product), product, where);
  for_each_chunk(product, 0, where, [](uint32_t, bool, int, int) {});  // the descriptors
  if (issued.sums == nullptr) {
    issued.sums = std::make_shared<std::vector<float>>();
    for (float* d : issued.d) {
      issued.sums->push_back(*d);
      *d = std::bit_cast<float>(kUnknown);
    }
  }
  products.issued.push_back(std::move(issued));
  Run::running->begin_product(warp);
}

template <typename Function>
void in_warp(const char* name, const std::source_location& where, Function function) {
  struct Operands {
    Function* function;
    const std::source_location* where;
  } operands{&function, &where};
  warp_function(
      name, &operands,
      [](void* const(&lanes)[kWarpSize]) {
        const auto& operands = *static_cast<Operands*>(lanes[0]);
        (*operands.function)(*Run::current->warp, *operands.where);
      },
      where);
}

// Gives the accumulators of a product that the wait covers, unless a later one adds to them.
void give_sums(Products& products) {
  const Products::Issued done = std::move(products.issued.front());
  products.issued.pop_front();
  const bool again = std::any_of(products.issued.begin(), products.issued.end(),
                                 [&](const auto& later) { return later.sums == done.sums; });
  if (again) return;
  for (size_t i = 0; i < done.d.size(); ++i) {
    if (std::bit_cast<uint32_t>(*done.d[i]) != kUnknown) {
      fail("an accumulator was written while a product was under way", done.where);
    }
    *done.d[i] = (*done.sums)[i];
  }
}

}  // namespace

Matrix matrix_of(uint64_t descriptor, bool transposed, const std::source_location& where) {
  const auto field = [descriptor](int bit) {
    return static_cast<uint32_t>(descriptor >> bit & 0x3fff) << 4;
  };
  const Matrix matrix{field(0), field(16), field(32), transposed};
  if (descriptor >> 62 != 1) fail("only the swizzle of 128 bytes is emulated", where);
  const uint64_t fields = uint64_t{3} << 62 | uint64_t{0x3fff} << 32 | 0x3fff3fff;
  if ((descriptor & ~fields) != 0) fail("bits of a descriptor that are no field here", where);
  if (matrix.begin % 1024 >= 128) {
    fail("a matrix begins in a row of its box that is not the first of eight", where);
  }
  if (!transposed && matrix.begin % 128 > 128 - kK * 2) {
    fail("k runs over the end of the rows of a box", where);
  }
  if (transposed && matrix.begin % 128 != 0) fail("m begins within a box", where);
  return matrix;
}

void do_product(Warp& warp) {
  Products& products = warp.products;
  const Products::Issued& issued = products.issued[products.num_done];
  const Product& product = issued.product;
  ++products.num_done;
  const auto element = [&](uint16_t bits) {
    return product.bf16 ? cuda::cvt_f32_bf16(bits) : cuda::cvt_f32_f16(bits);
  };
  float a[kM][kK], b[2 * kMostAccumulators][kK];
  Block& block = *warp.block;
  const size_t index = warp.lanes[0]->index / kWarpSize;
  for_each_chunk(product, index, issued.where, [&](uint32_t address, bool of_a, int row, int k) {
    const char* const bytes = block_bytes(block, address, kChunk, issued.where);
    const size_t offset = bytes - block.shared.get();
    if (std::memcmp(bytes, block.async().memory.data() + offset, kChunk) != 0) {
      throw Error(at(issued.where) + ": a product reads at " + std::to_string(offset) +
                  " what threads have written without fence.proxy.async");
    }
    uint16_t elements[kChunkElements];
    std::memcpy(elements, bytes, kChunk);
    for (int i = 0; i < kChunkElements; ++i) {
      const bool down = of_a && product.transposed_a;
      float (&of_row)[kK] = (of_a ? a : b)[down ? row + i : row];
      of_row[down ? k : k + i] = element(elements[i]);
    }
  });
  for (int n = 0; n < product.count / 4; ++n) {
    float d[kM][8];
    const auto each = [&](auto visit) {
      for (int lane = 0; lane < kWarpSize; ++lane) {
        for (int i = 0; i < 4; ++i) {
          const Place place = place_of(lane, i);
          visit((*issued.sums)[lane * product.count + 4 * n + i], d[place.row][place.column]);
        }
      }
    };
    each([](const float& sum, float& of_d) { of_d = sum; });
    add_products(a, reinterpret_cast<const float (&)[8][kK]>(b[8 * n]), d);
    each([](float& sum, const float& of_d) { sum = of_d; });
  }
}

void require_equal_products(const Block& block) {
  for (const auto& warp : block.warps) {
    const auto log = block.product_logs.find(warp->lanes[0]->index / kWarpSize / kWarps);
    if (log != block.product_logs.end() && warp->products.num_steps != log->second.steps.size()) {
      throw Error("a warp has taken " + std::to_string(warp->products.num_steps) + " of the " +
                  std::to_string(log->second.steps.size()) +
                  " steps that another of its warpgroup has with products");
    }
  }
}

void begin_product(const Product& product, float* const* d, const std::source_location& where) {
  if (kThreadSanitizer && Run::current->lane == 0) record_reads(product, where);
  LaneOperands operands{&product, d, &where};
  warp_function(name_of(product), &operands, issue, where);
}

void fence_products(const std::source_location& where) {
  in_warp("wgmma.fence", where, [](Warp& warp, const std::source_location& where) {
    note_step("wgmma.fence", {}, where);
    warp.products.fenced = true;
  });
}

void commit_products(const std::source_location& where) {
  in_warp("wgmma.commit_group", where, [](Warp& warp, const std::source_location& where) {
    note_step("wgmma.commit_group", {}, where);
    warp.products.group_ends.push_back(warp.products.issued.size());
  });
}

void wait_for_products(int pending, const std::source_location& where) {
  if (kThreadSanitizer && Run::current->lane == 0) record_reads_under_way();
  static constexpr const char* kName = "wgmma.wait_group";
  const auto wait = [pending](Warp& warp, const std::source_location& where) {
    Products& products = warp.products;
    note_step(kName, {}, where);
    products.fenced = false;
    if (products.group_ends.size() <= static_cast<size_t>(pending)) return;
    const size_t groups = products.group_ends.size() - pending;
    const size_t end = products.group_ends[groups - 1];
    while (products.num_done < end) {
      do_product(warp);
      Run::running->end_product(warp);
    }
    for (size_t i = 0; i < end; ++i) give_sums(products);
    products.num_done -= end;
    products.group_ends.erase(products.group_ends.begin(), products.group_ends.begin() + groups);
    for (size_t& group_end : products.group_ends) group_end -= end;
  };
  in_warp(kName, where, wait);
}

}  // namespace tree_attention::emulator
