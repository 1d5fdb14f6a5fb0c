# SPDX-License-Identifier: BSD-3-Clause
"""What depends on the release of transformers: the name of the cache, and what errors advise."""

import re
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch

from distributed import on_ranks

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from transformers import DynamicCache, LlamaForCausalLM

from hf_models import make_model, make_prompts
from tree_attention import hf
from tree_attention._loader import TESTED_TRANSFORMERS
from tree_attention.hf import release
from tree_attention.hf.release import CACHE_NAME, OLD_CACHE_NAME

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
SOURCES = {".py", ".md", ".ipynb"}
NAMES = sorted({OLD_CACHE_NAME, CACHE_NAME})


def test_the_name_of_the_cache_is_that_of_the_release() -> None:
    is_new = Version(transformers.__version__) >= Version("5.24")
    assert ("cache" if is_new else "past_key_values") == CACHE_NAME


def test_programs_and_pages_have_the_name_of_the_release() -> None:
    """Of an output the old name is a line of a log, which no filter of warnings sees."""
    root = Path(__file__).parents[2]
    folders = ("python", "benchmarks", "examples", "lab", "docs")
    files = [x for folder in folders for x in (root / folder).rglob("*") if x.suffix in SOURCES]
    assert len(files) > 200
    found = {x.name: x.read_text().count(OLD_CACHE_NAME) for x in files}
    assert {name: n for name, n in found.items() if n} == {"release.py": 1, "huggingface.md": 1}


@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_cache_goes_in_by_each_name_that_transformers_takes() -> None:
    """`generate` once set both names of a cache that it had made, and forgot the tokens in it."""
    model, prompts = hf.enable(make_model("llama")), make_prompts()
    with warnings.catch_warnings():
        warnings.simplefilter("error", FutureWarning)
        expected = model.generate(**prompts, **GREEDY)
    for name in NAMES:
        cache = hf.TreeCache(model.config)
        options = {**GREEDY, name: cache, "return_dict_in_generate": True}
        first = model.generate(**prompts, **options)
        assert torch.equal(first.sequences, expected), name
        assert getattr(first, name) is cache
        assert cache.get_seq_length() == expected.shape[1] - 1
        cache.crop(-5)
        assert torch.equal(model.generate(**prompts, **GREEDY, **{name: cache}), expected), name


@on_ranks(2)
def test_a_prompt_is_split_by_each_name_of_its_cache(rank: int, world_size: int) -> None:
    counts: list[int] = []
    model = make_model("llama")
    ids = make_prompts(1)["input_ids"]
    model.model.layers[0].mlp.register_forward_hook(
        lambda _, args, __: counts.append(args[0].shape[1])
    )
    hf.enable(model, prefill="split")
    for name in NAMES:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            model(ids, logits_to_keep=1, **{name: hf.TreeCache(model.config)})
    assert len(counts) == len(NAMES) and max(counts) < ids.shape[1]


@pytest.mark.parametrize("version,is_tested", [("99.1.0", False), (TESTED_TRANSFORMERS, True)])
def test_an_error_of_a_step_names_an_untested_release(
    version: str, is_tested: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    original = LlamaForCausalLM.prepare_inputs_for_generation

    # transformers looks for a parameter of the name `kwargs`.
    def takes_another_cache(self: Any, ids: Any, **kwargs: Any) -> dict[str, Any]:
        if ids.shape[1] > 37:
            kwargs[CACHE_NAME] = DynamicCache()
        return original(self, ids, **kwargs)

    monkeypatch.setattr(LlamaForCausalLM, "prepare_inputs_for_generation", takes_another_cache)
    model = hf.enable(make_model("llama"))
    monkeypatch.setattr(release.transformers, "__version__", version)
    advice = "generate without enable"
    if not is_tested:
        advice += f"; transformers is 99.1.0, newer than the newest tested ({TESTED_TRANSFORMERS})"
    with pytest.raises(RuntimeError, match=f"replaced the TreeCache .*; {re.escape(advice)}$"):
        model.generate(**make_prompts(1), **GREEDY)
