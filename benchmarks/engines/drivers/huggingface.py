# SPDX-License-Identifier: BSD-3-Clause
"""`generate` of transformers with our attention and cache ("ours", and "compiled" by torch.compile)
or with its own static cache ("static")."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from . import timing


class Streamer(BaseStreamer):
    """Is given the prompt first, and then every new token."""

    def __init__(self) -> None:
        self.arrivals = timing.Arrivals()
        self._seen_prompt = False

    def put(self, value: torch.Tensor) -> None:
        if self._seen_prompt:
            self.arrivals.add(int(value))
        self._seen_prompt = True

    def end(self) -> None: ...


def main() -> None:
    asked = timing.arguments()
    ours = asked.form in ("ours", "compiled")
    torch.set_num_threads(timing.THREADS)
    model: Any = AutoModelForCausalLM.from_pretrained(
        asked.checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
    )
    engine = f"transformers {transformers.__version__}, torch {torch.__version__}"
    options: dict[str, Any] = {"cache_implementation": "static", "prefill_chunk_size": 1024}
    if ours:
        import tree_attention

        options = {}
        tree_attention.hf.enable(model)
        if asked.form == "compiled":
            model.forward = torch.compile(model.forward)
        engine = f"tree_attention {tree_attention.__version__}, {engine}"
    for context, tokens in timing.rounds(asked):
        ids = torch.tensor([timing.prompt(context)])
        streamer = Streamer()
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=streamer,
            do_sample=False,
            max_new_tokens=tokens,
            **options,
        )
    streamer.arrivals.say(engine)


if __name__ == "__main__":
    main()
