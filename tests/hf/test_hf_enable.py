# SPDX-License-Identifier: BSD-3-Clause
"""`enable`, `disable` and `seed_ranks`: what they change, refuse and compare over ranks."""

import copy
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from distributed import run_ranks
from tiers import tiers

pytest.importorskip("transformers")

import transformers
from packaging.version import Version
from transformers import (
    BertConfig,
    BertModel,
    DynamicCache,
    GenerationConfig,
    MaxTimeCriteria,
    PreTrainedModel,
    StoppingCriteriaList,
    T5Config,
    T5ForConditionalGeneration,
)

from hf_models import make_model, make_prompts
from tree_attention import hf
from tree_attention.hf import CACHE_NAME

GREEDY = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}


@pytest.fixture
def model() -> PreTrainedModel:
    return hf.enable(make_model("llama"))


def test_enable_switches_and_disable_restores() -> None:
    model = make_model("llama", "eager")
    before = dict(vars(model))
    assert hf.enable(model) is model
    assert model.config._attn_implementation == "tree_attention"
    assert "generate" in vars(model)
    hf.enable(model, prefill_chunk_size=3)  # again, with other settings
    assert hf.disable(model) is model
    assert model.config._attn_implementation == "eager"
    assert vars(model).keys() == before.keys()
    with pytest.raises(ValueError, match="disable: the model is not enabled"):
        hf.disable(model)


def test_copies_of_an_enabled_model_are_their_own(model: PreTrainedModel) -> None:
    other = copy.deepcopy(model)
    assert other.generate.__self__ is other
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(-0.5)
    prompts = make_prompts()
    assert not torch.equal(model.generate(**prompts, **GREEDY), other.generate(**prompts, **GREEDY))


def test_arguments_by_position_and_in_a_generation_config(model: PreTrainedModel) -> None:
    ids = make_prompts(batch=1)["input_ids"]
    expected = model.generate(input_ids=ids, **GREEDY)
    config = GenerationConfig(**GREEDY)
    assert torch.equal(model.generate(ids, config), expected)
    assert torch.equal(model.generate(inputs=ids, generation_config=config), expected)
    with torch.no_grad():
        embeds = model.get_input_embeddings()(ids)
    hf.enable(model, prefill_chunk_size=8)
    assert torch.equal(model.generate(inputs_embeds=embeds, **GREEDY), expected[:, ids.shape[1] :])


class _CountForwards:
    def __init__(self, model: PreTrainedModel) -> None:
        self.lengths: list[int] = []
        model.model.register_forward_pre_hook(self, with_kwargs=True)

    def __call__(self, _: Any, args: Any, kwargs: dict[str, Any]) -> None:
        self.lengths.append(kwargs["input_ids"].shape[1])


def test_long_prompts_are_prefilled_in_chunks(model: PreTrainedModel) -> None:
    forwards = _CountForwards(model)
    prompts = make_prompts()  # 37 tokens
    for size, lengths in ((16, [16, 16, 5]), (37, [37]), (None, [37])):
        hf.enable(model, prefill_chunk_size=size)
        forwards.lengths.clear()
        model.generate(**prompts, **GREEDY)
        assert forwards.lengths == [*lengths, 1, 1, 1, 1]
    forwards.lengths.clear()
    model.generate(**prompts, **GREEDY, prefill_chunk_size=20)
    assert forwards.lengths == [20, 17, 1, 1, 1, 1]


def test_chunks_after_cached_tokens(model: PreTrainedModel) -> None:
    """transformers before 5.23 would feed the wrong tokens."""
    hf.enable(model, prefill_chunk_size=8)
    ids = make_prompts(batch=1)["input_ids"]
    expected = model.generate(ids, **GREEDY)
    cache = hf.TreeCache(model.config)
    with torch.no_grad():
        model(ids[:, :10], **{CACHE_NAME: cache})
    assert torch.equal(
        model.generate(ids, **GREEDY, **{CACHE_NAME: copy.deepcopy(cache)}), expected
    )
    explicit = GREEDY | {"prefill_chunk_size": 9, CACHE_NAME: cache}
    if Version(transformers.__version__) >= Version("5.23"):
        assert torch.equal(model.generate(ids, **explicit), expected)
    else:
        with pytest.raises(NotImplementedError, match="with a cache that holds tokens needs tran"):
            model.generate(ids, **explicit)


@pytest.mark.parametrize("name", ["static", "offloaded", "quantized", "paged"])
def test_other_caches_are_refused(model: PreTrainedModel, name: str) -> None:
    with pytest.raises(
        NotImplementedError,
        match=f"cache_implementation='{name}' is not supported .*: leave it out",
    ):
        model.generate(**make_prompts(), **GREEDY, cache_implementation=name)
    with pytest.raises(ValueError, match="must be a TreeCache, got DynamicCache"):
        model.generate(**make_prompts(), **GREEDY, **{CACHE_NAME: DynamicCache()})


