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

char content(int from, int to, size_t place, int round) {
  return static_cast<char>(17 * from + 5 * to + 3 * place + round);
}

}  // namespace

// Threads stand for processes: each maps the memory for itself.
void test_shared_memory() {
  for (int num_members : {2, 3, 5}) {
    const int file = make_file(num_members);
    std::vector<std::thread> threads;
    for (int own = 0; own < num_members; ++own) {
      threads.emplace_back([=] {
        const auto memory = join(file, own, num_members);
        for (size_t size : {size_t{0}, size_t{1}, size_t{4097}, kChannelBytes - 8, kChannelBytes,
                            3 * kChannelBytes + 5}) {
          std::vector<std::vector<char>> received(num_members), sent(num_members);
          std::vector<Message> receive, send;
          for (int other = 0; other < num_members; ++other) {
            if (other == own) continue;
            // Lengths differ by sender and receiver.
            sent[other].resize(size + own + other), received[other].resize(size + own + other);
            receive.push_back({other, received[other].data(), received[other].size()});
            send.push_back({other, sent[other].data(), sent[other].size()});
          }
          SharedRound messages(memory, receive, send);
          for (int round = 0; round < 3; ++round) {
            for (int other = 0; other < num_members; ++other) {
              for (size_t i = 0; i < sent[other].size(); ++i) {
                sent[other][i] = content(own, other, i, round);
              }
            }
            messages.run(60.0, [] {});
            for (int other = 0; other < num_members; ++other) {
              bool right = true;
              for (size_t i = 0; i < received[other].size(); ++i) {
                right &= received[other][i] == content(other, own, i, round);
              }
              CHECK(right, "from ", other, " to ", own, ", ", size, " bytes, round ", round);
            }
          }
        }
      });
    }
    for (std::thread& thread : threads) thread.join();
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
