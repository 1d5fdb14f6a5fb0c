// SPDX-License-Identifier: BSD-3-Clause
#include <algorithm>
#include <random>
#include <set>
#include <vector>

#include "check.h"
#include "cpu/digest.h"

using tree_attention::cpu::Digest;

namespace {

uint64_t digest(const std::vector<char>& bytes) {
  Digest result;
  result.add(bytes.data(), bytes.size());
  return result.value();
}

}  // namespace

// Every bit of any number of bytes counts, wherever in memory they are.
void test_digest() {
  std::mt19937 random(0);
  for (size_t size = 0; size <= 200; ++size) {
    std::vector<char> bytes(size);
    for (char& byte : bytes) byte = static_cast<char>(random());
    std::set<uint64_t> found{digest(bytes)};
    for (size_t bit = 0; bit < 8 * size; ++bit) {
      bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
      found.insert(digest(bytes));
      bytes[bit / 8] ^= static_cast<char>(1 << bit % 8);
    }
    CHECK(found.size() == 1 + 8 * size, size, " bytes: ", found.size());
    std::vector<char> shifted(size + 1);
    std::copy(bytes.begin(), bytes.end(), shifted.begin() + 1);
    Digest other;
    other.add(shifted.data() + 1, size);
    CHECK(other.value() == digest(bytes), size);
    Digest in_blocks;
    for (size_t begin = 0; begin < size; begin += Digest::kBlockBytes) {
      in_blocks.add(bytes.data() + begin, std::min(size - begin, Digest::kBlockBytes));
    }
    CHECK(in_blocks.value() == digest(bytes), size);
  }
}
