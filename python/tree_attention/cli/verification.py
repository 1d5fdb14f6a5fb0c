# SPDX-License-Identifier: BSD-3-Clause
"""The checks of `verify`: whether the library is right on this machine and ranks."""

import copy
import importlib.util
import sys
from collections.abc import Callable, Iterator
from dataclasses import astuple, dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from rich.table import Table
from rich.text import Text
from torch import Tensor

from .. import (
    BlockCyclic,
    Contiguous,
    ShardLayout,
    lean_decode,
    merge_states,
    ring_decode,
    ring_pass_q_decode,
    strategies,
    tree_decode,
)
from .._loader import INSTALL_TRANSFORMERS
from ..exchange import ExchangeError, get_communicator, sentence
from ..reference.accuracy import check_against_float64, digest
from .checkpoint import load, load_tokenizer, make_greedy
from .usage import (
    RENDEZVOUS_SECONDS,
    UNFOLDED,
    UsageError,
    plain_console,
    printable,
)
from .world import World, joined_world

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Check:
    """One line of the table; `passed` is None for a check that could not be made."""

    name: str
    passed: bool | None
    detail: str


def run(model: Path | None, timeout: float | None) -> int:
    """Makes and shows all checks, with the checkpoint in `model` if there is one. Returns 1 if one
    of them fails, else 0."""
    with joined_world(timeout=timeout) as world, torch.inference_mode():
        kinds = {
            "operator": check_operator(),
            "merge": check_merge(),
            "ranks": check_ranks(world),
            "HuggingFace tokens": check_huggingface(model),
        }
        checks: list[Check] = []
        for name, made in kinds.items():
            made_here = list(until_error(name, made))
            checks += in_all_ranks(made_here, world, timeout or RENDEZVOUS_SECONDS)
    if world.root:
        show(checks, world)
    return 1 if any(check.passed is False for check in checks) else 0


def until_error(name: str, checks: Iterator[Check]) -> Iterator[Check]:
    """The checks of a kind; one that raises is the last of them, and has failed."""
    try:
        yield from checks
    except (UsageError, ExchangeError):  # which end the command: no rank can go on alone
        raise
    except Exception as error:
        yield Check(f"{name}: {type(error).__name__}", False, sentence(error))


def in_all_ranks(
    checks: list[Check], world: World, timeout: float = RENDEZVOUS_SECONDS
) -> list[Check]:
    """The results over all ranks: a check has failed if it failed on one, which is named.

    A rank on which a check raised has fewer of them, and one that the others lack.
    """
    if world.size == 1:
        return checks
    note = {"checks": [astuple(check) for check in checks]}
    failed: dict[str, Check] = {}
    try:
        notes = get_communicator().agree((), timeout, "verify", note)
    except ExchangeError as error:  # another rank has ended, perhaps by what failed here
        details = [check.detail for check in checks if check.passed is False]
        raise ExchangeError("; ".join([*details, sentence(error)])) from error
    for rank, note in enumerate(notes):
        for name, passed, detail in note["checks"]:
            if passed is False:
                failed.setdefault(name, Check(name, False, f"rank {rank}: {detail}"))
    names = {check.name for check in checks}
    others = [check for name, check in failed.items() if name not in names]
    return [failed.get(check.name, check) for check in checks] + others


def show(checks: list[Check], world: World) -> None:
    console = plain_console(width=None if sys.stdout.isatty() else UNFOLDED)
    title = f"tree_attention verify, world size {world.size}"
    table = Table("check", "result", "detail", title=title, title_justify="left")
    words = {
        True: Text("ok", "green"),
        False: Text("FAILED", "bold red"),
        None: Text("skipped", "yellow"),
    }
    for check in checks:
        table.add_row(printable(check.name), words[check.passed], printable(check.detail))
    console.print(table, soft_wrap=False)
    failed = sum(check.passed is False for check in checks)
    if failed:
        console.print(
            f"{failed} of {len(checks)} checks failed. Please report the table with the output of "
            "`python -m tree_attention info`.",
            style="red",
        )
    else:
        console.print(f"All {sum(check.passed is True for check in checks)} checks passed.")


