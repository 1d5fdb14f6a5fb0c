# SPDX-License-Identifier: BSD-3-Clause
"""Models in which an index chooses the keys of each query, over keys of the index on all ranks.

`test_families.py` and `test_generations.py` compare their tokens with transformers'. Here is what
those would miss: whether they can tell attention to all keys, or to those that a rank would choose
alone, from the right one; ties; messages; and what is refused.
"""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from distributed import on_ranks, run_ranks
from dry_device import leave_device
from fake_device import fake_cuda

pytest.importorskip("transformers")

import transformers
from safetensors.torch import load_file, save_file
from transformers import DynamicCache

from generations import generated, greedy, left_padded, stable_choices
from hf_families import CHOOSING, TOPK, VOCAB_SIZE, WORKING, Family, make_model
from questions import DOCUMENT, answers_alone, ask, check_answers, questions_behind
from rounded_caches import rounded_cache
from tiers import tiers, tiers_of
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention.hf import CACHE_NAME, attention
from tree_attention.hf.cache import chosen_keys, token_split
from tree_attention.hf.cache.snapshot.index import digest_of
from tree_attention.hf.prompts import split_attention
from tree_attention.patterns import by_rows

LENGTH, NUM_TOKENS = 37, 12
KNOWN = [name for name, family in CHOOSING.items() if family.exists]
V32, M3 = "DeepSeek-V3.2", "MiniMax-M3"

if not {V32, M3} <= {*KNOWN}:
    pytest.skip("this release of transformers lacks these models", allow_module_level=True)


def _prompt(length: int = LENGTH, batch: int = 1) -> dict[str, Tensor]:
    return left_padded(VOCAB_SIZE, length, (0,) * batch, seed=4)


def _model(name: str = V32, **changes: Any) -> Any:
    family = CHOOSING[name]
    return make_model(Family(**{**vars(family), "options": {**family.options, **changes}}))


def _tokens(model: Any, length: int = LENGTH) -> Tensor:
    return model.generate(**_prompt(length), **greedy(NUM_TOKENS))


@pytest.mark.deep
@pytest.mark.parametrize("name", KNOWN)
def test_other_tests_can_tell_attention_to_all_keys(name: str) -> None:
    """By logits, as well as they compare them."""
    model = make_model(CHOOSING[name])
    _, chosen, margin = generated(model, _prompt(), **greedy(NUM_TOKENS))
    for module in model.modules():
        for attribute in ("index_topk", "topk_blocks"):
            if hasattr(module, attribute):
                setattr(module, attribute, 1000)
    _, every, _ = generated(model, _prompt(), **greedy(NUM_TOKENS))
    assert (chosen[0] - every[0]).abs().max() > margin / 10


