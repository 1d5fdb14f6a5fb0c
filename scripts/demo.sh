#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Set-up, then two processes that each hold half of a key/value cache. First is it right: they find a
# number hidden in a prompt of 8,000 tokens, with the tokens of plain HuggingFace. Then what is it
# for: a decoding step after 131,072 keys beside HuggingFace's caches, and a tree beside a ring.
# Needs 8 GB of memory.
source "$(dirname "$0")/setup"

# Each rank takes its share of the cores whatever this says; unset, torchrun warns.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
two_processes() {
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$@"
}

say "Two processes, each with half of the cache, find a number hidden in a long prompt"
two_processes examples/passkey-llama/ask.py --tokens 8000

say "One decoding step at a long context"
two_processes examples/long_context.py
