# SPDX-License-Identifier: BSD-3-Clause
"""Models over ranks say what transformers says of one: families, kinds of caches and operations.

Each row of `TABLE` is served in all its ways: prompts split, weights split, windows that leave
slots behind. Of a row's families, operations, caches, ways and worlds the quick tier has each once,
if the row is one of `QUICK_ROWS`, and both tiers together have every two of them (`pairwise.py`).

The mistakes these tests are for: a token that no rank or two compute, a key in the wrong slot or on
the wrong rank, a slot that a query sees and that is gone, a slice of a weight that is off by a row,
a packed projection cut across its parts, a bias added on every rank, heads that meet other heads'
keys, a family that computes with all tokens of a chunk in one place, ranks that part.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from distributed import run_ranks

pytest.importorskip("transformers")

import hf_families
import hf_models
import split_models
from generations import generated, left_padded, nan_in_new_memory, same_on_all_ranks, ways_to_read
from hf_families import FAMILIES_TO_SPLIT, OWN_ATTENTION, WORKING, sizes_of_tensor_groups
from pairwise import by_tier
from rounded_caches import rounded_cache
from tree_attention import BlockCyclic, Contiguous, ContiguousThenCyclic, ShardLayout, hf
from tree_attention import shares as shares_of_ranks
from tree_attention.hf import CACHE_NAME
from tree_attention.hf.cache import window
from tree_attention.hf.cache.token_split import TokenSplit
from window_caches import crop

PROMPT_LENGTH = 37
SEED = 5
PADDED, EVEN, ONE = (0, 11, 5), (0, 0, 0), (0,)
# Paddings of the prompts, and arguments of generate; `_say` says what the others do.
OPERATIONS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "greedy": (PADDED, {}),
    "even": (EVEN, {}),
    "chunks": (PADDED, {"prefill_chunk_size": 16}),
    "beams": (PADDED, {"num_beams": 3}),
    "sampling": (PADDED, {"do_sample": True, "temperature": 0.9, "top_k": 50}),
    "sampled beams": (PADDED, {"do_sample": True, "num_beams": 3, "num_return_sequences": 2}),
    "without cache": (PADDED, {"use_cache": False}),
    "lookup": (ONE, {"prompt_lookup_num_tokens": 4}),
    "assistant": (ONE, {}),
    "enabled assistant": (ONE, {}),
    "embeddings": (ONE, {}),
    "copied model": (ONE, {}),
    "kept": (PADDED, {}),
}
CACHES: dict[str, dict[str, Any]] = {
    "growing": {},
    "fixed": {"max_length": 90},
    "int8": {"kv_dtype": "int8"},
    "fp8": {"kv_dtype": "fp8"},
    "fixed int8": {"kv_dtype": "int8", "max_length": 90},
    "fixed fp8": {"kv_dtype": "fp8", "max_length": 90},
}
# Options of `enable`; and `tensor_parallel_size` where weights are split, in memory or `published`.
Options = dict[str, Any]


def _in_any_layout(_: str, world_size: int) -> Iterator[Options]:
    """Split prompts of shares that are even, uneven, of one rank alone (the default) and empty."""
    uneven = (0, *(10 + 5 * rank for rank in range(world_size)))
    layouts: list[ShardLayout | None] = [
        BlockCyclic(world_size, 4),
        None,
        Contiguous((*uneven[:-1], 100)),
        ContiguousThenCyclic((0, *[20] * (world_size - 1), 30), 2),
    ]
    for layout, size in product(layouts, (None, 12 // world_size)):  # of a rank
        yield {"layout": layout, "prefill": "split", "prefill_chunk_size": size}


def _by_any_owner(_: str, world_size: int) -> Iterator[Options]:
    """Split prompts. In blocks of 4 each rank computes the tokens that it keeps; blocks of 1000 are
    all of one rank, and tokens go round the ranks."""
    for block in (4, 1000):
        layout = BlockCyclic(world_size, block)
        yield {"layout": layout, "prefill": "split", "prefill_chunk_size": 6}


def _in_blocks(_: str, world_size: int) -> Iterator[Options]:
    yield {"layout": BlockCyclic(world_size, 4), "prefill": "split", "prefill_chunk_size": None}


def _by_rows(_: str, world_size: int) -> Iterator[Options]:
    yield {"layout": BlockCyclic(world_size, 4), "prefill_chunk_size": 16}


def _whole_in_any_layout(_: str, world_size: int) -> Iterator[Options]:
    """Prompts that are not split, of shares that are even, uneven, and of one rank alone."""
    uneven = (0, *(10 + 5 * rank for rank in range(1, world_size)))
    layouts: list[ShardLayout | None] = [
        BlockCyclic(world_size, 4),
        None,
        Contiguous((*uneven, 100)),
        ContiguousThenCyclic((0, *[20] * (world_size - 1), 30), 2),
    ]
    for layout, size in product(layouts, (None, 16)):
        yield {"layout": layout, "prefill_chunk_size": size}


def _read_in_any_way(_: str, world_size: int) -> Iterator[Options]:
    return ways_to_read(BlockCyclic(world_size, 4))


def shares_of(world_size: int) -> list[int]:
    """A rank with nothing, and others with unequal parts; a world of one has all."""
    return [*range(1, world_size), 0] if world_size > 2 else [3, 1][:world_size]


def _by_shares(_: str, world_size: int) -> Iterator[Options]:
    """Keys by shares, and prompts whose tokens each rank keeps, in blocks of 4; go round the ranks,
    in the usual ones; and are dealt otherwise than keys."""
    shares = shares_of(world_size)
    for more in (
        {"layout": BlockCyclic(world_size, 4, shares)},
        {"shares": shares},
        {"shares": {"cache": shares, "prompt": shares[::-1]}, "prefill_chunk_size": 16},
    ):
        yield {"prefill": "split", "prefill_chunk_size": 6, **more}


def _kept_by_shares(_: str, world_size: int) -> Iterator[Options]:
    yield {"layout": BlockCyclic(world_size, 4, shares_of(world_size)), "prefill_chunk_size": 16}


def _whole_by_shares(_: str, world_size: int) -> Iterator[Options]:
    """Keys by shares in blocks of 4, and in the usual ones; prompts are not split."""
    shares = shares_of(world_size)
    yield {"layout": BlockCyclic(world_size, 4, shares), "prefill_chunk_size": 16}
    yield {"shares": shares}


def _split_by_shares(family: str, world_size: int) -> Iterator[Options]:
    """Weights and keys by shares, and each alone; with tensor groups those of a group are equal."""
    for size in _sizes(family, world_size):
        shares = [x for x in shares_of(world_size // size) for _ in range(size)]
        for given in (shares, {"weights": shares}, {"cache": shares, "weights": shares[::-1]}):
            yield {"tensor_parallel_size": size, "shares": given}


def _checkpoints_by_shares(family: str, world_size: int) -> Iterator[Options]:
    for options in _split_by_shares(family, world_size):
        yield options | {"published": True}


def _sizes(family: str, world_size: int) -> list[int]:
    if family in FAMILIES_TO_SPLIT:
        return sizes_of_tensor_groups(family, world_size)
    return split_models.sizes_of_tensor_groups(world_size)


def _split_weights(family: str, world_size: int, **more: Any) -> Iterator[Options]:
    for size in _sizes(family, world_size):
        layout = BlockCyclic(world_size // size, 4)  # of which the ranks' shares are uneven
        yield {"tensor_parallel_size": size, "layout": layout, **more}


def _split_checkpoints(family: str, world_size: int) -> Iterator[Options]:
    return _split_weights(family, world_size, published=True)


def _most_tensor_ranks(family: str, world_size: int) -> Iterator[Options]:
    """The largest with several ranks of the same heads, where a rank's number in its tensor group
    is not its number in the world."""
    ways = [*_split_weights(family, world_size)]
    yield [x for x in ways if x["tensor_parallel_size"] < world_size][-1]


def _most_of_checkpoints(family: str, world_size: int) -> Iterator[Options]:
    """Experts one by one under the names that each family has for them."""
    yield {"tensor_parallel_size": _sizes(family, world_size)[-1], "published": True}


@dataclass(frozen=True)
class Row:
    """Families x operations x kinds of caches x `ways` x worlds, of which `chosen` takes some.

    `groups` of families meet in one test. Worlds in a tuple run one after the other in one
    directory. `in_turn`: fields of `Served` that meet some of the other values, not every one.
    """

    groups: Sequence[Sequence[str]]
    ways: Callable[[str, int], Iterator[Options]]
    quick: Sequence[int | tuple[int, ...]] = ()
    deep: Sequence[int | tuple[int, ...]] = ()
    operations: Sequence[str] = ("greedy",)
    caches: Sequence[str] = ("growing",)
    num_tokens: int = 5  # the last key is the first of a block of 4
    small_windows: bool = False  # layers with windows leave slots behind all the time
    in_turn: Sequence[str] = ()

    def chosen(self) -> list[Any]:
        """The cases of both tiers as `by_tier` has them: a list for each world or worlds."""
        in_turn = [Served._fields.index(name) for name in self.in_turn]
        return by_tier(self._all(self.quick), self._all(self.deep), in_turn)

    def _all(self, worlds: Sequence[int | tuple[int, ...]]) -> Iterator[Served]:
        families = [family for group in self.groups for family in group]
        for each in product(families, self.operations, self.caches, worlds):
            sizes = each[-1] if isinstance(each[-1], tuple) else (each[-1],)
            ways = min(len([*self.ways(each[0], size)]) for size in sizes)
            for way in range(ways):
                yield Served(*each[:-1], way, each[-1])


class Served(NamedTuple):
    family: str
    operation: str
    cache: str
    way: int  # of those of the row
    worlds: int | tuple[int, ...]


def _by(count: int, names: Sequence[str]) -> list[Sequence[str]]:
    """Families that share the time it takes to start ranks."""
    return [names[i : i + count] for i in range(0, len(names), count)]


SPLIT_PROMPTS = {name: x for name, x in WORKING.items() if x.exists}
SPLIT_PROMPTS["XGLM"] = OWN_ATTENTION["XGLM"]
SPLIT_WEIGHTS = sorted(FAMILIES_TO_SPLIT)
# One of each way to cut attention, an MLP and experts.
QUICK = ("CodeGen", "Llama", "DeepSeek-V3", "GPT-OSS", "GPT-2", "OLMoE", "Phi-3")
QUICK = [x for x in (*QUICK, "Qwen3-Next", "Qwen2-MoE") if x in FAMILIES_TO_SPLIT]
# Those that AutoModelForCausalLM makes, as `from_pretrained` does.
PUBLISHED = [x for x in SPLIT_WEIGHTS if FAMILIES_TO_SPLIT[x].auto == "AutoModelForCausalLM"]
WINDOWS = [x for x in SPLIT_PROMPTS if SPLIT_PROMPTS[x].options.get("sliding_window")]
assert len(WINDOWS) > 8
UNEVEN = [f"uneven {name}" for name in split_models.FAMILIES]
ALL_OPERATIONS = [x for x in OPERATIONS if x not in ("even", "chunks", "enabled assistant")]
CHOOSING = [name for name, x in hf_families.CHOOSING.items() if x.exists]
UNPADDED = {name for name, x in hf_families.CHOOSING.items() if not x.is_padded}
FAMILIES = ["family"]  # in turn
OF_CHOSEN = ("beams", "sampling", "lookup", "embeddings", "copied model")
CROPPING = ("beams", "lookup", "enabled assistant")

TABLE: dict[str, Row] = {
    "prompts": Row(_by(8, [*hf_models.CONFIGS]), _in_any_layout, deep=(2, 3)),
    "prompts, families": Row(_by(8, [*SPLIT_PROMPTS])[:1], _by_any_owner, quick=(2,)),
    "prompts, operations": Row(
        [["llama"]], _in_blocks, (3,), (1, 2), ALL_OPERATIONS, num_tokens=8
    ),
    "prompts, kept": Row([["llama"]], _in_any_layout, (), (1, 2, 3), ("kept",), in_turn=["way"]),
    "weights": Row(_by(1, UNEVEN), _split_checkpoints, (), (1, 2, 3, 4), ("chunks", "even")),
    "weights, uneven": Row([UNEVEN], _split_checkpoints, quick=(2,)),
    "weights, families": Row([QUICK], _split_weights, (2,), (1,)),
    "weights, all families": Row(_by(9, SPLIT_WEIGHTS), _most_tensor_ranks, deep=(4,)),
    "checkpoints": Row([[x for x in QUICK if x in PUBLISHED]], _most_of_checkpoints, (2,)),
    "all checkpoints": Row(_by(9, PUBLISHED), _most_of_checkpoints, deep=(2,)),
    "weights, operations": Row(
        [["uneven llama_tied"]], _split_weights, deep=(2, 3, 4), operations=ALL_OPERATIONS,
        num_tokens=8, in_turn=["way", "worlds"],
    ),
    "weights, kept": Row([["uneven llama"]], _split_weights, (), ((4, 2),), ("kept",)),
    "shares": Row([["llama", "deepseek"]], _by_shares, (3,), (1, 2)),
    "shares, families": Row(_by(8, [*SPLIT_PROMPTS]), _by_shares, deep=(2,), in_turn=FAMILIES),
    "shares, ALiBi": Row([["BLOOM", "MPT"]], _whole_by_shares, deep=(2, 3)),
    "shares, operations": Row(
        [["llama"]], _by_shares, deep=(3,), operations=("beams", "lookup", "sampling"),
        num_tokens=8,
    ),
    "shares, kept": Row(
        [["llama", "gemma2"]], _kept_by_shares, (), ((3, 2), (2, 1)), ("kept",), num_tokens=12
    ),
    "shares, windows": Row(
        [["mistral_window", "gemma2"]], _kept_by_shares, deep=(2, 3),
        caches=("growing", "fixed", "int8"), num_tokens=12, small_windows=True,
    ),
    "shares of weights": Row([["uneven llama"]], _split_by_shares, (2,), (3, 4)),
    "shares of weights, families": Row([QUICK], _split_by_shares, deep=(4,), in_turn=FAMILIES),
    "shares of weights, all families": Row(
        _by(9, SPLIT_WEIGHTS), _split_by_shares, deep=(3,), in_turn=FAMILIES
    ),
    "shares of weights, operations": Row(
        [["uneven llama_tied"]], _split_by_shares, deep=(3,),
        operations=[x for x in ALL_OPERATIONS if x != "kept"],  # which a layout is given for
        num_tokens=8, in_turn=["operation"],
    ),
    "shares of checkpoints": Row(
        [["uneven llama_tied", "uneven gpt_oss"]], _checkpoints_by_shares, deep=(2, 3, 4),
        in_turn=FAMILIES,
    ),
    "8 bits, split weights": Row(
        [["uneven llama"]], _split_weights, (2,), (3, 4), caches=("int8", "fp8"), num_tokens=12
    ),
    "8 bits": Row(
        [["llama", "deepseek"]], _read_in_any_way, (2,), (1, 3), caches=("int8", "fp8"),
        num_tokens=12,
    ),
    "8 bits, windows": Row(
        [["gemma2", "gpt_oss"]], _read_in_any_way, deep=(1, 2, 3), caches=("int8", "fp8"),
        num_tokens=12,
    ),
    "8 bits, operations": Row(
        [["llama"]], _by_rows, (2,), (1, 3), ("beams", "lookup"), ("int8", "fp8"), 12
    ),
    "windows": Row(
        [["mistral_window", "gemma2", "gpt_oss"]], _read_in_any_way, deep=(1, 2, 3),
        caches=("growing", "fixed"), num_tokens=12, small_windows=True,
    ),
    "windows, families": Row(
        [WINDOWS], _by_rows, deep=(1, 2), caches=("growing", "fixed"), num_tokens=12,
        small_windows=True, in_turn=FAMILIES,
    ),
    "windows, operations": Row(
        [["gemma2"]], _by_rows, deep=(1, 3), operations=CROPPING, caches=(*CACHES,),
        num_tokens=12, small_windows=True,
    ),
    "kept": Row(
        [["llama", "gemma2", "deepseek"]], _by_rows, ((3, 2, 1),), ((2, 1, 3),),
        operations=("kept",), caches=("growing", "fixed"), num_tokens=12, small_windows=True,
    ),
    "kept, 8 bits": Row(
        [["gemma2"]], _by_rows, deep=((2, 1, 3),), operations=("kept",),
        caches=("int8", "fixed int8"), num_tokens=16, small_windows=True,
    ),
}  # fmt: skip
if len(CHOOSING) == len(hf_families.CHOOSING):  # not before transformers 5.24
    TABLE |= {
        "chosen keys": Row(
            [CHOOSING], _by_rows, (2,), (1, 3), caches=("growing", "fixed"), num_tokens=12
        ),
        "chosen keys, layouts": Row(
            [["DeepSeek-V3.2", "MiniMax-M3"]],
            _whole_in_any_layout,
            (3,),
            (1, 2),
            in_turn=["way"],
        ),
        "chosen keys, prompts": Row(
            [CHOOSING], _by_any_owner, (2,), (3,), caches=("growing", "fixed"), num_tokens=12
        ),
        "chosen keys, prompts in all layouts": Row(
            [["DeepSeek-V3.2", "MiniMax-M3"]], _in_any_layout, deep=(2, 3), in_turn=["way"]
        ),
        "chosen keys, operations": Row(
            [["GLM-5", "MiniMax-M3"]], _by_rows, (2,), (1, 3), OF_CHOSEN, ("growing", "fixed"), 8
        ),
        "chosen keys, 8 bits": Row(
            [["DeepSeek-V3.2"]], _by_rows, (2,), (1, 3), caches=("int8",), num_tokens=12
        ),
        "chosen keys, weights": Row([CHOOSING], _split_weights, (2,)),
        "chosen keys, checkpoints": Row([CHOOSING], _most_of_checkpoints, (2,)),
        "chosen keys, kept": Row(
            [["DeepSeek-V3.2", "MiniMax-M3"]], _by_rows, ((2, 1, 3),), (), ("kept",), num_tokens=12
        ),
        "chosen keys, all kept": Row(
            [CHOOSING],
            _by_rows,
            (),
            ((2, 1),),
            ("kept",),
            ("growing", "fixed"),
            8,
            in_turn=FAMILIES,
        ),
    }


# Those that others have no quick case of. The quick cases of other rows are deep.
QUICK_ROWS = {
    "prompts, families",
    "prompts, operations",
    "weights, uneven",
    "shares of weights",
    "8 bits",
}
assert TABLE.keys() >= QUICK_ROWS


class Case(NamedTuple):
    family: str
    operation: str
    cache: str
    num_tokens: int


class Said(NamedTuple):
    """What transformers says: `margin` is how far apart the best two tokens are at the nearest."""

    tokens: Tensor
    logits: Tensor
    margin: float


def make_model(family: str) -> Any:
    if family in hf_models.CONFIGS:
        return hf_models.make_model(family)
    if family.startswith("uneven "):
        return split_models.make_model(family.removeprefix("uneven "))
    return hf_families.make_model((SPLIT_PROMPTS | FAMILIES_TO_SPLIT | OWN_ATTENTION)[family])


def _prompts(case: Case) -> dict[str, Tensor]:
    known = case.family in hf_models.CONFIGS or case.family.startswith("uneven ")
    size = hf_models.VOCAB_SIZE if known else hf_families.VOCAB_SIZE
    paddings = OPERATIONS[case.operation][0]
    if case.family in UNPADDED:
        paddings = (0,) * len(paddings)
    return left_padded(size, PROMPT_LENGTH, paddings, seed=11)


def _longer(prompts: dict[str, Tensor], tokens: Tensor) -> dict[str, Tensor]:
    """The second turn: what was said, and 9 tokens more."""
    more = torch.randint(3, 97, (len(tokens), 9), generator=torch.Generator().manual_seed(2))
    ids = torch.cat((tokens, more), dim=1)
    new = ids.shape[1] - PROMPT_LENGTH
    mask = torch.nn.functional.pad(prompts["attention_mask"], (0, new), value=1)
    return {"input_ids": ids, "attention_mask": mask}


def _arguments(case: Case) -> dict[str, Any]:
    count = {"max_new_tokens": case.num_tokens, "min_new_tokens": case.num_tokens}
    return count | {"do_sample": False} | OPERATIONS[case.operation][1]


@cache
def said(case: Case) -> tuple[Said, ...]:
    """Of one process, in each turn, with keys and values rounded as the cache rounds them."""
    model, prompts, found = make_model(case.family), _prompts(case), []
    arguments = {key: x for key, x in _arguments(case).items() if key != "prefill_chunk_size"}
    kv_dtype = CACHES[case.cache].get("kv_dtype")
    for _ in range(2 if case.operation == "kept" else 1):
        if kv_dtype is not None:
            arguments[CACHE_NAME] = rounded_cache(model.config, kv_dtype)
        torch.manual_seed(SEED)
        found.append(Said(*generated(model, prompts, **arguments)))
        # One token over and over would prove little.
        length = prompts["input_ids"].shape[1]
        assert len(found[-1].tokens[:, length:].unique()) >= case.num_tokens // 2
        prompts = _longer(prompts, found[-1].tokens)
    return tuple(found)


def _compare(found: Any, expected: Said, case: Case, options: Options) -> list[Tensor]:
    assert torch.equal(found.sequences, expected.tokens), (case, options)
    if OPERATIONS[case.operation][1].keys() - {"prefill_chunk_size"}:
        return [found.sequences]
    logits = torch.stack(found.logits)
    error = (logits - expected.logits).abs().max().item()
    # Far less than what would change a token: none is equal by chance. A sum in another order may
    # be rounded to another of 8 bits.
    bound = expected.margin / (5 if "8" in case.cache else 10)
    assert error < bound, f"{case}, {options}: {error}, bound {bound}"
    return [logits]


def _serve(
    rank: int,
    world_size: int,
    name: str,
    wanted: dict[Case, tuple[tuple[Said, ...], list[int]]],
    directory: Path,
) -> list[Tensor]:
    """The logits of every case in its ways; all are compared here."""
    row, found = TABLE[name], []
    for case, (turns, numbers) in wanted.items():
        ways = [*row.ways(case.family, world_size)]
        for number in numbers:
            options = ways[number] | CACHES[case.cache]
            model = _make(case.family, options, directory)
            with ExitStack() as stack:
                if row.small_windows:
                    stack.enter_context(mock.patch.object(window, "MARGIN", 6))
                    stack.enter_context(mock.patch.object(window, "STEP", 3))
                column = rank % options.get("tensor_parallel_size", 1)  # which has its own heads
                own = directory / f"{case.family} {case.cache} {number} {column}"
                found += _say(model, case, turns, options, own)
    return found


def _of_enable(options: Options) -> Options:
    return {x: y for x, y in options.items() if x not in ("tensor_parallel_size", "published")}


@mock.patch.object(shares_of_ranks, "LEAST_SAVED", 0)  # so that small projections are cut too
def _make(family: str, options: Options, directory: Path) -> Any:
    """The model as the options say."""
    size, options = options.get("tensor_parallel_size"), {**options}
    shares = {} if size is None or "shares" not in options else {"shares": options.pop("shares")}
    if "published" in options:
        model = hf.from_pretrained(
            directory / family, tensor_parallel_size=size, **shares, **_of_enable(options)
        )
        assert not model.training
        return model
    model = make_model(family)
    if size is not None:
        model = hf.parallelize(model, tensor_parallel_size=size, **shares)
    return hf.enable(model, **_of_enable(options))


@contextmanager
def _checking_splits(options: Options, case: Case) -> Iterator[None]:
    """Whether the prompts were split, in chunks of each rank's size."""
    of_last_rank = TokenSplit.of_last_rank
    patched = mock.patch.object(TokenSplit, "of_last_rank", autospec=True, side_effect=of_last_rank)
    with patched as calls:
        yield
    layout, size = options.get("layout"), options.get("prefill_chunk_size")
    if "split" in options.values() and case.operation == "greedy" and layout and size:
        ranks = layout.world_size
        shares = getattr(layout, "shares", None) or (1,) * ranks
        whole = size * sum(shares) // max(shares)
        chunks = [min(whole, PROMPT_LENGTH - i) for i in range(0, PROMPT_LENGTH, whole)]
        assert calls.call_count == sum(count >= max(ranks, 2) for count in chunks) * (ranks > 1), (
            case
        )


