# SPDX-License-Identifier: BSD-3-Clause
"""A cache that finds no memory says how much it needs, what is free, and what to do.

The mistakes these tests are for: an allocator's error of so many bytes, some layers that have their
buffers when another finds that there is no room, a process that the system ends.
"""

from __future__ import annotations

import gc
import itertools
import os
import re
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch.profiler import ProfilerActivity, profile, record_function

from distributed import AMPLE_SECONDS, run_ranks

pytest.importorskip("transformers")

from hf_caches import append, check_holds
from hf_models import CONFIGS
from tree_attention import BlockCyclic, ContiguousThenCyclic, ExchangeError, _memory, hf
from tree_attention.hf.cache import growing, memory
from tree_attention.hf.cache.shard import Shard

# Under a limit on what the process may map, which this test must not have itself.
PROGRAM = """
import os
import resource

import torch

from hf_caches import append
from hf_models import CONFIGS, make_model, make_prompts
from tree_attention import hf
from tree_attention.hf.cache import memory

config = CONFIGS["llama"]
append(hf.TreeCache(config), 1)  # which starts threads
model = make_model("llama")
with open("/proc/self/statm") as file:
    used = int(file.read().split()[0]) * os.sysconf("SC_PAGE_SIZE")
most = used + (512 << 20)
resource.setrlimit(resource.RLIMIT_AS, (most, most))


def refused(call):
    try:
        call()
    except torch.OutOfMemoryError as error:
        print(error)
    else:
        raise AssertionError("it found memory")


fixed = hf.TreeCache(config, max_length=4_000_000)
refused(lambda: append(fixed, 1))
assert not any(layer.is_initialized for layer in fixed.kv_layers)
growing = hf.TreeCache(config, growth=100_000)
refused(lambda: [append(growing, 100_000) for _ in range(40)])
held = min(layer.length for layer in growing.kv_layers)
growing.crop(held if hf.cache.growing.CROP_KEEPS else 0)
assert growing.get_seq_length() == held >= 300_000
del growing
hf.enable(model, max_length=40_000_000)
refused(lambda: model.generate(**make_prompts(), max_new_tokens=2))
memory.free_bytes = lambda device: None  # then the allocator is the one that says it
refused(lambda: append(hf.TreeCache(config, max_length=4_000_000, kv_dtype="int8"), 1))
"""
HEAD = r"TreeCache: {} tokens{} on this rank need "
WAYS = (
    r"take {}, kv_dtype='int8' \(\d+ bytes each\), or more ranks than 1, each of which holds its sh"
)


@pytest.mark.deep
def test_a_limit_of_memory() -> None:
    found = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=AMPLE_SECONDS,
    )
    assert found.returncode == 0, found.stderr
    fixed, growing, generated, unknown = found.stdout.splitlines()
    layers = CONFIGS["llama"].num_hidden_layers
    each = rf"\({layers * 128} bytes each in {layers} layers, 2 sequences\), and \S+ MiB are free; "
    head = HEAD.format("4,000,000", " of max_length 4,000,000")
    for line, says in (
        (fixed, head + rf"\S+ GiB of cpu {each}" + WAYS.format("a smaller max_length")),
        (
            growing,
            HEAD.format(r"\S+00,000", "") + r"\S+ MiB of cpu \(128 bytes each in 1 layer, 2 ",
        ),
        (growing, r"MiB are free; " + WAYS.format("fewer tokens")),
        (generated, HEAD.format("40,000,000", " of max_length 40,000,000")),
        (
            unknown,
            head + r".*sequences\); take a smaller max_length, fewer sequences, or more ranks",
        ),
    ):
        assert re.search(says, line), (says, line)


def test_memory_limits_of_a_container_count(tmp_path: Path) -> None:
    """With those of the groups around it, and without pages of files that may be given up."""
    for name, most, used in (("", None, 0), ("pod", "9000", 7000), ("pod/own", "max", 0)):
        group = tmp_path / name
        group.mkdir(exist_ok=True)
        if most is not None:
            (group / "memory.max").write_text(f"{most}\n")
            (group / "memory.current").write_text(f"{used}\n")
            (group / "memory.stat").write_text("anon 5000\ninactive_file 1500\nactive_file 300\n")
    assert _memory._left_in_groups("4:memory:/x\n0::/pod/own\n", tmp_path) == [3800]
    (tmp_path / "pod/own/memory.max").write_text("100\n")
    (tmp_path / "pod/own/memory.current").write_text("7000\n")
    assert _memory._left_in_groups("0::/pod/own\n", tmp_path) == [0, 3800]
    (tmp_path / "pod/memory.swap.max").write_text("700\n")
    (tmp_path / "pod/memory.swap.current").write_text("200\n")
    assert _memory._left_in_groups("0::/pod/own\n", tmp_path, 2000) == [2000, 4300]


