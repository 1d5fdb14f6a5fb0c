# SPDX-License-Identifier: BSD-3-Clause
"""`generate` of an enabled model in several threads: right tokens or a sentence."""

from __future__ import annotations

import re
import threading
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from torch import Tensor

from distributed import on_ranks, run_ranks
from hf_models import make_model
from tree_attention import ExchangeError, hf

GREEDY = {"max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}


def prompts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randint(3, 50, (1, 9 + i), generator=generator) for i in range(2)]


def generate(model: Any, prompt: Tensor) -> Tensor:
    return model.generate(prompt, attention_mask=torch.ones_like(prompt), **GREEDY)


def at_once(rank: int, world_size: int) -> list[str]:
    plain = make_model("llama")
    expected = [generate(plain, prompt) for prompt in prompts()]
    model = hf.enable(make_model("llama"), timeout=5.0)
    errors: list[str] = []
    barrier = threading.Barrier(2)

    def body(index: int) -> None:
        barrier.wait()
        for _ in range(3):
            try:
                tokens = generate(model, prompts()[index])
            except ExchangeError as error:
                errors.append(str(error))
            else:
                assert torch.equal(tokens, expected[index])
                right.append(index)

    right: list[int] = []
    threads = [threading.Thread(target=body, args=(i,), name=f"user {i}") for i in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(right) + len(errors) == 6
    return errors


def test_two_at_once_over_ranks_are_never_mixed() -> None:
    for errors in run_ranks(at_once, 2, fresh=True):
        assert errors
        for error in errors:
            assert re.search("thread|digest of the inputs|failed|no answer|no word", error), error


@pytest.mark.deep
def test_two_at_once_in_a_world_of_one() -> None:
    assert run_ranks(at_once, 1, fresh=True) == [[]]


@pytest.mark.deep
@on_ranks(2)
def test_ranks_may_generate_in_threads_of_other_names(rank: int, world_size: int) -> None:
    """Rank 0 generates in a new thread for each request, the others in their main thread."""
    expected = [generate(make_model("llama"), prompt) for prompt in prompts()]
    model = hf.enable(make_model("llama"))
    found: list[Tensor] = []
    for request in range(4):
        prompt = prompts()[request % 2]
        if rank == 0:
            thread = threading.Thread(target=lambda p=prompt: found.append(generate(model, p)))
            thread.start()
            thread.join()
        else:
            found.append(generate(model, prompt))
    for request, tokens in enumerate(found):
        assert torch.equal(tokens, expected[request % 2])
    assert len(found) == 4
