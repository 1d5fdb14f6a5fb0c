// SPDX-License-Identifier: BSD-3-Clause
//
// relay MTU PER_NODE NEAR_SECONDS FAR_SECONDS NAMESPACE_FILE...: carries packets between hosts.
//
// Each host is a network namespace in which this program makes TUN devices: net0 for other nodes
// and, where a node has several hosts, node0 for its own. A packet that leaves by one of them
// enters the host with its destination address 10.77.NODE.(1 + HOST IN NODE) after the delay of
// their path. Each processor has a thread that carries what leaves some of the hosts. Prints
// "ready", then answers every line of its input (see paths.h). Ends, and its devices with it, at
// the end of its input: whatever happens to the one who started it.
#include <fcntl.h>
#include <linux/if.h>
#include <linux/if_tun.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <iostream>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "delay_queue.h"
#include "paths.h"

namespace {

constexpr int64_t kSecond = 1'000'000'000;
// Packets of one device before the others have their turn.
constexpr int kTurn = 32;
// In front of every packet: how far its checksum has come, which the receiving side must know.
constexpr size_t kHeader = 10;  // struct virtio_net_hdr

struct Packet {
  int device;
  std::vector<uint8_t> bytes;
};

[[noreturn]] void fail(const std::string& what) {
  fprintf(stderr, "relay: %s: %s\n", what.c_str(), strerror(errno));
  exit(1);
}

int64_t now() {
  timespec time;
  clock_gettime(CLOCK_MONOTONIC, &time);
  return time.tv_sec * kSecond + time.tv_nsec;
}

// In the namespace of the calling thread.
int open_tun(const char* name) {
  const int device = open("/dev/net/tun", O_RDWR | O_NONBLOCK | O_CLOEXEC);
  if (device < 0) fail("/dev/net/tun");
  ifreq request{};
  request.ifr_flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR;
  strncpy(request.ifr_name, name, IFNAMSIZ - 1);
  if (ioctl(device, TUNSETIFF, &request) < 0) fail("TUNSETIFF");
  // What never leaves the machine needs no checksums.
  if (ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM) < 0) fail("TUNSETOFFLOAD");
  return device;
}

// The host that a packet is for; -1 if it is for none.
int destination(const uint8_t* packet, size_t size, int per_node, int num_hosts) {
  const bool is_ours =
      size >= 20 && packet[0] >> 4 == 4 && packet[16] == 10 && packet[17] == 77;  // IPv4
  if (!is_ours || packet[19] < 1 || packet[19] > per_node) return -1;
  const int host = packet[18] * per_node + packet[19] - 1;
  return host < num_hosts ? host : -1;
}

// What all threads know.
struct Network {
  size_t mtu;
  int per_node, num_hosts;
  std::vector<int> devices;  // of each host: net0, node0
  std::mutex mutex;          // of the paths
  Paths paths;

  bool same_node(int a, int b) const { return a / per_node == b / per_node; }
};

// Carries what leaves the hosts `first`, `first + step` and so on.
[[noreturn]] void carry(Network& network, int first, int step) {
  std::vector<pollfd> polled;
  std::vector<int> hosts;  // of each polled device
  for (int host = first; host < network.num_hosts; host += step) {
    for (int i : {0, 1}) {
      polled.push_back({network.devices[2 * host + i], POLLIN, 0});
      hosts.push_back(host);
    }
  }
  DelayQueue<Packet> under_way;
  Packet arriving;
  std::vector<uint8_t> packet(kHeader + network.mtu);
  for (;;) {
    timespec patience{};
    if (!under_way.empty()) {
      const int64_t left = std::max<int64_t>(0, under_way.next_due() - now());
      patience = {left / kSecond, left % kSecond};
    }
    const int count =
        ppoll(polled.data(), polled.size(), under_way.empty() ? nullptr : &patience, nullptr);
    if (count < 0 && errno != EINTR) fail("ppoll");
    while (under_way.pop(now(), arriving)) {
      // Like a switch, it drops what a host cannot take.
      const int device = network.devices[arriving.device];
      if (write(device, arriving.bytes.data(), arriving.bytes.size()) < 0 && errno != EAGAIN &&
          errno != EIO)
        fail("write");
    }
    if (count <= 0) continue;
    for (size_t device = 0; device < polled.size(); ++device) {
      if (!(polled[device].revents & POLLIN)) continue;
      for (int i = 0; i < kTurn; ++i) {
        const ssize_t size = read(polled[device].fd, packet.data(), packet.size());
        if (size < static_cast<ssize_t>(kHeader)) break;
        const int from = hosts[device];
        const int to = destination(packet.data() + kHeader, size - kHeader, network.per_node,
                                   network.num_hosts);
        if (to < 0 || to == from) continue;
        std::unique_lock lock(network.mutex);
        const Path path = network.paths.at(from, to);
        const bool passes = network.paths.passes(path);
        lock.unlock();
        if (!passes) continue;
        const int target = 2 * to + (network.per_node > 1 && network.same_node(from, to));
        under_way.push(now() + path.delay_ns, {target, {packet.begin(), packet.begin() + size}});
      }
    }
  }
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 6) {
    fprintf(stderr, "usage: relay MTU PER_NODE NEAR_SECONDS FAR_SECONDS NAMESPACE_FILE...\n");
    return 2;
  }
  const int num_hosts = argc - 5;
  Network network{.mtu = static_cast<size_t>(atoi(argv[1])),
                  .per_node = atoi(argv[2]),
                  .num_hosts = num_hosts,
                  .devices = {},
                  .mutex = {},
                  .paths = Paths(num_hosts)};
  const int64_t near = static_cast<int64_t>(atof(argv[3]) * kSecond);
  const int64_t far = static_cast<int64_t>(atof(argv[4]) * kSecond);
  for (int host = 0; host < num_hosts; ++host) {
    const int space = open(argv[5 + host], O_RDONLY | O_CLOEXEC);
    if (space < 0 || setns(space, CLONE_NEWNET) < 0) fail(argv[5 + host]);
    close(space);
    network.devices.push_back(open_tun("net0"));
    // Where a node is one host, a device without packets keeps the numbering simple.
    network.devices.push_back(network.per_node > 1 ? open_tun("node0") : -1);
    for (int other = 0; other < num_hosts; ++other)
      network.paths.at(host, other).delay_ns = network.same_node(host, other) ? near : far;
  }

  // It sleeps most of the time, and is late by the time slices of others if it has to queue. Its
  // threads inherit both.
  prctl(PR_SET_TIMERSLACK, 1);
  const sched_param priority{.sched_priority = 1};
  sched_setscheduler(0, SCHED_FIFO, &priority);
  const int num_threads =
      std::min<int>(num_hosts, std::max(1u, std::thread::hardware_concurrency()));
  for (int i = 0; i < num_threads; ++i)
    std::thread([&network, i, num_threads] { carry(network, i, num_threads); }).detach();
  puts("ready");
  fflush(stdout);

  for (std::string line; std::getline(std::cin, line);) {
    const std::lock_guard lock(network.mutex);
    puts(network.paths.command(line).c_str());
    fflush(stdout);
  }
  _exit(0);  // whatever the threads do
}
