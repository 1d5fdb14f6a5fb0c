// SPDX-License-Identifier: BSD-3-Clause
//
// What happens to packets between each two hosts, and the commands that change it.
#pragma once

#include <cstdint>
#include <random>
#include <sstream>
#include <string>
#include <vector>

struct Path {
  int64_t delay_ns = 0;
  double loss = 0.0;  // probability
  bool is_cut = false;
};

class Paths {
 public:
  explicit Paths(int num_hosts)
      : num_hosts_(num_hosts), paths_(static_cast<size_t>(num_hosts) * num_hosts) {}

  int num_hosts() const { return num_hosts_; }
  Path& at(int from, int to) { return paths_[static_cast<size_t>(from) * num_hosts_ + to]; }

  // Whether a packet on this path arrives.
  bool passes(const Path& path) {
    if (path.is_cut) return false;
    return path.loss == 0.0 || uniform_(random_) >= path.loss;
  }

  // One of "cut A B", "mend A B", "loss A B PROBABILITY", "delay A B SECONDS", in both directions.
  // Returns "ok" or what is wrong with it.
  std::string command(const std::string& line) {
    std::istringstream words(line);
    std::string verb, rest;
    int a = -1, b = -1;
    double value = 0.0;
    const bool has_hosts = static_cast<bool>(words >> verb >> a >> b);
    const bool has_value = verb == "loss" || verb == "delay";
    if (!has_value && verb != "cut" && verb != "mend") return "no such command: " + line;
    if (!has_hosts || (has_value && !(words >> value)) || words >> rest)
      return "arguments do not fit: " + line;
    if (a < 0 || b < 0 || a >= num_hosts_ || b >= num_hosts_ || a == b)
      return "no such pair of hosts: " + line;
    if (verb == "loss" && !(value >= 0.0 && value <= 1.0)) return "not a probability: " + line;
    if (verb == "delay" && !(value >= 0.0 && value <= 3600.0)) return "not a delay: " + line;
    for (Path* path : {&at(a, b), &at(b, a)}) {
      if (verb == "cut") path->is_cut = true;
      if (verb == "mend") path->is_cut = false;
      if (verb == "loss") path->loss = value;
      if (verb == "delay") path->delay_ns = static_cast<int64_t>(value * 1e9);
    }
    return "ok";
  }

 private:
  int num_hosts_;
  std::vector<Path> paths_;
  std::mt19937_64 random_{1};  // the same losses for the same packets
  std::uniform_real_distribution<double> uniform_;
};
