# SPDX-License-Identifier: BSD-3-Clause
"""The LLM pipeline of OpenVINO GenAI on a CPU."""

import importlib.metadata

import numpy as np
import openvino
import openvino_genai

from . import timing
from .gguf_file import gguf_file


class Streamer(openvino_genai.StreamerBase):
    def __init__(self) -> None:
        super().__init__()
        self.arrivals = timing.Arrivals()

    def write(self, token: int | list[int]) -> openvino_genai.StreamingStatus:
        for each in [token] if isinstance(token, int) else token:
            self.arrivals.add(each)
        return openvino_genai.StreamingStatus.RUNNING

    def end(self) -> None: ...


def main() -> None:
    asked = timing.arguments()
    pipeline = openvino_genai.LLMPipeline(
        str(gguf_file(asked.checkpoint, asked.form)),
        "CPU",
        INFERENCE_NUM_THREADS=timing.THREADS,
        INFERENCE_PRECISION_HINT="bf16",
        KV_CACHE_PRECISION="bf16",
    )
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.ignore_eos = True
    config.apply_chat_template = False
    for context, tokens in timing.rounds(asked):
        config.max_new_tokens = tokens
        ids = openvino.Tensor(np.array([timing.prompt(context)], dtype=np.int64))
        mask = openvino.Tensor(np.ones((1, context), dtype=np.int64))
        streamer = Streamer()
        pipeline.generate(openvino_genai.TokenizedInputs(ids, mask), config, streamer)
    version = importlib.metadata.version("openvino-genai")
    streamer.arrivals.say(f"openvino-genai {version}")


if __name__ == "__main__":
    main()
