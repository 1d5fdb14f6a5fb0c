# SPDX-License-Identifier: BSD-3-Clause
"""Assistants and candidates that differ between ranks are found before they generate."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

from distributed import on_ranks
from hf_models import make_model, make_prompts
from test_differing_ranks import GREEDY, _other_config, _other_weight
from tree_attention import ExchangeError, hf


def _no_assistant(arguments: dict[str, Any]) -> None:
    arguments["assistant_model"] = None


def _other_assistant(arguments: dict[str, Any]) -> None:
    _other_weight(arguments["assistant_model"])


def _other_config_of_the_assistant(arguments: dict[str, Any]) -> None:
    _other_config(arguments["assistant_model"])


def _other_number_of_candidates(arguments: dict[str, Any]) -> None:
    arguments["assistant_model"].generation_config.num_assistant_tokens = 3


def _other_size_of_matches(arguments: dict[str, Any]) -> None:
    arguments.update(assistant_model=None, prompt_lookup_num_tokens=4, max_matching_ngram_size=3)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        (_no_assistant, "assistant_model is None on rank 1, MistralForCausalLM on rank 0"),
        (_other_assistant, "digest of the assistant's weights is .* on rank 1, .* on rank 0"),
        (
            _other_config_of_the_assistant,
            "assistant setting rms_norm_eps is 0.001 on rank 1, 1e-06 on rank 0",
        ),
        (
            _other_number_of_candidates,
            "assistant's generation setting num_assistant_tokens is 3 on rank 1, None on rank 0",
        ),
        (_other_size_of_matches, "max_matching_ngram_size is 3 on rank 1, None on rank 0"),
    ],
)
@on_ranks(2)
@torch.no_grad()
def test_candidates_that_would_differ_are_found(
    rank: int, world_size: int, change: Callable[[dict[str, Any]], None], sentence: str
) -> None:
    model = hf.enable(make_model("llama"))
    arguments = {**make_prompts(batch=1), **GREEDY, "assistant_model": make_model("mistral")}
    if change is _other_size_of_matches:
        arguments |= {"assistant_model": None, "prompt_lookup_num_tokens": 4}
    if rank == 1:
        change(arguments)
    with pytest.raises(ExchangeError, match=sentence):
        model.generate(**arguments)