def judged(
    name: str,
    inputs: tuple[Tensor, Tensor, Tensor, Tensor | None],
    result: tuple[Tensor, Tensor],
    **options: Any,
) -> Check:
    """Checks that the errors of a result of `q, k, v, key_ranges` are within their bounds."""
    accuracy = check_against_float64(*inputs, *result, **options)
    detail = f"error {accuracy.o_error:.1e} (bound {accuracy.o_bound:.1e})"
    return Check(name, accuracy.right, f"{detail}, lse {accuracy.lse_error:.1e}")


def random_inputs(
    dtype: torch.dtype, *, batch: int, heads: tuple[int, int], seqlen_q: int, keys: int, d: int
) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v whose scores have a standard deviation of 3, the same on every rank."""
    generator = torch.Generator().manual_seed(0)
    q = 3.0 * torch.randn(batch, heads[0], seqlen_q, d, generator=generator)
    k, v = (torch.randn(batch, heads[1], keys, d, generator=generator) for _ in range(2))
    return q.to(dtype), k.to(dtype), v.to(dtype)


def check_operator() -> Iterator[Check]:
    """Checks `lean_decode` with every kind of argument, in every dtype."""
    for dtype in DTYPES:
        yield from until_error(str(dtype).removeprefix("torch."), check_dtype(dtype))


def check_dtype(dtype: torch.dtype) -> Iterator[Check]:
    name = str(dtype).removeprefix("torch.")
    inputs = random_inputs(dtype, batch=1, heads=(8, 2), seqlen_q=1, keys=3000, d=128)
    yield judged(f"{name}: 8/2 heads, 3000 keys", (*inputs, None), lean_decode(*inputs))

    q, k, v = random_inputs(dtype, batch=3, heads=(6, 2), seqlen_q=5, keys=200, d=80)
    ends = torch.tensor([200, 7, 64])[:, None] - torch.arange(4, -1, -1)
    begins = torch.tensor([0, 2, 60])[:, None].expand_as(ends)
    ranges = torch.stack([begins, ends], -1).int()
    options: dict[str, Any] = {
        "softcap": 20.0,
        "alibi_slopes": 2.0 ** -torch.arange(1.0, 7.0),
        "query_positions": ends - 1,
        "key_layout": (0, 1, 1),
    }
    result = lean_decode(q, k, v, ranges, **options)
    kinds = f"{name}: ragged, causal, padded, softcap, ALiBi"
    yield judged(kinds, (q, k, v, ranges), result, **options)

    pages = torch.randperm(3 * 13, generator=torch.Generator().manual_seed(0)).view(3, 13)
    k_pages, v_pages = k.new_zeros(39, 2, 16, 80), v.new_zeros(39, 2, 16, 80)
    for x, pool in ((k, k_pages), (v, v_pages)):
        padded = torch.cat([x, x.new_zeros(3, 2, 8, 80)], 2).unflatten(2, (13, 16))
        pool[pages.flatten()] = padded.transpose(1, 2).flatten(0, 1)
    paged, table = (q, k_pages, v_pages, ranges), pages.int()
    result = lean_decode(*paged, page_table=table)
    yield judged(f"{name}: paged", paged, result, page_table=table)


def check_merge() -> Iterator[Check]:
    """Checks that the states of parts of the keys, one part empty, merge into the state of all."""
    q, k, v = random_inputs(torch.float32, batch=2, heads=(4, 2), seqlen_q=2, keys=500, d=64)
    cuts = [0, 3, 3, 250, 500]
    parts = [lean_decode(q, k[:, :, a:b], v[:, :, a:b]) for a, b in pairwise(cuts)]
    merged = merge_states(*(torch.stack(part) for part in zip(*parts, strict=True)))
    yield judged("merge of 4 parts, one empty", (q, k, v, None), merged)
    empty = merge_states(torch.full((2, 1, 4), torch.nan), torch.full((2, 1), -torch.inf))
    right = bool((empty[0] == 0).all() and (empty[1] == -torch.inf).all())
    yield Check("merge of empty parts is empty", right, "o = 0, lse = -inf")


def check_ranks(world: World) -> Iterator[Check]:
    """Checks that every way to decode over the ranks is right, with the same bits on all ranks."""
    keys = 777
    q, k, v = random_inputs(torch.bfloat16, batch=2, heads=(8, 2), seqlen_q=1, keys=keys, d=64)
    layouts: dict[str, ShardLayout] = {"block-cyclic": BlockCyclic(world.size, 16)}
    if world.size > 1:
        # Rank r holds r shares of the keys, so the first rank holds none.
        parts = world.size * (world.size - 1) // 2
        bounds = [keys * (r * (r + 1) // 2) // parts for r in range(world.size)]
        layouts["uneven"] = Contiguous((0, *bounds))
    decoders: dict[str, Callable[..., tuple[Tensor, Tensor]]] = {
        "ring_decode": ring_decode,
        "ring_pass_q_decode": ring_pass_q_decode,
    }
    for strategy in strategies():
        decoders[f"tree_decode, {strategy}"] = partial(tree_decode, strategy=strategy)
    for layout_name, layout in layouts.items():
        slots = layout.local_slots(world.rank, 0, keys)
        for name, decoder in decoders.items():
            result = decoder(q, k[:, :, slots], v[:, :, slots])
            check = judged(f"{name}: {layout_name} shards", (q, k, v, None), result)
            if world.size == 1:
                yield check
            elif same_on_all_ranks(*result):
                yield Check(check.name, check.passed, check.detail + ", same bits on all ranks")
            else:
                yield Check(check.name, False, "the ranks hold different bits")


def same_on_all_ranks(*tensors: Tensor) -> bool:
    notes = get_communicator().agree((), op="verify", note={"digest": digest(tensors)})
    return len({note["digest"] for note in notes}) == 1


def check_huggingface(path: Path | None) -> Iterator[Check]:
    """Checks that greedy tokens equal those of plain HuggingFace, which every rank computes too.

    It takes a random model, and then the checkpoint in `path`, if there is one.
    """
    name = "random Llama, padded batch"
    if importlib.util.find_spec("transformers") is None:
        missing = f"transformers is not installed: {INSTALL_TRANSFORMERS}"
        yield Check(f"HuggingFace tokens: {name}", None, missing)
        return
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.2,  # scores and logits far from ties
        eos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(3, 256, (3, 200), generator=generator)
    mask = torch.ones_like(ids)
    mask[1, :50] = mask[2, :199] = 0  # left padding
    yield from until_error(f"HuggingFace tokens: {name}", check_tokens(name, model, ids, mask))
    if path is not None:
        # Tokens are compared in float32, since in bfloat16 HuggingFace's own attentions differ.
        tokenizer, model = load_tokenizer(path), load(path, dtype=torch.float32)
        make_greedy(model, path)
        text = "The quick brown fox jumps over the lazy dog. " * 40
        ids = tokenizer(text, return_tensors="pt")["input_ids"]
        made = check_tokens(path.name, model, ids, torch.ones_like(ids))
        yield from until_error(f"HuggingFace tokens: {path.name}", made)


def check_tokens(name: str, model: Any, ids: Tensor, mask: Tensor) -> Iterator[Check]:
    """Checks 24 tokens of a model with replicated weights and with split ones."""
    from .. import hf
    from ..weights.plan import CannotSplitError

    def generate(model: Any) -> list[list[int]]:
        output = model.generate(
            input_ids=ids, attention_mask=mask, max_new_tokens=24, do_sample=False
        )
        return output[:, ids.shape[1] :].tolist()

    def check(form: str, got: list[list[int]]) -> Check:
        right = expected == got
        detail = f"{sum(map(len, got))} tokens equal" if right else f"{got}, expected {expected}"
        return Check(f"HuggingFace tokens: {name}{form}", right, detail)

    model.set_attn_implementation("sdpa")
    expected = generate(model)
    yield check("", generate(hf.enable(model)))
    world_size = dist.get_world_size() if dist.is_initialized() else 1
    sizes = [n for n in (1, 2) if world_size % n == 0 and model.config.num_key_value_heads % n == 0]
    for size in sizes if world_size > 1 else ():
        try:
            split = hf.parallelize(copy.deepcopy(model), tensor_parallel_size=size)
        except CannotSplitError:
            return
        form = f", weights split, tensor_parallel_size {size}"
        yield check(form, generate(hf.enable(split)))
