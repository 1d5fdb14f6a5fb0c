# SPDX-License-Identifier: BSD-3-Clause
"""The LLM pipeline of OpenVINO GenAI on a CPU."""

import importlib.metadata
import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from . import timing


def convert(checkpoint: Path, directory: Path) -> None:
    """Writes the model as OpenVINO's."""
    from optimum.intel import OVModelForCausalLM

    model = OVModelForCausalLM.from_pretrained(
        checkpoint, export=True, compile=False, load_in_8bit=False
    )
    model.save_pretrained(directory)


def converted(checkpoint: Path) -> Path:
    """The directory of the converted model, which is written where it is not there yet.

    That is done in another process: in this one it would count as memory of the engine, and a
    pipeline behind it has ended with a floating point exception.
    """
    directory = checkpoint / "openvino"
    if not (directory / "openvino_model.bin").exists():
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as executor:
            executor.submit(convert, checkpoint, directory).result()
    return directory


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
        str(converted(asked.checkpoint)),
        "CPU",
        INFERENCE_NUM_THREADS=timing.THREADS,
        INFERENCE_PRECISION_HINT="bf16",
        KV_CACHE_PRECISION="bf16",
    )
    config = openvino_genai.GenerationConfig()
    config.do_sample = False
    config.ignore_eos = True
    config.set_eos_token_id(0)  # it refuses a model that has none
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