def _say(
    model: Any, case: Case, turns: tuple[Said, ...], options: Options, directory: Path
) -> list[Tensor]:
    prompts, arguments, expected = _prompts(case), _arguments(case), turns[0]
    if case.operation == "kept":
        return _keep(model, case, turns, options, directory)
    if "assistant" in case.operation:
        arguments["assistant_model"] = hf_models.make_model("mistral")
        if case.operation == "enabled assistant":
            arguments["assistant_model"] = hf.enable(hf_models.make_model("mistral_window"))
    if case.operation == "embeddings":
        prompts = {
            "inputs_embeds": make_model(case.family).get_input_embeddings()(prompts["input_ids"])
        }
        expected = expected._replace(tokens=expected.tokens[:, PROMPT_LENGTH:])
    if case.operation == "copied model":
        model = copy.deepcopy(model)  # which goes on in the same groups
    if arguments["do_sample"]:
        hf.seed_ranks(seed=SEED + dist.get_rank())  # all take the first rank's
    with _checking_splits(options, case), nan_in_new_memory():
        output = model.generate(
            **prompts, **arguments, output_logits=True, return_dict_in_generate=True
        )
    if window.MARGIN == 6:
        _check_dropped(output[CACHE_NAME])
    return _compare(output, expected, case, options)