def test_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    free = memory.free_bytes(torch.device("cpu"))
    assert free is not None and free > 1 << 20
    assert memory.free_bytes(torch.device("meta")) is None
    monkeypatch.setattr(memory, "free_bytes", lambda device: (1 << 30) - 1)
    size = (1 << 30) // (2 * 128 * CONFIGS["llama"].num_hidden_layers)
    append(hf.TreeCache(CONFIGS["llama"], max_length=size - 64), 1)
    with pytest.raises(torch.OutOfMemoryError, match=r"need 1.0 GiB of cpu .* 1.0 GiB are free"):
        append(hf.TreeCache(CONFIGS["llama"], max_length=size), 1)


def test_a_load_looks_for_all_layers_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that the first layer alone would fit."""
    config = CONFIGS["llama"]
    cache = hf.TreeCache(config)
    append(cache, 1500)
    cache.save(tmp_path)
    monkeypatch.setattr(memory, "_LEAST_COMPARED", 1)
    monkeypatch.setattr(memory, "free_bytes", lambda device: cache.num_bytes - 1)
    each = f"{cache.num_bytes // (2 * 2048)} bytes each in {config.num_hidden_layers} layers"
    with pytest.raises(torch.OutOfMemoryError, match=rf"2,048 tokens on this rank need .*{each}"):
        hf.TreeCache.load(tmp_path, config)
    monkeypatch.setattr(memory, "free_bytes", lambda device: cache.num_bytes)
    assert hf.TreeCache.load(tmp_path, config).num_bytes == cache.num_bytes


def _reshard(rank: int, world_size: int, growth: int) -> tuple[int, int]:
    """All tokens from rank 0 to all ranks: the bytes that this is counted as, and the peak of what
    is allocated then."""
    config, length = CONFIGS["llama"], 3000
    first, even = ContiguousThenCyclic((0,) + (length,) * world_size, 4), BlockCyclic(world_size, 4)
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        cache = hf.TreeCache(config, layout=first, growth=growth)
        append(cache, length)
        new = cache.shard.with_layout(even)
        counted = growing._bytes_to_move(cache.kv_layers, new, length)
        with (
            mock.patch.object(memory, "_LEAST_COMPARED", 1),
            mock.patch.object(memory, "free_bytes", lambda device: counted - (rank == 1)),
            mock.patch.object(Shard, "exchange", side_effect=AssertionError("it was sent")),
            pytest.raises(ExchangeError if rank != 1 else torch.OutOfMemoryError) as caught,
        ):
            cache.reshard(even)
        check_holds(cache, length, first)
        gc.collect()  # what the refused move has left would else be freed within the other
        with record_function("moved"):
            cache.reshard(even)
    check_holds(cache, length, even)
    each = sum(layer.need(1, 1, 1).num_bytes for layer in cache.kv_layers)
    says = (
        rf"TreeCache.reshard: BlockCyclic\(world_size={world_size}, block=4\) gives this rank 1,500"
        r" of 3,000 tokens, for which it needs \S+ [KM]iB of cpu beyond what it holds "
        rf"\({each} bytes each in 2 layers, one of which is copied at a time, 2 sequences\), and "
        r"\S+ [KM]iB are free; take a layout that gives it fewer"
    )
    assert re.search(says, str(caught.value)), str(caught.value)
    events = found.profiler.kineto_results.events()
    begin = next(event.start_ns() for event in events if event.name() == "moved")
    changes = [(x.start_ns(), x.nbytes()) for x in events if x.name() == "[memory]"]
    held = sum(change for at, change in changes if at < begin)
    later = (change for at, change in sorted(changes) if at >= begin)
    return counted, max(itertools.accumulate(later, initial=held)) - held


@pytest.mark.parametrize("growth", [64, 4])  # 1,500 slots are no multiple of 64
def test_tokens_that_move_find_room_before_any_is_sent(growth: int) -> None:
    for counted, allocated in run_ranks(_reshard, 2, growth):
        assert 0.8 * allocated < counted <= allocated, (counted, allocated)


def test_a_cache_prints_what_it_holds() -> None:
    config = CONFIGS["llama"]
    layers = f"{config.num_hidden_layers} layers"
    cache = hf.TreeCache(config)
    assert repr(cache) == f"TreeCache(0 tokens, {layers}, rank 0 of 1, 0.0 KiB on this rank)"
    append(cache, 1500)
    size = cache.num_bytes / 2**20
    assert repr(cache) == (
        f"TreeCache(1,500 tokens in 2 sequences, {layers}, float32, rank 0 of 1, {size:.1f} MiB "
        "on this rank)"
    )
    fixed = hf.TreeCache(config, max_length=2000, kv_dtype="int8")
    assert "TreeCache(0 tokens of max_length 2,000, " in str(fixed) and ", int8," in str(fixed)
