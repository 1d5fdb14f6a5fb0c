#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Set-up, then the main job: two processes, each with half of the key/value cache, answer a question
# about a number hidden in a prompt of 8,000 tokens. Beside it plain HuggingFace in one process,
# which must say the same tokens, and tree decoding against ring decoding.
source "$(dirname "$0")/setup"

# Each rank takes its share of the cores whatever this says; unset, torchrun warns.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
two_processes() {
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$@"
}

say "Two processes, each with half of the cache, find a number hidden in a long prompt"
two_processes examples/passkey-llama/ask.py --tokens 8000

say "Tree against ring: one decoding step over two processes"
two_processes benchmarks/tree.py --seconds 1
