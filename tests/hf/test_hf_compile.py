# SPDX-License-Identifier: BSD-3-Clause
"""The decoding forward of an enabled model as one graph, over ranks."""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from distributed import run_ranks
from tree_attention import hf

STEPS = 80  # over the end of a block and of a buffer


def decode(rank: int, world_size: int, backend: str) -> int:
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=2,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, initializer_range=0.3,
    )  # fmt: skip
    model = hf.enable(LlamaForCausalLM(config).eval())
    ids = torch.randint(0, 64, (2, 20))
    compiled = torch.compile(model.forward, fullgraph=True, backend=backend)
    with torch.no_grad():
        # Ranks compile at their own pace, also at different steps.
        caches = [hf.TreeCache(config, timeout=200.0, growth=32) for _ in range(2)]
        for cache in caches:
            model(ids, past_key_values=cache)
        token = ids[:, -1:]
        for _ in range(STEPS):
            expected = model(token, past_key_values=caches[0]).logits
            logits = compiled(token, past_key_values=caches[1]).logits
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=1e-4)
            token = expected[:, -1:].argmax(-1)
    return torch._dynamo.utils.counters["stats"]["unique_graphs"]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_decoding_forward_is_one_graph(world_size: int) -> None:
    num_graphs = run_ranks(decode, world_size, "aot_eager", timeout=200.0)
    # torch gives up at torch._dynamo.config.recompile_limit, 8.
    assert max(num_graphs) < 8