def _choose_alone(scores: Tensor, slots: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
    return scores, slots


@pytest.mark.deep
@on_ranks(2)
@pytest.mark.parametrize("name", [M3, V32])
def test_other_tests_can_tell_what_ranks_choose_alone(
    rank: int, world_size: int, name: str
) -> None:
    model = hf.enable(make_model(CHOOSING[name]), layout=BlockCyclic(world_size, 4))
    _, chosen, margin = generated(model, _prompt(), **greedy(NUM_TOKENS))
    with mock.patch.object(chosen_keys, "all_merge_topk", _choose_alone):
        _, alone, _ = generated(model, _prompt(), **greedy(NUM_TOKENS))
    assert (chosen[0] - alone[0]).abs().max() > margin / 10


def _tie(rank: int, world_size: int, tokens: Tensor) -> None:
    model = _tied()
    assert torch.equal(_tokens(hf.enable(model, layout=BlockCyclic(world_size, 4))), tokens)


def _tied() -> Any:
    """All scores of its index are 0, and of either sign."""
    model = _model()
    for module in model.modules():
        if hasattr(module, "weights_proj"):
            module.wk.weight.data.zero_()
            module.k_norm.bias.data.zero_()
    return model


@pytest.mark.parametrize("world_size", tiers([2], [1]))
def test_keys_of_equal_score_are_chosen_by_slot(world_size: int) -> None:
    tokens, *_ = generated(_tied(), _prompt(), **greedy(NUM_TOKENS))
    run_ranks(_tie, world_size, tokens)


def _by_shares(rank: int, world_size: int, name: str, said: Any) -> None:
    uneven, empty = (3, 1, 2)[:world_size], (1, 0, 2)[:world_size]
    cases: list[tuple[Any, dict[str, Any]]] = [
        (None, {"layout": BlockCyclic(world_size, 4, uneven)}),
        (None, {"layout": BlockCyclic(world_size, 4, empty)}),
        (uneven, {}),
        (empty, {}),
    ]
    for shares, options in cases:
        model = make_model(CHOOSING[name])
        if shares is not None:
            model = hf.parallelize(model, shares=shares)
        found = generated(hf.enable(model, **options), _prompt(), **greedy(NUM_TOKENS))
        assert torch.equal(found[0], said[0]), (shares, options)
        assert (found[1] - said[1]).abs().max() < said[2] / 10, (shares, options)


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("name", [V32, M3])
def test_ranks_of_unequal_shares(name: str, world_size: int) -> None:
    said = generated(make_model(CHOOSING[name]), _prompt(), **greedy(NUM_TOKENS))
    run_ranks(_by_shares, world_size, name, said)


@on_ranks(2)
def test_nothing_is_exchanged_before_there_is_a_choice(rank: int, world_size: int) -> None:
    for max_length in (None, 64):
        model = hf.enable(_model(), layout=BlockCyclic(world_size, 4), max_length=max_length)
        merge = mock.patch.object(
            chosen_keys, "all_merge_topk", side_effect=chosen_keys.all_merge_topk
        )
        with merge as calls:
            cache = hf.TreeCache(
                model.config, layout=BlockCyclic(world_size, 4), max_length=max_length
            )
            ids = _prompt(TOPK + 2)["input_ids"]
            with torch.no_grad():
                model(ids[:, :-2], **{CACHE_NAME: cache})
                assert calls.call_count == 0
                model(ids[:, -2:-1], **{CACHE_NAME: cache})
        assert calls.call_count == model.config.num_hidden_layers


@pytest.mark.parametrize(
    ("name", "sentence"),
    [
        (V32, "a hole, zeros between ones, around which an index that chooses keys does not see"),
        (M3, "chooses blocks of cache slots, which left padding shifts"),
    ],
)
@on_ranks(2)
def test_rows_that_share_a_document(rank: int, world_size: int, name: str, sentence: str) -> None:
    """They are copies, of which each chooses in its own."""
    texts, padded = (
        questions_behind((DOCUMENT,) * 3, sizes, is_common=True) for sizes in ((5, 5, 5), (5, 3, 1))
    )
    model = make_model(CHOOSING[name])
    answers = answers_alone(model, texts)
    hf.enable(model, layout=BlockCyclic(world_size, 4))
    cache = hf.TreeCache(model.config, layout=BlockCyclic(world_size, 4))
    with torch.no_grad():
        model(texts["input_ids"][:1, :DOCUMENT], **{CACHE_NAME: cache})
    check_answers(ask(model, texts, **{CACHE_NAME: cache.share(3)}), answers)
    with pytest.raises(NotImplementedError, match=sentence):
        ask(model, padded, **{CACHE_NAME: cache.share(3)})
    assert cache.get_seq_length() == DOCUMENT


@pytest.mark.parametrize(
    "change, says",
    [
        ("topk", f"topk is {TOPK - 1} on rank 1, {TOPK} on rank 0"),
        ("all keys", "call is tree_decode on rank 1, all_merge_topk on rank 0"),
        ("dtype", r"index_dtype is torch\.bfloat16 on rank 1, torch\.float32 on rank 0"),
    ],
)
@on_ranks(2)
def test_ranks_whose_index_differs_are_told(
    rank: int, world_size: int, change: str, says: str
) -> None:
    """In a forward pass; `generate` compares configurations before."""
    topk = {"topk": TOPK - 1, "all keys": 1000}.get(change, TOPK)
    model = _model(index_topk=topk if rank else TOPK)
    if change == "dtype" and rank == 1:
        model = model.bfloat16()
    hf.enable(model)
    cache, ids = hf.TreeCache(model.config), _prompt()["input_ids"]
    with torch.no_grad(), pytest.raises(ExchangeError, match=says):
        model(ids, **{CACHE_NAME: cache})


@on_ranks(2)
def test_split_prompts_of_ranks_whose_index_differs(rank: int, world_size: int) -> None:
    model = hf.enable(_model(index_topk=TOPK - rank), prefill="split")
    cache, ids = hf.TreeCache(model.config), _prompt()["input_ids"]
    with torch.no_grad(), pytest.raises(ExchangeError, match="numbers of the model's configuratio"):
        model(ids, **{CACHE_NAME: cache}, logits_to_keep=1)


@pytest.mark.parametrize("name", tiers([M3], [V32]))
@on_ranks(2)
def test_a_chunk_is_scored_in_pieces(rank: int, world_size: int, name: str) -> None:
    """What a piece of queries chooses, and what all ranks send of it, has a bound."""
    model = hf.enable(make_model(CHOOSING[name]), layout=BlockCyclic(world_size, 4))
    tokens = _tokens(model)
    bound, sizes = 3000, list[int]()
    original = chosen_keys.all_merge_topk

    def noted(scores: Tensor, slots: Tensor, *args: Any, **options: Any) -> Any:
        sent = (1 + world_size) * (scores.nbytes + slots.nbytes)
        sizes.append(sent + chosen_keys._ROW_BYTES * slots.numel())
        return original(scores, slots, *args, **options)

    with (
        mock.patch.object(chosen_keys, "_MAX_CANDIDATE_BYTES", bound),
        mock.patch.object(chosen_keys, "all_merge_topk", noted),
    ):
        assert torch.equal(_tokens(model), tokens)
    assert max(sizes) <= bound < 2 * max(sizes)
    choosing = sum(getattr(x, "indexer", None) is not None for x in model.modules())
    assert len(sizes) > choosing * NUM_TOKENS  # forward passes


@pytest.mark.parametrize("name", tiers([V32], [M3]))
@on_ranks(3)
def test_what_travels_for_a_split_prompt(rank: int, world_size: int, name: str) -> None:
    """All rows of the cache once a chunk and layer, in pieces of a bounded size, and no choice."""
    layout, batch, num_tokens = BlockCyclic(world_size, 4), 2, 48
    model = hf.enable(make_model(CHOOSING[name]), layout=layout, prefill="split")
    ids = _prompt(3 * num_tokens, batch)["input_ids"]
    merge = mock.patch.object(chosen_keys, "all_merge_topk", side_effect=AssertionError)
    found = []
    for bound in (token_split._MAX_RECEIVED_BYTES, 3000):
        cache, sent = hf.TreeCache(model.config, layout=layout), list[int]()
        comm = cache.shard.comm
        with (
            mock.patch.object(token_split, "_MAX_RECEIVED_BYTES", bound),
            mock.patch.object(split_attention, "_passes_queries", return_value=False),
            torch.no_grad(),
            merge,
        ):
            for chunk in ids.split(num_tokens, 1):
                before = comm.bytes_sent
                logits = model(chunk, **{CACHE_NAME: cache}, logits_to_keep=1).logits
                sent.append(comm.bytes_sent - before)
        found.append((logits, sent[1:]))  # without the test of the delivery
    buffers = [x for layer in cache.layers for x in layer.buffers().values()]
    row_bytes = sum(x.itemsize * x.shape[1] * x.shape[3] for x in buffers)
    for count, length in enumerate((2 * num_tokens, 3 * num_tokens)):
        own = batch * layout.count(rank, length) * row_bytes
        is_last = layout.owner(length - 1) == rank
        own += is_last * logits.nbytes
        assert [sent[count] for _, sent in found] == [(world_size - 1) * own] * 2
    assert torch.equal(found[0][0], found[1][0])
    expected = make_model(CHOOSING[name])
    with torch.no_grad(), stable_choices():
        wanted = expected(ids).logits[:, -1:]
    torch.testing.assert_close(logits, wanted, atol=1e-3, rtol=1e-3)


@pytest.mark.deep
@on_ranks(2)
def test_pages_are_blocks_whatever_the_length(rank: int, world_size: int) -> None:
    """Of prompts whose last chunk is odd and split, and of caches with room for part of a block."""
    layout = BlockCyclic(world_size, 4)
    wanted, *_ = generated(make_model(CHOOSING[M3]), _prompt(), **greedy(NUM_TOKENS))
    pages = set[tuple[int, int]]()

    def noted(*arguments: Any, block: int) -> Any:
        found = by_rows(*arguments, block=block)
        pages.add((block, found[1].shape[2]))
        return found

    ways: list[dict[str, Any]] = [
        {"prefill": "split", "prefill_chunk_size": 7},
        {"max_length": LENGTH + NUM_TOKENS},
        {},
    ]
    for options in ways:
        model = hf.enable(make_model(CHOOSING[M3]), layout=layout, **options)
        given = {} if options else {CACHE_NAME: hf.TreeCache(model.config, layout=layout, growth=1)}
        with mock.patch.object(attention, "by_rows", noted):
            found = model.generate(**_prompt(), **greedy(NUM_TOKENS), **given)
        assert torch.equal(found, wanted)
        assert pages == {(4, 4)}, options


def test_more_keys_than_the_cache_has_room_for() -> None:
    model = _model(index_topk=100)
    tokens = _tokens(model)
    assert torch.equal(_tokens(hf.enable(model, max_length=LENGTH + NUM_TOKENS)), tokens)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(dtype: torch.dtype) -> None:
    """Index keys are kept in the model's dtype, and multiplied in float32."""
    model = _model().to(dtype)
    prompt = _prompt()["input_ids"]
    with torch.no_grad():
        expected = model(prompt).logits.float()
        cache = hf.TreeCache(model.config)
        found = hf.enable(model)(prompt, **{CACHE_NAME: cache}).logits.float()
    assert cache.layers[0].index_keys.dtype == dtype
    # One key of another choice may differ by far more in one token: most do not.
    error = (found - expected).abs().amax(-1)
    assert error.median() < 0.05 * expected.abs().max()


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_index_keys_keep_their_dtype_beside_8_bits(kv_dtype: str, tmp_path: Path) -> None:
    model = hf.enable(_model())
    plain, rounded = (hf.TreeCache(model.config, kv_dtype=x) for x in (None, kv_dtype))
    with torch.no_grad():
        for cache in (plain, rounded):
            model(_prompt()["input_ids"], **{CACHE_NAME: cache})
    first, same = (x.layers[0].index_keys[:, :, :LENGTH] for x in (plain, rounded))
    assert torch.equal(first, same)
    plain.save(tmp_path)
    loaded = hf.TreeCache.load(tmp_path, model.config, kv_dtype=kv_dtype)
    for layer, same in zip(loaded.layers, plain.layers, strict=True):
        assert torch.equal(layer.index_keys[:, :, :LENGTH], same.index_keys[:, :, :LENGTH])


def _say_in_fp8(rank: int, world_size: int, said: Any, rows: list[Tensor]) -> None:
    layout = BlockCyclic(world_size, 4)
    model = hf.enable(_model(), layout=layout)
    cache = hf.TreeCache(model.config, layout=layout, kv_dtype="fp8")
    tokens, logits, _ = generated(model, _prompt(), **greedy(NUM_TOKENS), **{CACHE_NAME: cache})
    assert torch.equal(tokens, said[0])
    # Sums in another order round a number in a thousand to the fp8 number next to it, which is up
    # to an eighth away: it shows in the logits of the steps that choose its row, and in no others.
    error = (logits - said[1]).abs().amax((1, 2))
    assert error.median() < said[2] / 100
    for layer, expected in zip(cache.layers, rows, strict=True):
        slots = layout.local_slots(rank, 0, expected.shape[2])
        found = layer.key_rows[:, :, : len(slots)].float() * layer.k_scale[:, :, : len(slots), None]
        differs = (found - expected[:, :, slots]).abs() > 1e-4 * expected.abs().max()
        assert differs.float().mean() < 2e-3


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [2, 1, 3])
def test_latents_of_fp8(world_size: int) -> None:
    model = _model()
    cache = rounded_cache(model.config, "fp8")
    said = generated(model, _prompt(), **greedy(NUM_TOKENS), **{CACHE_NAME: cache})
    rows = [torch.cat((layer.keys, layer.values), dim=3) for layer in cache.layers]
    run_ranks(_say_in_fp8, world_size, said, rows)


