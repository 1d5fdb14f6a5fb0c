# SPDX-License-Identifier: BSD-3-Clause
"""Generates with vLLM, in a process of its own: `python generate.py JOB RESULT`, two JSON files.

The job lists engines: their options, and requests `{"prompt", "tokens", "after_step"}` that arrive
after so many steps of the engine. The result has for each engine the new tokens of each request,
how many of its tokens the prefix cache had, and the numbers of preemptions, of guessed tokens that
were right, and of calls in this process that read common blocks once. With "kill", a worker is
killed after the requests, and they are asked for once more: the result has the error and when it
came.
"""

import gc
import json
import signal
import sys
import time
from pathlib import Path
from typing import Any
from unittest import mock

import psutil
from vllm import LLM, SamplingParams
from vllm.distributed import cleanup_dist_env_and_memory

from tree_attention.vllm import batches

OPTIONS = {
    "skip_tokenizer_init": True,
    "enforce_eager": True,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 256,  # chunks of prompts
    "max_model_len": 2048,
    "block_size": 32,
    "disable_log_stats": False,  # of which the preemptions are one
}


def main() -> None:
    job, result = map(Path, sys.argv[1:])
    outcomes = {}
    for name, engine in json.loads(job.read_text()).items():
        try:
            outcomes[name] = run(engine)
        except Exception as error:
            if not engine.get("may_fail"):
                raise
            outcomes[name] = {"error": _messages(error)}
        gc.collect()
        cleanup_dist_env_and_memory()
    result.write_text(json.dumps(outcomes))


def run(engine: dict[str, Any]) -> dict[str, Any]:
    llm = LLM(**{**OPTIONS, **engine["options"]})
    with mock.patch.object(batches, "cascade_decode", wraps=batches.cascade_decode) as cascade:
        outcome = generate(llm, engine["requests"])
    outcome["cascades"] = cascade.call_count
    if engine.get("kill"):
        workers = [p for p in psutil.Process().children(recursive=True) if "Worker" in p.name()]
        workers[-1].send_signal(signal.SIGKILL)
        begin = time.monotonic()
        try:
            generate(llm, engine["requests"])
            outcome["error"] = None
        except Exception as error:
            outcome["error"] = f"{type(error).__name__}: {error}"
        outcome["seconds"] = time.monotonic() - begin
    llm.llm_engine.engine_core.shutdown()
    return outcome


def generate(llm: LLM, requests: list[dict[str, Any]]) -> dict[str, Any]:
    engine, step, finished = llm.llm_engine, 0, {}
    waiting = sorted(enumerate(requests), key=lambda item: item[1].get("after_step", 0))
    while waiting or engine.has_unfinished_requests():
        while waiting and waiting[0][1].get("after_step", 0) <= step:
            index, request = waiting.pop(0)
            sampling = SamplingParams(
                temperature=0.0, max_tokens=request["tokens"], ignore_eos=True, detokenize=False
            )
            engine.add_request(str(index), {"prompt_token_ids": request["prompt"]}, sampling)
        # An engine in another process would wait for an answer to no request.
        for output in engine.step() if engine.has_unfinished_requests() else ():
            if output.finished:
                finished[int(output.request_id)] = output
        step += 1
    metrics = {metric.name: getattr(metric, "value", None) for metric in llm.get_metrics()}
    outputs = [finished[index] for index in range(len(requests))]
    return {
        "tokens": [list(output.outputs[0].token_ids) for output in outputs],
        "cached": [output.num_cached_tokens for output in outputs],
        "preemptions": metrics["vllm:num_preemptions"],
        "accepted": metrics.get("vllm:spec_decode_num_accepted_tokens", 0),
    }


def _messages(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__ or error.__context__
    return "\n".join(texts)


if __name__ == "__main__":
    main()
