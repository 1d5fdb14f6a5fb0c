// SPDX-License-Identifier: BSD-3-Clause
//
// A plug-in of QEMU that prints how many instructions the emulated program ran. Its interface is
// declared here, as distributions ship QEMU without the header.
#include <inttypes.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>

#define EXPORT __attribute__((visibility("default")))

typedef uint64_t Id;
struct qemu_plugin_tb;  // instructions that run one after another

size_t qemu_plugin_tb_n_insns(const struct qemu_plugin_tb* block);
void qemu_plugin_register_vcpu_tb_trans_cb(Id id, void (*run)(Id, struct qemu_plugin_tb*));
void qemu_plugin_register_vcpu_tb_exec_inline(struct qemu_plugin_tb* block, int operation,
                                              void* counter, uint64_t number);
void qemu_plugin_register_atexit_cb(Id id, void (*run)(Id, void*), void* data);

EXPORT int qemu_plugin_version = 1;

static uint64_t count;

static void translate(Id id, struct qemu_plugin_tb* block) {
  const int kAdd = 0;
  (void)id;
  qemu_plugin_register_vcpu_tb_exec_inline(block, kAdd, &count, qemu_plugin_tb_n_insns(block));
}

static void report(Id id, void* data) {
  (void)id, (void)data;
  fprintf(stderr, "instructions: %" PRIu64 "\n", count);
}

EXPORT int qemu_plugin_install(Id id, const void* info, int argc, char** argv) {
  (void)info, (void)argc, (void)argv;
  qemu_plugin_register_vcpu_tb_trans_cb(id, translate);
  qemu_plugin_register_atexit_cb(id, report, NULL);
  return 0;
}