def _with_assistants(rank: int, world_size: int, name: str, tokens: Tensor) -> None:
    layout = BlockCyclic(world_size, 4)
    model = hf.enable(make_model(CHOOSING[name]), layout=layout)
    helper = make_model(CHOOSING[M3 if name == V32 else V32])
    for assistant in (helper, hf.enable(copy.deepcopy(helper), layout=layout)):
        found = model.generate(**_prompt(), **greedy(NUM_TOKENS), assistant_model=assistant)
        assert torch.equal(found, tokens)


@pytest.mark.deep
@pytest.mark.parametrize("world_size", [2, 1, 3])
@pytest.mark.parametrize("name", [M3, V32])
def test_assistants_that_choose_their_keys(name: str, world_size: int) -> None:
    """Candidates that are refused are taken back, with the keys of the index."""
    tokens, *_ = generated(make_model(CHOOSING[name]), _prompt(), **greedy(NUM_TOKENS))
    run_ranks(_with_assistants, world_size, name, tokens)


def _read_in_8_bits(rank: int, world_size: int, path: Path, said: Any) -> None:
    for size in (1, world_size):
        model = hf.from_pretrained(path, tensor_parallel_size=size, weights="int8")
        found = generated(model, _prompt(), **greedy(NUM_TOKENS))
        assert torch.equal(found[0], said[0])
        assert (found[1] - said[1]).abs().max() < said[2] / 5
        for indexer in (x.indexer for x in model.modules() if getattr(x, "indexer", None)):
            assert all(x.dtype == torch.float32 for x in indexer.parameters())


