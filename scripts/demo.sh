#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Sets up .venv and runs two processes that each hold half of a key/value cache. The first program
# shows that they are right: they find a number hidden in a prompt of 8,000 tokens, and their tokens
# are those of plain HuggingFace. The second one shows what they are for: it times a decoding step
# after 131,072 keys beside HuggingFace's caches, and a tree beside a ring. It needs 8 GB of memory.
source "$(dirname "$0")/setup"

# Each rank takes its share of the cores whatever this says, but torchrun warns where it is unset.
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
# transformers imports torchao where it is installed, whose enums make torch's pytree warn of a call
# that a later torch will refuse: lines of every process that are not about this program.
export TORCH_LOGS=${TORCH_LOGS:--torch.utils._pytree}
two_processes() {
  "$PYTHON" -m torch.distributed.run --standalone --nproc-per-node 2 "$@"
}

say "Two processes, each with half of the cache, find a number hidden in a long prompt"
two_processes examples/passkey-llama/ask.py --tokens 8000

say "One decoding step at a long context"
two_processes examples/long_context.py