@pytest.mark.parametrize("name", ["hybrid", "sliding_window", "hybrid_chunked"])
def test_kinds_of_layers_in_old_checkpoints(model: PreTrainedModel, name: str) -> None:
    """They named the layers of a cache, which follow from the configuration now."""
    expected = model.generate(**make_prompts(), **GREEDY)
    model.generation_config.cache_implementation = name
    assert torch.equal(model.generate(**make_prompts(), **GREEDY), expected)


def test_weights_are_refused(model: PreTrainedModel) -> None:
    with pytest.raises(NotImplementedError, match="generate: output_attentions is not supported"):
        model.generate(
            **make_prompts(), **GREEDY, output_attentions=True, return_dict_in_generate=True
        )


def test_a_fully_cached_prompt_is_refused(model: PreTrainedModel) -> None:
    """transformers would answer with wrong tokens."""
    ids = make_prompts(batch=1)["input_ids"]
    expected = model.generate(ids, **GREEDY)
    cache = hf.TreeCache(model.config)
    with torch.no_grad():
        model(ids, **{CACHE_NAME: cache})
    message = r"the cache holds 37 tokens and the prompt has 37; .* cache.crop\(-1\)"
    with pytest.raises(ValueError, match=message):
        model.generate(ids, **GREEDY, **{CACHE_NAME: cache})
    cache.crop(-1)
    assert torch.equal(model.generate(ids, **GREEDY, **{CACHE_NAME: cache}), expected)


def test_only_the_new_tokens_with_a_mask_over_all(model: PreTrainedModel) -> None:
    prompts = make_prompts()
    expected = model.generate(**prompts, **GREEDY)
    cache = hf.TreeCache(model.config)
    with torch.no_grad():
        mask = prompts["attention_mask"][:, :30]
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        model(
            prompts["input_ids"][:, :30],
            attention_mask=mask,
            position_ids=positions,
            **{CACHE_NAME: cache},
        )
    found = model.generate(
        prompts["input_ids"][:, 30:],
        attention_mask=prompts["attention_mask"],
        **{CACHE_NAME: cache},
        **GREEDY,
    )
    assert torch.equal(found[:, 7:], expected[:, 37:])


def test_numbers_of_other_libraries() -> None:
    """Each is the same option as Python's number; what is no integer is refused by its name."""
    prompts = make_prompts(1, 9)
    settings: list[dict[str, Any]] = [
        {"prefill_chunk_size": 4, "max_length": 64, "deterministic": 32, "timeout": 20.0},
        {"prefill_chunk_size": np.int64(4), "max_length": torch.tensor(64),
         "deterministic": np.uint8(32), "timeout": torch.tensor(20)},
    ]  # fmt: skip
    tokens = []
    for options in settings:
        model = hf.enable(make_model("llama"), **options)
        tokens.append(model.generate(**prompts, **GREEDY))
    assert torch.equal(*tokens)
    model = make_model("llama")
    for name in ("prefill_chunk_size", "max_length", "deterministic"):
        for wrong in (4.0, True, np.True_, "4", torch.tensor(4.0), np.float64(4)):
            with pytest.raises(TypeError, match=rf"^\w+: {name} must be an integer"):
                hf.enable(model, **{name: wrong})
    for wrong in (1.0, "1", np.float32(1), torch.tensor(True)):
        with pytest.raises(TypeError, match=r"^parallelize: tensor_parallel_size must be an int"):
            hf.parallelize(model, tensor_parallel_size=wrong)  # type: ignore[arg-type]
    hf.parallelize(model, tensor_parallel_size=np.int64(1))
    with pytest.raises(TypeError, match=r"^seed_ranks: seed must be an integer"):
        hf.seed_ranks(seed=1.0)  # type: ignore[arg-type]
    hf.seed_ranks(seed=np.int64(1))
    cache = hf.TreeCache(model.config, growth=np.int16(8))
    with pytest.raises(TypeError, match=r"^TreeCache: growth must be an integer"):
        hf.TreeCache(model.config, growth=8.0)  # type: ignore[arg-type]
    for wrong in (0.0, "0", False):
        with pytest.raises(TypeError, match=r"^TreeCache: the argument of crop must be an integer"):
            cache.crop(wrong)  # type: ignore[arg-type]
    cache.crop(np.int64(0))