def _check_dropped(found: hf.TreeCache) -> None:
    layers = [layer for layer in found.layers if layer.window is not None]
    assert layers
    for layer in layers:
        assert layer.first > 0
        # Of slots that may begin inside a page, and of whole pages.
        most = layer.shard.most(layer.window + window.MARGIN) + 2 * window.STEP
        assert layer.key_rows.shape[2] < most


def _keep(
    model: Any, case: Case, turns: tuple[Said, ...], options: Options, directory: Path
) -> list[Tensor]:
    """The second turn over the cache of the first, a copy of it, and what was saved, by this world
    or another, loaded, moved and taken back by a token."""
    layout, found = options["layout"], []
    group = hf.mesh(model).context_group if "tensor_parallel_size" in options else None
    given = {**CACHES[case.cache], "layout": layout}

    def say(turn: int, kept: hf.TreeCache) -> None:
        prompts = _prompts(case)
        if turn:
            prompts = _longer(prompts, turns[0].tokens)
        with nan_in_new_memory():
            output = model.generate(
                **prompts, **_arguments(case), **{CACHE_NAME: kept}, output_logits=True,
                return_dict_in_generate=True,
            )  # fmt: skip
        found.extend(_compare(output, turns[turn], case, options))

    if not directory.exists():
        first = hf.TreeCache(model.config, group, growth=16, **given)
        with torch.inference_mode():
            say(0, first)
        first.save(directory)
        copied = copy.deepcopy(first)
        say(1, first)
        say(1, copied)
        first.reset()
        say(0, first)  # in the memory of the first turns
    loaded = hf.TreeCache.load(directory, model.config, group, **given)
    crop(loaded, 1)
    moved = BlockCyclic(loaded.shard.layout.world_size, 7)
    loaded.reshard(moved)
    hf.enable(model, **_of_enable(options | {"layout": moved}))
    say(1, loaded)
    return found