@pytest.mark.deep
@pytest.mark.parametrize("name", [M3, V32])
def test_weights_of_8_bits(name: str, tmp_path: Path) -> None:
    """Those of the index are not quantised, with which other keys would be chosen."""
    model = make_model(CHOOSING[name])
    model.save_pretrained(tmp_path)
    said = generated(hf.from_pretrained(tmp_path, weights="int8"), _prompt(), **greedy(NUM_TOKENS))
    run_ranks(_read_in_8_bits, 2, tmp_path, said)


def test_index_keys_are_counted() -> None:
    config = _model().config
    sizes = []
    for kinds in (["full"] * 3, ["full", "shared", "shared"]):
        model = hf.enable(_model("GLM-5", indexer_types=kinds))
        cache = hf.TreeCache(model.config, growth=64)
        with torch.no_grad():
            model(_prompt()["input_ids"], **{CACHE_NAME: cache})
        sizes.append(cache.num_bytes)
    assert sizes[0] - sizes[1] == 2 * 64 * config.index_head_dim * 4


# The operations of an indexer, in order, and others in their place.
def _scores() -> Any:
    model = hf.enable(_model())
    cache = hf.TreeCache(model.config)
    keys = torch.zeros(1, 1, 3, 32), torch.zeros(1, 1, 3, 8)
    cache.update(*keys, 0)
    return cache.update_indexer(torch.zeros(1, 3, 16), 0)


