// SPDX-License-Identifier: BSD-3-Clause
//
// A function that is compiled for several instruction sets, of which the loader takes the widest.
// Sanitizers start too late for its resolver.
#pragma once

#if defined(__x86_64__) && defined(__linux__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define MULTIVERSIONED __attribute__((target_clones("avx512f", "fma", "default")))
#else
#define MULTIVERSIONED
#endif
