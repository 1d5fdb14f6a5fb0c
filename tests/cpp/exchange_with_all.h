// SPDX-License-Identifier: BSD-3-Clause
//
// What messages are tested by, whichever way they take: threads that stand for processes.
#pragma once

#include <thread>
#include <vector>

#include "check.h"
#include "cpu/message.h"

namespace tree_attention::testing {

inline char content(int from, int to, size_t place, int round) {
  return static_cast<char>(17 * from + 5 * to + 3 * place + round);
}

// Sends `size` bytes or a few more to every other of `num`, and receives from each, three times.
// make(receive, send) prepares the rounds, and run(rounds) runs one.
template <typename Make, typename Run>
void exchange_with_all(int own, int num, size_t size, Make make, Run run) {
  std::vector<std::vector<char>> received(num), sent(num);
  std::vector<cpu::Message> receive, send;
  for (int other = 0; other < num; ++other) {
    if (other == own) continue;
    // Lengths differ by sender and receiver.
    sent[other].resize(size + own + other), received[other].resize(size + own + other);
    receive.push_back({other, received[other].data(), received[other].size()});
    send.push_back({other, sent[other].data(), sent[other].size()});
  }
  auto rounds = make(receive, send);
  for (int round = 0; round < 3; ++round) {
    for (int other = 0; other < num; ++other) {
      for (size_t i = 0; i < sent[other].size(); ++i)
        sent[other][i] = content(own, other, i, round);
    }
    run(rounds);
    for (int other = 0; other < num; ++other) {
      bool right = true;
      for (size_t i = 0; i < received[other].size(); ++i) {
        right &= received[other][i] == content(other, own, i, round);
      }
      CHECK(right, "from ", other, " to ", own, ", ", size, " bytes, round ", round);
    }
  }
}

// Calls body(own) in a thread for each of `num`.
template <typename Body>
void in_threads(int num, Body body) {
  std::vector<std::thread> threads;
  for (int own = 0; own < num; ++own) threads.emplace_back([=] { body(own); });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace tree_attention::testing