Q, WEIGHTS = torch.zeros(1, 3, 8, 16), torch.zeros(1, 3, 1, 8)


def _product() -> Any:
    return torch.matmul(Q, _scores().transpose(-1, -2).float().unsqueeze(1))


UNKNOWN: dict[str, Any] = {
    "torch.sigmoid": lambda: torch.sigmoid(_product()),
    "torch.nn.functional.softmax": lambda: torch.nn.functional.softmax(_product(), dim=-1),
    "Tensor.exp": lambda: _product().exp(),
    "Tensor.transpose": lambda: _scores().transpose(1, 2),
    "Tensor.unsqueeze": lambda: _scores().unsqueeze(1),
    "Tensor.topk": lambda: _product().topk(2),
    "Tensor.mul": lambda: (_product() * 2.0) * 3.0,
    "torch.matmul": lambda: torch.matmul(WEIGHTS, _product() * 2.0),
    "Tensor.masked_fill": lambda: (
        torch.matmul(WEIGHTS, torch.relu(_product()))
        .squeeze(-2)
        .masked_fill(torch.zeros(1, 3, 3, dtype=torch.bool), float("-inf"))
    ),
    "Tensor.shape": lambda: _product().shape,
    "torch.Tensor.add": lambda: torch.zeros(1) + _product(),
}