def _params() -> list[Any]:
    found = []
    for name, row in TABLE.items():
        for chosen, group in product(row.chosen(), row.groups):
            cases = [case for case in chosen.values[0] if case.family in group]
            label = f"{name}-{group[0]}-{chosen.id}"
            if cases:
                marks = chosen.marks if name in QUICK_ROWS else pytest.mark.deep
                found.append(pytest.param(name, cases, marks=marks, id=label))
    return found


@pytest.mark.parametrize("name, cases", _params())
def test_tokens_equal_those_of_transformers(name: str, cases: list[Served], tmp_path: Path) -> None:
    """In every world; ranks have the same bits."""
    worlds = cases[0].worlds
    row, wanted = TABLE[name], dict[Case, tuple[tuple[Said, ...], list[int]]]()
    for case in cases:
        each = Case(*case[:3], row.num_tokens)
        wanted.setdefault(each, (said(each), []))[1].append(case.way)
    sizes = worlds if isinstance(worlds, tuple) else (worlds,)
    for family in {case.family for case in cases}:
        if any("published" in way for size in sizes for way in row.ways(family, size)):
            make_model(family).save_pretrained(tmp_path / family)
    for world_size in sizes:
        same_on_all_ranks(run_ranks(_serve, world_size, name, wanted, tmp_path))