def test_models_and_options_that_cannot_work_are_refused() -> None:
    t5 = T5ForConditionalGeneration(
        T5Config(vocab_size=20, d_model=8, d_kv=4, d_ff=8, num_layers=1, num_heads=2)
    )
    with pytest.raises(ValueError, match="must be a decoder, got 't5'"):
        hf.enable(t5)
    with pytest.raises(ValueError, match=r"enable: prefill_chunk_size must be .* 1, got 0"):
        hf.enable(make_model("llama"), prefill_chunk_size=0)
    model = make_model("llama")
    model._can_set_attn_implementation = lambda: False
    with pytest.raises(ValueError, match="LlamaForCausalLM does not let its attention be chosen"):
        hf.enable(model)
    assert not vars(model).keys() & {"generate", "_prepare_cache_for_generation"}


def _bert() -> PreTrainedModel:
    return BertModel(
        BertConfig(vocab_size=20, hidden_size=8, num_hidden_layers=1, num_attention_heads=2)
    )


def _compiled() -> Any:
    return torch.compile(make_model("llama"))


@pytest.mark.parametrize(
    ("make", "error", "sentence"),
    [
        (lambda: make_model("llama").model, ValueError, "LlamaModel has no generate; enable the m"),
        (_bert, ValueError, "BertModel has no generate; enable the model with the language head"),
        (lambda: torch.nn.Linear(2, 2), TypeError, "must be a PreTrainedModel of .*, got Linear"),
        *tiers([], [(_compiled, TypeError, "wrapped by torch.compile; enable")]),
    ],
)
def test_what_cannot_be_enabled(
    make: Callable[[], Any], error: type[Exception], sentence: str
) -> None:
    """What `enable` took and `generate` then failed with, or nothing that used the cache."""
    model = make()
    with pytest.raises(error, match=f"^enable: .*{sentence}"):
        hf.enable(model)
    assert "generate" not in vars(model)


@pytest.mark.deep
def test_the_way_to_compile(model: PreTrainedModel) -> None:
    """The one that the refusal of a compiled model names."""
    expected = model.generate(**make_prompts(), **GREEDY)
    model.forward = torch.compile(model.forward, backend="eager")
    assert torch.equal(model.generate(**make_prompts(), **GREEDY), expected)


def test_right_padding_is_refused(model: PreTrainedModel) -> None:
    prompts = {name: tensor.flip(-1) for name, tensor in make_prompts().items()}
    with pytest.raises(NotImplementedError, match=r"pad on the left alone, tokenizer.padding_side"):
        model.generate(**prompts, **GREEDY)


def _max_time(rank: int, world_size: int) -> None:
    model = hf.enable(make_model("llama"))
    with pytest.raises(NotImplementedError, match="max_time is not supported over several ranks"):
        model.generate(**make_prompts(), **GREEDY, max_time=60.0)
    criteria = StoppingCriteriaList([MaxTimeCriteria(60.0)])
    with pytest.raises(NotImplementedError, match="max_time is not supported over several ranks"):
        model.generate(**make_prompts(), **GREEDY, stopping_criteria=criteria)


def test_max_time_is_for_one_rank(model: PreTrainedModel) -> None:
    model.generate(**make_prompts(), **GREEDY, max_time=60.0)
    run_ranks(_max_time, 2)


def _seed(rank: int, world_size: int) -> list[float]:
    torch.manual_seed(rank)
    hf.seed_ranks()
    first = torch.rand(3).tolist()
    hf.seed_ranks(seed=3)
    assert torch.rand(1).item() == torch.rand(1, generator=torch.Generator().manual_seed(3)).item()
    return first


def test_seed_ranks() -> None:
    expected = torch.rand(3, generator=torch.Generator().manual_seed(0)).tolist()
    assert run_ranks(_seed, 3) == [expected] * 3
    state = torch.get_rng_state()
    hf.seed_ranks()  # a world of one keeps its generator
    assert torch.equal(torch.get_rng_state(), state)


def _synchronize(rank: int, world_size: int) -> list[float]:
    scores = torch.full((2, 3), float(rank)).T  # not contiguous
    synchronized = hf.SynchronizeLogits()(torch.zeros(2, 1), scores)
    assert torch.equal(scores, torch.full((3, 2), float(rank)))
    return synchronized.flatten().tolist()


def test_synchronized_logits_are_those_of_the_first_rank() -> None:
    assert run_ranks(_synchronize, 3) == [[0.0] * 6] * 3


def test_wrong_options_leave_an_enabled_model_as_it_was() -> None:
    model = hf.enable(make_model("llama"), prefill_chunk_size=5)
    generate = model.generate
    for options in ({"timeout": 0}, {"strategy": "none"}, {"prefill_chunk_size": 0}):
        with pytest.raises(ValueError):
            hf.enable(model, **options)
        assert model.config._attn_implementation == "tree_attention"
        assert model.generate == generate