@pytest.mark.parametrize("called", UNKNOWN)
def test_an_index_that_computes_otherwise_is_refused(called: str) -> None:
    says = f"the index of 'deepseek_v32' calls {called} where it is not known; transformers "
    with pytest.raises(NotImplementedError, match=says + transformers.__version__):
        UNKNOWN[called]()


@pytest.mark.parametrize("name", tiers_of(KNOWN, quick=[V32, M3]))
def test_without_a_tree_cache(name: str) -> None:
    says = "an index chooses the keys of this model, and they must be in a TreeCache: call"
    model = make_model(CHOOSING[name])
    model.set_attn_implementation("tree_attention")
    ids = _prompt()["input_ids"]
    with torch.no_grad():
        with pytest.raises(NotImplementedError, match=says):
            model(ids, **{CACHE_NAME: DynamicCache(config=model.config)})
        with pytest.raises(NotImplementedError, match=says):
            hf.enable(model).generate(ids, max_new_tokens=2, use_cache=False)


def test_padding_of_a_model_that_chooses_blocks() -> None:
    model, prompts = make_model(CHOOSING[M3]), left_padded(VOCAB_SIZE, LENGTH, (0, 5), seed=4)
    with pytest.raises(NotImplementedError, match="chooses blocks of cache slots, which left padd"):
        hf.enable(model).generate(**prompts, max_new_tokens=2)


@pytest.mark.parametrize("name", [V32, M3])
def test_options_that_are_refused(name: str) -> None:
    says = "TreeCache: deterministic is not supported with an index that chooses keys"
    with pytest.raises(ValueError, match=says):
        hf.enable(make_model(CHOOSING[name]), deterministic=64)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is a fake one")
