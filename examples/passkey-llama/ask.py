#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Ask the passkey model for a number hidden in a long prompt, its cache split over the processes.

    torchrun --nproc-per-node 2 examples/passkey-llama/ask.py --tokens 8000

The first process then asks plain transformers as well (sdpa, the whole cache in one process). The
exit status is 1 if the tokens differ or the answer is wrong.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from rich.text import Text
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

import tree_attention.hf
from passkey import Haystack, PasskeyPrompt, build_prompt, needle, question
from tree_attention.cli.usage import plain_console
from tree_attention.cli.world import World, joined_world

HERE = Path(__file__).resolve().parent
MAX_NEW_TOKENS = 12


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tokens", type=int, default=2000, help="of the prompt (default 2000)")
    parser.add_argument(
        "--depth", type=float, default=0.5, help="of the key in the prose, 0 to 1 (default 0.5)"
    )
    parser.add_argument("--seed", type=int, default=0, help="of prose and key (default 0)")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(HERE, local_files_only=True)
    haystack = Haystack.from_directory(HERE / "text", tokenizer)
    try:
        prompt = build_prompt(
            haystack, arguments.tokens, depth=arguments.depth, seed=arguments.seed
        )
    except ValueError as error:
        parser.error(str(error))
    logging.disable_progress_bar()  # which transformers shows while it loads the weights
    model = AutoModelForCausalLM.from_pretrained(
        HERE, attn_implementation="sdpa", local_files_only=True
    ).eval()
    with joined_world() as world:
        return ask(model, tokenizer, prompt, world)


def ask(model: Any, tokenizer: Any, prompt: PasskeyPrompt, world: World) -> int:
    """Asks with the cache split over the ranks, then plain transformers; the exit status."""
    console = plain_console(quiet=not world.root)
    label = prompt.label
    console.print(
        f"Prompt, {len(prompt.input_ids):,} tokens: {' '.join(prompt.text.split())[:70]} [...]"
        f"{needle(label, prompt.key)} [...]{question(label)}",
        style="dim",
    )

    def answer(name: str) -> tuple[list[int], str]:
        with console.status(f"{name} reads {len(prompt.input_ids):,} tokens"):
            tokens = new_tokens(model, prompt.input_ids)
        text = tokenizer.decode(tokens, skip_special_tokens=True)
        console.print(f"{name}:", Text(text, "bold"), sep="")
        return tokens, text

    tree_attention.hf.enable(model)
    processes = f"{world.size} processes, 1/{world.size} of the cache each"
    tokens, text = answer(f"tree_attention, {processes if world.size > 1 else '1 process'}")
    tree_attention.hf.disable(model)
    if not world.root:
        return 0  # the root alone judges
    expected, _ = answer("transformers with sdpa, 1 process")
    if tokens != expected:
        console.print(f"WRONG: the tokens differ: {tokens}, expected {expected}", style="bold red")
        return 1
    if not prompt.grade(text):
        console.print(f"The same tokens, but the hidden key is {prompt.key}.", style="bold red")
        return 1
    console.print("The hidden key, and the same tokens.", style="green")
    return 0


def new_tokens(model: Any, input_ids: list[int]) -> list[int]:
    """The greedy answer to a prompt, as tokens."""
    ids = torch.tensor([input_ids])
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=MAX_NEW_TOKENS,
        do_sample=False,
    )
    return output[0, ids.shape[1] :].tolist()


if __name__ == "__main__":
    sys.exit(main())
