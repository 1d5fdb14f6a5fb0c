#!/usr/bin/env python3
# SPDX-License-Identifier: BSD-3-Clause
"""Ask a server of the passkey model for numbers hidden in long prompts, with the openai client.

    python examples/passkey-llama/ask_server.py --tokens 8000 --requests 16

The first answer is streamed, the others are asked for at once. docs/vllm.md starts the server. The
exit status is 1 if an answer is not the greedy one of plain transformers in the same process.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from pathlib import Path

import torch
from openai import AsyncOpenAI
from transformers import AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging

from ask import MAX_NEW_TOKENS, new_tokens
from passkey import Haystack, PasskeyPrompt, build_prompt

HERE = Path(__file__).resolve().parent


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--url", default="http://localhost:8000/v1")
    parser.add_argument("--model", default="passkey", help="its name there (default passkey)")
    parser.add_argument("--tokens", type=int, default=8000, help="of a prompt (default 8000)")
    parser.add_argument("--requests", type=int, default=16, help="at once (default 16)")
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(HERE, local_files_only=True)
    haystack = Haystack.from_directory(HERE / "text", tokenizer)
    prompts = [
        build_prompt(haystack, arguments.tokens, seed=seed) for seed in range(arguments.requests)
    ]
    client = AsyncOpenAI(base_url=arguments.url, api_key="none")
    answers = asyncio.run(ask(client, arguments.model, prompts))
    logging.disable_progress_bar()  # which transformers shows while it loads the weights
    model = AutoModelForCausalLM.from_pretrained(
        HERE, dtype=torch.float32, attn_implementation="sdpa", local_files_only=True
    ).eval()
    expected = [
        tokenizer.decode(new_tokens(model, prompt.input_ids), skip_special_tokens=True)
        for prompt in prompts
    ]
    same = sum(a == b for a, b in zip(answers, expected, strict=True))
    right = sum(prompt.grade(answer) for prompt, answer in zip(prompts, answers, strict=True))
    print(f"{right} of {len(prompts)} keys found; {same} answers as by plain transformers")
    return 0 if same == len(prompts) else 1


async def ask(client: AsyncOpenAI, model: str, prompts: list[PasskeyPrompt]) -> list[str]:
    async def answer(prompt: PasskeyPrompt, say: bool = False) -> str:
        stream = await client.completions.create(
            model=model,
            prompt=prompt.input_ids,
            max_tokens=MAX_NEW_TOKENS,
            temperature=0.0,
            stream=True,
        )
        text = ""
        async for chunk in stream:
            piece = chunk.choices[0].text
            text += piece
            if say and piece:
                print(f"{time.perf_counter() - begin:6.2f} s  {piece!r}", flush=True)
        return text

    begin = time.perf_counter()
    print(f"...{prompts[0].text[-60:]!r}")
    await answer(prompts[0], say=True)
    begin = time.perf_counter()
    answers = await asyncio.gather(*(answer(prompt) for prompt in prompts))
    print(f"{len(prompts)} prompts at once: {time.perf_counter() - begin:.2f} s")
    for prompt, text in zip(prompts[:4], answers, strict=False):
        print(f"  key {prompt.key}, answer {text!r}")
    return answers


if __name__ == "__main__":
    sys.exit(main())