@on_ranks(2)
def test_a_gpu_has_no_kernel_for_the_index(rank: int, world_size: int) -> None:
    """It is said before the first token, while all keys would be chosen."""
    says = "^index_topk: there is no kernel for cuda yet, got k on cuda:0; give tensors of the CPU$"
    # Experts of a layer before it would need an operation that the fake device lacks.
    model = _model(M3, layer_types=["minimax_m3_sparse", "full_attention"])
    for prefill in ("replicated", "split"):
        with fake_cuda():
            hf.enable(model.to("cuda"), prefill=prefill)
            prompt = {key: x.to("cuda") for key, x in _prompt(TOPK // 2).items()}
            with pytest.raises(NotImplementedError, match=says):
                model.generate(**prompt, max_new_tokens=1)
            leave_device()


FIELDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "no keys": (V32, {"index_topk": 0}, "index_topk of 'deepseek_v32' must be at least 1, got 0"),
    "no heads": (V32, {"index_n_heads": 0}, "index_n_heads of .* must be at least 1, got 0"),
    "no blocks": (M3, {"index_topk_blocks": 0}, "index_topk_blocks of .* must be at least 1"),
    "empty blocks": (M3, {"index_block_size": 0}, "index_block_size of .* must be at least 1"),
    "other heads": (M3, {"index_n_heads": 1}, "for each of 2 heads of keys, got index_n_heads=1"),
    "nothing to share": (
        "GLM-5",
        {"indexer_types": ["shared", "full", "full"]},
        r"must choose keys itself, got indexer_types \['shared'\]",
    ),
}


@pytest.mark.parametrize("case", FIELDS)
def test_configurations_that_are_refused(case: str) -> None:
    name, changes, says = FIELDS[case]
    config = make_model(CHOOSING[name]).config
    for field, value in changes.items():
        setattr(config, field, value)
    with pytest.raises(ValueError, match=f"TreeCache: .*{says}"):
        hf.TreeCache(config)


def test_an_index_of_keys_that_are_no_latents() -> None:
    config = make_model(WORKING["Llama"]).config
    config.layer_types = ["indexed_attention"] * 2
    config.index_topk = config.index_head_dim = config.index_n_heads = 4
    says = "TreeCache: an index must choose among latents; 'llama' has no kv_lora_rank"
    with pytest.raises(ValueError, match=says):
        hf.TreeCache(config)


def test_a_layer_without_the_indexer_that_the_configuration_names() -> None:
    model = _model("GLM-5")
    model.config.indexer_types = ["full", "full", "full"]
    with pytest.raises(ValueError, match="layer 1 of this GlmMoeDsaForCausalLM has no indexer"):
        hf.enable(model)


@pytest.mark.parametrize(
    "name, says",
    [
        ("DeepseekV4Config", "'deepseek_v4' keeps compressed keys in addition to the keys of its"),
        (
            "Glm5NextConfig",
            "'glm5_next_text' chooses pools of keys, next to layers that keep states",
        ),
        ("Qwen4ExpTextConfig", "'qwen4_exp_text' chooses keys in code of its own"),
        ("Qwen4ExpConfig", "'qwen4_exp_text' chooses keys in code of its own"),
    ],
)
def test_indexes_of_another_form_are_refused(name: str, says: str) -> None:
    if not hasattr(transformers, name):
        pytest.skip(f"this release of transformers has no {name}")
    with pytest.raises(ValueError, match=f"TreeCache: {says}.*, which is not spread over ranks"):
        hf.TreeCache(getattr(transformers, name)())


def test_layers_that_differ_in_their_configuration() -> None:
    """Reading what is of each layer from the whole is an error of transformers."""
    config = copy.deepcopy(make_model(WORKING["Mistral"]).config)
    config.per_layer_config = {1: {"sliding_window": 5}}
    assert [layer.window for layer in hf.TreeCache(config).layers] == [
        config.per_layer_config[0].sliding_window,
        5,
    ]


@pytest.mark.parametrize("max_length", [None, 64])
def test_a_pass_interrupted_before_its_index_keys(max_length: int | None) -> None:
    model = hf.enable(_model())
    ids = _prompt()["input_ids"]
    caches = [hf.TreeCache(model.config, max_length=max_length) for _ in range(2)]
    stopped = mock.patch.object(
        chosen_keys.IndexedLatentLayer, "update_indexer", side_effect=KeyboardInterrupt
    )
    with torch.no_grad():
        for cache in caches:
            model(ids, **{CACHE_NAME: cache})
        with stopped, pytest.raises(KeyboardInterrupt):
            model(ids[:, :2], **{CACHE_NAME: caches[0]})
        assert caches[0].get_seq_length() == LENGTH
        caches[0].crop(-1)
        caches[1].crop(-1)
        logits = [model(ids[:, -1:], **{CACHE_NAME: cache}).logits for cache in caches]
    assert torch.equal(*logits)


def test_index_keys_of_other_shape_or_dtype() -> None:
    cache = hf.TreeCache(_model().config)
    keys = torch.zeros(1, 1, 3, 32), torch.zeros(1, 1, 3, 8)
    with pytest.raises(RuntimeError, match="index keys follow the keys and values of the same tok"):
        cache.update_indexer(torch.zeros(1, 3, 16), 0)
    for shape in ((1, 2, 16), (2, 3, 16), (1, 3, 8)):
        cache.update(*keys, 0)
        with pytest.raises(ValueError, match=r"takes index keys of shape \[1, 1, 3, 16\], got "):
            cache.update_indexer(torch.zeros(shape), 0)
    for layer in range(2):
        cache.update(*keys, layer)
        cache.update_indexer(torch.zeros(1, 3, 16), layer)
    cache.update(*keys, 0)
    with pytest.raises(ValueError, match=r"holds index keys of torch\.float32, got torch\.bf"):
        cache.update_indexer(torch.zeros(1, 3, 16, dtype=torch.bfloat16), 0)


def _saved(directory: Path) -> Any:
    model = hf.enable(_model())
    cache = hf.TreeCache(model.config)
    with torch.no_grad():
        model(_prompt()["input_ids"], **{CACHE_NAME: cache})
    cache.save(directory)
    return model.config


def _edit(directory: Path, change: Any) -> None:
    file = directory / "index.json"
    index = json.loads(file.read_text())
    change(index)
    file.write_text(json.dumps(index | {"sha256": digest_of(index)}))


def _drop_index(index: Any) -> None:
    for layer in index["layers"]:
        del layer["index"]


def _set_columns(columns: Any) -> Any:
    def change(index: Any) -> None:
        for layer in index["layers"]:
            layer["index"]["columns"] = columns

    return change


DAMAGE: dict[str, tuple[Any, str]] = {
    "no index": (_drop_index, "holds index keys of 0 columns in layer 0, and the model's have 16"),
    "other columns": (_set_columns(8), "holds index keys of 8 columns in layer 0"),
    "negative columns": (_set_columns(-1), "columns of an index must be an integer of at least 0"),
    "many columns": (_set_columns(1 << 62), "an index cannot have"),
    "other model": (
        lambda index: index["model"].update(index_head_dim=8),
        "of another model: its index_head_dim is 8, and that of config 16",
    ),
}


@pytest.mark.parametrize("case", DAMAGE)
def test_saved_index_keys_that_do_not_fit(case: str, tmp_path: Path) -> None:
    config = _saved(tmp_path)
    change, says = DAMAGE[case]
    _edit(tmp_path, change)
    with pytest.raises(ValueError, match=f"TreeCache.load: .*{says}"):
        hf.TreeCache.load(tmp_path, config)


def _load_damaged(rank: int, world_size: int, path: Path, config: Any) -> None:
    says = r"TreeCache\.load: .* is damaged: it has"
    with pytest.raises((ValueError, ExchangeError), match=says):
        hf.TreeCache.load(path, config)


def test_saved_index_keys_that_are_cut(tmp_path: Path) -> None:
    config = _saved(tmp_path)
    (file,) = tmp_path.glob("cache-0*")
    tensors = load_file(file)
    name = next(x for x in tensors if "index_keys" in x)
    save_file(tensors | {name: tensors[name][:, :, :-1].contiguous()}, file)
    run_ranks(_load_damaged, 2, tmp_path, config)


def test_caches_of_the_version_before_are_read_where_there_is_no_index(tmp_path: Path) -> None:
    model = hf.enable(make_model(WORKING["DeepSeek-V3"]))
    cache = hf.TreeCache(model.config)
    with torch.no_grad():
        model(_prompt()["input_ids"], **{CACHE_NAME: cache})
    cache.save(tmp_path)

    def change(index: Any) -> None:
        index["version"] = 4
        for field in ("index_head_dim", "index_n_heads", "indexer_types"):
            del index["model"][field]

    _edit(tmp_path, change)
    assert hf.TreeCache.load(tmp_path, model.config).get_seq_length() == LENGTH


@pytest.mark.deep  # as test_hf_compile.py is
@pytest.mark.parametrize("name", [V32, M3])
def test_decoding_is_one_graph(name: str) -> None:
    """Of a cache of fixed size, whose length the host does not know."""
    torch._dynamo.reset()
    model, ids = hf.enable(make_model(CHOOSING[name])), _prompt()["input_ids"]
    compiled = torch.compile(model.forward, fullgraph=True, backend="eager")
    caches = [hf.TreeCache(model.config, max_length=64) for _ in range(2)]
    with torch.no_grad():
        for cache in caches:
            model(ids, **{CACHE_NAME: cache})
        for _ in range(3):
            expected = model(ids[:, :1], **{CACHE_NAME: caches[0]}).logits
            found = compiled(ids[:, :1], **{CACHE_NAME: caches[1]}).logits
            torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)
