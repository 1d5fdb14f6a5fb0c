# SPDX-License-Identifier: BSD-3-Clause
"""The LLM pipeline of OpenVINO GenAI on a CPU; the form is the dtype of the weights."""

import importlib.metadata
from pathlib import Path

import numpy as np
import openvino
import openvino_genai

from . import timing


def convert(directory: Path, checkpoint: Path, dtype: str) -> None:
    """Writes the model as OpenVINO's, with weights in "bf16", "int8" or "int4"."""
    from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

    options = {"load_in_8bit": dtype == "int8"}
    if dtype == "int4":
        options = {"quantization_config": OVWeightQuantizationConfig(bits=4, group_size=128)}
    model = OVModelForCausalLM.from_pretrained(checkpoint, export=True, compile=False, **options)
    model.save_pretrained(directory)


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
    directory = timing.written(
        asked.checkpoint / f"openvino-{asked.form}", convert, asked.checkpoint, asked.form
    )
    pipeline = openvino_genai.LLMPipeline(
        str(directory),
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
    num_bytes = (directory / "openvino_model.bin").stat().st_size
    streamer.arrivals.say(f"openvino-genai {version}", num_bytes)


if __name__ == "__main__":
    main()
