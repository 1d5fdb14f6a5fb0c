# SPDX-License-Identifier: BSD-3-Clause
"""shares="auto": what ranks measure, and what they take and say by it."""

from __future__ import annotations

import logging
import os
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from distributed import on_ranks, run_ranks

pytest.importorskip("transformers")

from hf_models import make_model, make_prompts
from tree_attention import BlockCyclic, ExchangeError, hf
from tree_attention._environment import VariableError
from tree_attention.exchange import get_communicator
from tree_attention.hf import auto_shares
from tree_attention.planning import measuring
from tree_attention.planning.machines import Link
from tree_attention.planning.models import Attention
from unequal_hosts import costs_of, hosts

GREEDY = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False}
CPU = torch.device("cpu")
LINK = Link(1e12, 1e-9, "free")


def measured(*gigabytes: float, memory: float = 64e9, link: Link = LINK):
    found = tuple(map(measuring.as_machine, hosts(*gigabytes, memory=memory))), link
    return mock.patch.object(auto_shares, "known_machines", lambda *_: found)


class Said(logging.Handler):
    """The lines of the library's logger."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[tuple[str, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append((record.levelname, record.getMessage()))

    def __enter__(self) -> Said:
        logger = logging.getLogger("tree_attention")
        logger.addHandler(self)
        logger.setLevel(logging.INFO)
        return self

    def __exit__(self, *_: object) -> None:
        logging.getLogger("tree_attention").removeHandler(self)


def load_by_speed(rank: int, world_size: int, path: Path, tokens: torch.Tensor) -> list[object]:
    found: list[object] = []
    for rates in ((60, 20, 20), (20, 60, 60), (60, 60, 60), (60, 59, 58)):
        for load in (
            partial(hf.from_pretrained, path),
            lambda **given: hf.enable(hf.parallelize(make_model("llama"), **given)),
        ):
            with measured(*rates):
                model = load(shares="auto")
            shares = hf.mesh(model).shares
            assert (shares.weights is None) == (shares.cache is None) and shares.prompt is None
            assert torch.equal(model.generate(**make_prompts(), **GREEDY), tokens)
            found.append(shares)
    with measured(60, 20, 20), Said() as said:
        # A short cache, so that a token is the time to read the weights.
        model = hf.enable(make_model("llama"), shares="auto", prefill="split", max_length=90)
    assert torch.equal(model.generate(**make_prompts(), **GREEDY), tokens)
    assert len(said.lines) == (2 if rank == 0 else 0), said.lines
    if rank == 0:
        (level, line), (warning, sentence) = said.lines
        assert level == "INFO" and warning == "WARNING"
        start = "enable: hosts read, in GB/s: rank 0 (h60) 60, rank 1 (h20) 20, rank 2 (h20) 20; eq"
        assert line.startswith(start) and line.endswith(" ms with them"), line
        assert "; equal shares: after 90 tokens the next takes about " in line
        start = "enable: rank 1 (h20), rank 2 (h20) read 20, 20 GB/s and rank 0 60: a token takes"
        assert sentence.startswith(start)
        assert sentence.endswith("split the weights with from_pretrained, or start without them")
    return found


@pytest.mark.deep
def test_ranks_take_shares_by_speed(tmp_path: Path) -> None:
    model = make_model("llama")
    model.save_pretrained(tmp_path)
    tokens = model.generate(**make_prompts(), **GREEDY)
    first, *others = run_ranks(load_by_speed, 3, tmp_path, tokens)
    assert all(other == first for other in others)
    fast, _, slow, _, *equal = (shares.weights for shares in first)
    assert fast[0] > fast[1] == fast[2] > 0 and slow[0] < slow[1] == slow[2]
    assert equal == [None] * 4


@on_ranks(2)
def test_a_slow_rank_is_named_with_both_times(rank: int, world_size: int) -> None:
    link = Link(1e12, 1e-3, "slow")
    with measured(60, 6, link=link), Said() as said:
        hf.parallelize(make_model("llama"), shares="auto")
    warnings = [line for level, line in said.lines if level == "WARNING" and "GB/s" in line]
    assert len(warnings) == (rank == 0)
    for line in warnings:
        assert line.startswith(
            "parallelize: rank 1 (h6) reads 6 GB/s and rank 0 60: a token takes about "
        )
        assert line.endswith("without; start without it, or keep it for 64 GB of memory")


@on_ranks(4)
def test_tensor_groups_share_alike(rank: int, world_size: int) -> None:
    with measured(60, 60, 60, 20):
        model = hf.parallelize(make_model("llama"), shares="auto", tensor_parallel_size=2)
    a, b, c, d = hf.mesh(model).shares.weights
    assert a == b > c == d
    assert hf.mesh(model).shares.cache == (a, c)


@on_ranks(2)
def test_what_is_refused(rank: int, world_size: int) -> None:
    model = make_model("llama")
    with pytest.raises(ValueError, match=r"enable: shares and layout both say .* got 'auto' and"):
        hf.enable(model, shares="auto", layout=BlockCyclic(2))
    with measured(60, 20, memory=1e3):
        says = r"parallelize: shares='auto': the model fits under no shares: rank \d \(h\d0\) needs"
        with pytest.raises(ValueError, match=says + r" [\d,]+ bytes .* its memory are [\d,]+"):
            hf.parallelize(make_model("llama"), shares="auto")
    with pytest.raises(ExchangeError, match=r"shares is \(\(3, 1\), .* on rank 1, auto on rank 0"):
        hf.parallelize(make_model("llama"), shares="auto" if rank == 0 else [3, 1])
    split = hf.parallelize(model)
    with pytest.raises(ValueError, match="enable: shares='auto' is for models with replicated"):
        hf.enable(split, shares="auto")


@pytest.mark.deep
@on_ranks(2)
def test_measured_hosts_are_the_same_on_all_ranks(rank: int, world_size: int) -> None:
    comm = get_communicator()
    latents = Attention(1, 16, 1, 96, 64, latent=(64, 32))
    found, link = measuring.measure_all("measure", comm, CPU, 60.0, latents)
    assert all(x.read > 1e7 and x.flop > 1e7 and x.memory > 1e6 and x.host for x in found)
    assert all(x.weights > 1e7 and 0 <= x.layer < 60 for x in found)
    assert link.bandwidth > 1e5 and 0 <= link.round_seconds < 10
    everywhere: list[object] = [None] * world_size
    dist.all_gather_object(everywhere, (found, link))
    assert everywhere == [(found, link)] * world_size


@pytest.mark.parametrize(
    ("attention", "q", "k", "v", "operations"),
    [
        (measuring.CALIBRATED, (32, 128), (8, 128), (8, 128), 4),
        (Attention(16, 4, 4, 64, 32), (4, 64), (4, 64), (4, 32), 1),
        (Attention(47, 20, 1, 256, 256, latent=(512, 64)), (20, 576), (1, 576), (1, 512), 37.8),
    ],
    ids=["grouped", "values of other width", "latents"],
)
def test_keys_are_read_by_the_heads_of_the_model(attention, q, k, v, operations) -> None:
    numbers = torch.ones(1 << 20, dtype=torch.bfloat16)
    found = measuring._queries_and_keys(attention, numbers)
    assert [(x.shape[1], x.shape[3]) for x in found] == [q, k, v]
    end = max(x.data_ptr() + 2 * x.numel() for x in found[1:]) - numbers.data_ptr()
    assert 0.99 * 2 * numbers.numel() < end <= 2 * numbers.numel()
    [host] = hosts(60)
    with_a_byte = measuring.as_machine(host, attention).operations_with_a_byte
    assert with_a_byte == pytest.approx(operations, rel=1e-2)


@on_ranks(2)
@pytest.mark.parametrize(("size", "heads"), [(1, 8), (2, 4)])
def test_latents_are_read_by_the_heads_of_a_rank(
    rank: int, world_size: int, size: int, heads: int
) -> None:
    """The ranks of a tensor group read all columns of them."""
    config = make_model("deepseek").config
    asked: list[Attention] = []

    def known(op, comm, device, timeout, attention, held):
        asked.append(attention)
        return tuple(map(measuring.as_machine, hosts(60, 20))), LINK

    with mock.patch.object(auto_shares, "known_machines", known):
        auto_shares.measured_group(
            "measure",
            get_communicator(),
            lambda: auto_shares.shape_in(config, torch.bfloat16),
            timeout=60.0,
            device=CPU,
            tensor_parallel_size=size,
        )
    assert [(x.heads, x.kv_heads) for x in asked] == [(heads, 1)]


@on_ranks(2)
def test_a_table_of_calibrate_is_taken(rank: int, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / f"{rank}.json"
    with mock.patch.dict(os.environ, {"TREE_ATTENTION_COSTS": str(path)}):
        costs_of(path, hosts(60, 20), (0, 0), 1e-5, 1e-3)
        comm = get_communicator(dist.new_group())
        found, _ = measuring.known_machines("measure", comm, CPU, 60.0, measuring.CALIBRATED)
        assert found == tuple(map(measuring.as_machine, hosts(60, 20)))
        path.write_text("{}")
        with pytest.raises(VariableError, match="table of exchange costs"):
            measuring.known_machines("measure", comm, CPU, 5.0, measuring.CALIBRATED)


@on_ranks(2)
def test_a_damaged_table_is_refused(rank: int, world_size: int, tmp_path: Path) -> None:
    path = tmp_path / f"{rank}.json"
    path.write_text("{}")
    model = make_model("llama")
    with mock.patch.dict(os.environ, {"TREE_ATTENTION_COSTS": str(path)}):
        for call in (hf.parallelize, hf.enable):
            with pytest.raises(VariableError, match="table of exchange costs"):
                call(model, shares="auto")


@pytest.mark.parametrize(
    ("rates", "nodes"), [((), (0, 0)), ((60, 20), (0, 1)), ((60, 20, 20), (0, 0, 0))]
)
@on_ranks(2)
def test_hosts_that_a_table_has_not_are_measured(
    rank: int, world_size: int, rates: tuple[float, ...], nodes: tuple[int, ...], tmp_path: Path
) -> None:
    path = tmp_path / f"{rank}.json"
    costs_of(path, hosts(*rates), nodes, 1e-5, 1e-3)
    found = hosts(20, 60), LINK
    with (
        mock.patch.dict(os.environ, {"TREE_ATTENTION_COSTS": str(path)}),
        mock.patch.object(measuring, "measure_all", return_value=found) as measure,
    ):
        model = hf.parallelize(make_model("llama"), shares="auto")
    assert measure.call_count == 1
    first, second = hf.mesh(model).shares.weights
    assert first < second


@on_ranks(2)
def test_ranks_that_found_other_speeds(rank: int, world_size: int) -> None:
    """As of tables that are not the same file."""
    model = make_model("llama")
    for call in (hf.parallelize, partial(hf.enable, prefill="split")):
        with (
            measured(60, (6, 20)[rank]),
            pytest.raises(ExchangeError, match=r"shares is \(.*\) on rank 1, \(.*\) on rank 0"),
        ):
            call(model, shares="auto")


@on_ranks(3)
def test_ranks_outside_of_the_group_are_not_asked(rank: int, world_size: int) -> None:
    group = dist.new_group([0, 1])
    if rank < 2:
        with measured(60, 20):
            model = hf.parallelize(make_model("llama"), group=group, shares="auto")
        assert hf.mesh(model).world_size == 2


def test_one_process_measures_nothing() -> None:
    with mock.patch.object(auto_shares, "known_machines", side_effect=AssertionError):
        model = hf.enable(hf.parallelize(make_model("llama"), shares="auto"))
        assert hf.mesh(model).shares == (None, None, None)
        hf.enable(make_model("llama"), shares="auto")
