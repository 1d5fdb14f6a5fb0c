#!/usr/bin/env bash
# SPDX-License-Identifier: BSD-3-Clause
#
# Sets up .venv and runs two processes that each hold half of a key/value cache. In the first program
# they find a number hidden in a prompt of 8,000 tokens, with the tokens of plain HuggingFace. In the
# second one each process may take so little memory that one alone has no room for 131,072 keys, and
# a token is timed on one host of one thread and on two. It needs 8 GB of memory.
DEVELOP=0
source "$(dirname "$0")/setup"

# transformers imports torchao where it is installed, whose enums make torch's pytree warn of a call
# that a later torch will refuse: lines of every process that are not about this program.
export TORCH_LOGS=${TORCH_LOGS:--torch.utils._pytree}

say "Two processes, each with half of the cache, find a number hidden in a long prompt"
"$PYTHON" -m tree_attention run -n 2 examples/passkey-llama/ask.py --tokens 8000

say "A context for which one process has no room, and the time of its next token"
"$PYTHON" -m tree_attention run -n 2 examples/long_context.py

say "Next: a model of yours, from a directory as \`hf download NAME --local-dir DIR\` makes it"
echo ".venv/bin/python -m tree_attention generate --ranks 2 --model DIR --prompt 'Once upon a time'"
