// SPDX-License-Identifier: BSD-3-Clause
//
// Messages between the processes of one host through memory that they share. A socket's message of
// a few KiB wakes a thread in each process, which costs a scheduler's time slice where that thread
// has to share its core with the computation; here the caller itself moves the bytes and watches
// for the bytes of the others.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "cpu/message.h"

namespace tree_attention::cpu {

// Size in bytes of what a sender may be ahead of its receiver. Both halves of a copy should find
// the bytes in a second-level cache.
constexpr size_t kChannelBytes = 256 << 10;

// The memory begins with so many bytes for its maker, by which others recognise it.
constexpr size_t kKeyBytes = 64;

// The bytes on their way from one process to another, in a ring: one writer, one reader.
struct Channel {
  alignas(64) std::atomic<uint64_t> written;  // since the beginning, as is `read`
  alignas(64) std::atomic<uint64_t> read;
  alignas(64) char bytes[kChannelBytes];
};
static_assert(std::atomic<uint64_t>::is_always_lock_free, "processes cannot share a lock");

// One of the ranks that share a host's memory.
struct SharingRank {
  int rank;     // its number in the process group, for messages to people
  int process;  // a descriptor that polls readable once its process has ended, or -1
};

// A view of the memory that ranks of one host share. Members are numbered from 0. The memory was
// all zeros at first.
class SharedMemory {
 public:
  static size_t num_bytes(int num_members);

  // `file`: what all members have opened, of `num_bytes(members.size())`; it may be closed then.
  // `own`: which member this is. The descriptors of processes are closed with the memory. Throws
  // std::runtime_error if the memory cannot be mapped, and closes nothing then.
  SharedMemory(int file, int own, std::vector<SharingRank> members);
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Ends the rounds under way on all members. From any thread.
  void close();

  int num_members() const { return static_cast<int>(members_.size()); }
  int own() const { return own_; }
  std::string name_of(int member) const;
  Channel& channel(int from, int to) const;

  // Why nothing more is to be expected, or nothing: of any member, and of one.
  std::string closed() const;
  std::string ended(int member) const;

 private:
  struct Header;
  Header* header_ = nullptr;
  int own_;
  std::vector<SharingRank> members_;
};

// Messages that are sent and received together, as often as one likes. Their peers are members.
// Between two members messages arrive in the order of their rounds, and the next one begins once
// the last one was received.
class SharedRound {
 public:
  SharedRound(std::shared_ptr<SharedMemory> memory, std::vector<Message> receive,
              std::vector<Message> send);

  // Throws std::runtime_error after so many seconds, if a member closed the memory or ended, or if
  // a message has another length than expected; the memory is of no use then. `interrupt` is called
  // now and then in long waits, and may throw.
  void run(double seconds, const std::function<void()>& interrupt);

 private:
  struct Transfer;
  bool advance(Transfer& transfer) const;

  std::shared_ptr<SharedMemory> memory_;
  std::vector<Message> receive_, send_;
};

}  // namespace tree_attention::cpu
