# SPDX-License-Identifier: BSD-3-Clause
"""`generate` of transformers with our attention and cache ("ours", "compiled" by torch.compile, and
"int8" and "int4" with such weights) or with its own static cache ("static")."""

from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM
from transformers.generation.streamers import BaseStreamer

from . import timing

LIKELIEST = 100  # first new tokens that the reference says


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
    torch.set_num_threads(timing.THREADS)
    engine = f"transformers {transformers.__version__}, torch {torch.__version__}"
    options: dict[str, Any] = {}
    if asked.form == "static":
        model: Any = AutoModelForCausalLM.from_pretrained(
            asked.checkpoint, dtype=torch.bfloat16, attn_implementation="sdpa"
        )
        options = {"cache_implementation": "static", "prefill_chunk_size": 1024}
        options |= {"output_logits": True, "return_dict_in_generate": True}
    else:
        import tree_attention

        weights = asked.form if asked.form in ("int8", "int4") else None
        model = tree_attention.hf.from_pretrained(asked.checkpoint, weights=weights)
        if asked.form == "compiled":
            model.forward = torch.compile(model.forward)
        engine = f"tree_attention {tree_attention.__version__}, {engine}"
    for context, tokens in timing.rounds(asked):
        ids = torch.tensor([timing.prompt(context)])
        streamer = Streamer()
        made = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            streamer=streamer,
            do_sample=False,
            max_new_tokens=tokens,
            **options,
        )
    others = {}
    if asked.form == "static":
        others["likeliest"] = made.logits[0][0].topk(LIKELIEST).indices.tolist()
    streamer.arrivals.say(engine, sum(p.nbytes for p in model.parameters()), **others)


if __name__ == "__main__":
    main()
