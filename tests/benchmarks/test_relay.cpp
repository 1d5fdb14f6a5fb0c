// SPDX-License-Identifier: BSD-3-Clause
//
// What the relay of the emulated cluster decides, without packets. Exit status 0: all as expected.
#include <cmath>
#include <cstdio>
#include <memory>
#include <string>

#include "delay_queue.h"
#include "paths.h"

namespace {

int failures = 0;

void expect(bool right, const char* what, int line) {
  if (right) return;
  ++failures;
  printf("line %d: %s\n", line, what);
}
#define EXPECT(condition) expect(condition, #condition, __LINE__)

void test_queue_keeps_times_and_order() {
  DelayQueue<std::unique_ptr<int>> queue;  // of things that cannot be copied
  for (const auto& [due, number] : {std::pair{30, 0}, {10, 1}, {30, 2}, {20, 3}, {30, 4}})
    queue.push(due, std::make_unique<int>(number));
  EXPECT(queue.size() == 5 && queue.next_due() == 10);
  std::unique_ptr<int> thing;
  EXPECT(!queue.pop(9, thing));
  EXPECT(queue.pop(10, thing) && *thing == 1);
  EXPECT(!queue.pop(19, thing));
  for (int expected : {3, 0, 2, 4}) EXPECT(queue.pop(1000, thing) && *thing == expected);
  EXPECT(queue.empty() && !queue.pop(1000, thing));
}

void test_later_packets_of_a_shorter_path_overtake() {
  DelayQueue<int> queue;
  queue.push(100, 1);
  queue.push(50, 2);
  int first = 0;
  EXPECT(queue.pop(100, first) && first == 2);
}

void test_cut_and_mend_both_directions_of_one_path() {
  Paths paths(3);
  EXPECT(paths.command("cut 0 2") == "ok");
  EXPECT(!paths.passes(paths.at(0, 2)) && !paths.passes(paths.at(2, 0)));
  EXPECT(paths.passes(paths.at(0, 1)) && paths.passes(paths.at(1, 2)));
  EXPECT(paths.command("mend 2 0") == "ok");
  EXPECT(paths.passes(paths.at(0, 2)) && paths.passes(paths.at(2, 0)));
}

void test_loss_is_as_frequent_as_said_and_repeatable() {
  Paths paths(2), again(2);
  for (Paths* some : {&paths, &again}) EXPECT(some->command("loss 0 1 0.25") == "ok");
  int lost = 0, same = 0;
  const int count = 100000;
  for (int i = 0; i < count; ++i) {
    const bool passes = paths.passes(paths.at(1, 0));
    lost += !passes;
    same += passes == again.passes(again.at(1, 0));
  }
  EXPECT(std::abs(lost - count / 4) < 5 * std::sqrt(count * 0.25 * 0.75));  // 5 sigma
  EXPECT(same == count);
  EXPECT(paths.command("loss 0 1 1") == "ok" && !paths.passes(paths.at(0, 1)));
  EXPECT(paths.command("loss 0 1 0") == "ok" && paths.passes(paths.at(0, 1)));
}

void test_delay_is_of_both_directions() {
  Paths paths(2);
  EXPECT(paths.command("delay 0 1 0.0025") == "ok");
  EXPECT(paths.at(0, 1).delay_ns == 2'500'000 && paths.at(1, 0).delay_ns == 2'500'000);
}

void test_refuses() {
  Paths paths(2);
  const auto refuses = [&](const std::string& line, const std::string& why) {
    return paths.command(line) == why + ": " + line;
  };
  EXPECT(refuses("drop 0 1", "no such command") && refuses("", "no such command"));
  EXPECT(refuses("cut 0", "arguments do not fit") && refuses("cut 0 1 2", "arguments do not fit"));
  EXPECT(refuses("loss 0 1", "arguments do not fit") && refuses("cut a b", "arguments do not fit"));
  EXPECT(refuses("cut 0 2", "no such pair of hosts") &&
         refuses("cut 1 1", "no such pair of hosts"));
  EXPECT(refuses("cut -1 1", "no such pair of hosts"));
  EXPECT(refuses("loss 0 1 1.5", "not a probability") &&
         refuses("loss 0 1 -1", "not a probability"));
  EXPECT(refuses("delay 0 1 -1", "not a delay") && refuses("delay 0 1 1e9", "not a delay"));
  EXPECT(paths.passes(paths.at(0, 1)) && paths.at(0, 1).delay_ns == 0);
}

}  // namespace

int main() {
  test_queue_keeps_times_and_order();
  test_later_packets_of_a_shorter_path_overtake();
  test_cut_and_mend_both_directions_of_one_path();
  test_loss_is_as_frequent_as_said_and_repeatable();
  test_delay_is_of_both_directions();
  test_refuses();
  return failures != 0;
}
