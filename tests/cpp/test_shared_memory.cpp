// SPDX-License-Identifier: BSD-3-Clause
#include <sys/mman.h>
#include <unistd.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "cpu/shared_memory.h"
#include "exchange_with_all.h"

using namespace tree_attention;
using namespace tree_attention::cpu;

namespace {

int make_file(int num_members) {
  const int file = memfd_create("shared memory", 0);
  CHECK(ftruncate(file, SharedMemory::num_bytes(num_members)) == 0, "ftruncate");
  return file;
}

std::shared_ptr<SharedMemory> join(int file, int own, int num_members) {
  return std::make_shared<SharedMemory>(file, own, std::vector<SharingRank>(num_members, {0, -1}));
}

}  // namespace

// Each member maps the memory for itself.
void test_shared_memory() {
  for (int num_members : {2, 3, 5}) {
    const int file = make_file(num_members);
    testing::in_threads(num_members, [&](int own) {
      const auto memory = join(file, own, num_members);
      for (size_t size : {size_t{0}, size_t{1}, size_t{4097}, kChannelBytes - 8, kChannelBytes,
                          3 * kChannelBytes + 5}) {
        testing::exchange_with_all(
            own, num_members, size,
            [&](auto receive, auto send) { return SharedRound(memory, receive, send); },
            [](SharedRound& round) { round.run(60.0, [] {}); });
      }
    });
    close(file);
  }
}

void test_closed_shared_memory() {
  const int file = make_file(2);
  const auto first = join(file, 0, 2), second = join(file, 1, 2);
  char byte = 0;
  std::string reason;
  std::thread waiting([&] {
    SharedRound messages(first, {{1, &byte, 1}}, {});
    try {
      messages.run(60.0, [] {});
    } catch (const std::runtime_error& error) {
      reason = error.what();
    }
  });
  second->close();
  waiting.join();
  CHECK(reason.ends_with("rank 0 has closed the connection"), reason);
  close(file);
}
