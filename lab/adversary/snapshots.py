# SPDX-License-Identifier: BSD-3-Clause
"""Saved caches that are damaged, mixed or read beside a save: refused, or loaded as saved."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from random import Random
from typing import Any

import torch
from torch import Tensor

from hf_models import CONFIGS
from tree_attention import Communicator, ExchangeError, ShardLayout, hf

from . import model
from .cases import Case, draw_layout
from .outcome import AMPLE, Outcome, attempt
from .places import Place, place
from .session_models import own_group, shared_folder, split

_HEADS, _HEAD_DIM = 2, 8
_KINDS_OF_ERRORS = (
    ValueError, OSError, FileNotFoundError, IsADirectoryError, NotADirectoryError, ExchangeError,
)  # fmt: skip
_HANGS_AFTER = 15.0  # seconds, for what takes milliseconds


def world_size(case: Case) -> int:
    return 2 if case.kind in KINDS_OF_TWO else case.first.choice([1, 2, 2, 3])


def play(case: Case, rank: int) -> str:
    size = world_size(case)
    kinds = KINDS | KINDS_OF_TWO if size == 2 else KINDS
    with torch.no_grad():
        return case.draw(kinds)(case.rng, place(size, rank))


@contextmanager
def _no_hang() -> Iterator[None]:
    """Python's reads and waits end with an AssertionError after a while."""

    def stop(*_: Any) -> None:
        raise AssertionError(f"it hangs: no answer after {_HANGS_AFTER:g} s")

    previous = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _HANGS_AFTER)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, previous)


def _draw_config(rng: Random) -> Any:
    return CONFIGS[rng.choice(["llama", "mistral_window", "gemma2"])]


def _filled(
    rng: Random, config: Any, group: Any, layout: ShardLayout, length: int, **options: Any
) -> hf.TreeCache:
    """Random keys and values, which every rank is given alike."""
    cache = hf.TreeCache(config, group, layout, **options)
    generator = torch.Generator().manual_seed(rng.getrandbits(31))
    batch = rng.choice([1, 2])
    for layer_idx in range(len(cache)):
        shape = (2, batch, _HEADS, length, _HEAD_DIM)
        cache.update(*torch.randn(shape, generator=generator), layer_idx)
    return cache


def _held(cache: hf.TreeCache) -> list[Any]:
    """What the next token sees, to the bit."""
    contents: list[Any] = [cache.shard.layout]
    for layer in cache.kv_layers:
        contents += [layer.length, layer.first, layer.kv_dtype]
        for name, x in sorted(layer.buffers().items()):
            contents += [name, model.bits(_plain(x[:, :, layer.held()]))]
    return contents


def _plain(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


def _judged(outcome: Outcome, expected: list[Any], path: Path) -> str:
    """The same text on every rank: all are refused, or none."""
    if outcome.error is None:
        assert _held(outcome.value) == expected, "a cache that was never saved was loaded"
        return "loaded"
    outcome.refusal(("load",), _KINDS_OF_ERRORS)
    text = str(outcome.error)
    assert "TreeCache.load: " in text or "rank" in text, f"a raw error: {text}"
    assert str(path) in text or isinstance(outcome.error, ExchangeError), f"of which file? {text}"
    return "refused"


def _flip(path: Path, rng: Random) -> None:
    content = bytearray(path.read_bytes())
    for _ in range(rng.choice([1, 1, 1, 3])):
        content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def _cut(path: Path, rng: Random) -> None:
    content = path.read_bytes()
    path.write_bytes(content[: rng.randrange(len(content))])


def _replace(make: Callable[[Path], object]) -> Callable[[Path, Random], None]:
    def replace(path: Path, rng: Random) -> None:
        path.unlink()
        make(path)

    return replace


def _change_a_value(path: Path, rng: Random) -> None:
    """Of the index: one value of it, wherever it is, becomes another."""
    content = json.loads(path.read_text())
    places: list[tuple[Any, Any]] = []

    def walk(node: Any) -> None:
        for key in node if isinstance(node, dict) else range(len(node)):
            places.append((node, key))
            if isinstance(node[key], dict | list):
                walk(node[key])

    walk(content)
    node, key = rng.choice(places)
    old, others = node[key], [None, "x", [], {}, -1, 10**30, 0.5, True]
    if type(old) is int:
        others += [old + 1, old - 1, old * 2, old ^ 8] * 3
    node[key] = rng.choice([other for other in others if other != old])
    path.write_text(json.dumps(content))


# Of the index or of a rank's file.
_DAMAGES: dict[str, Callable[[Path, Random], None]] = {
    "bits": _flip,
    "cut": _cut,
    "longer": lambda path, rng: path.write_bytes(path.read_bytes() + b" " * rng.choice([1, 999])),  # type: ignore[dict-item]
    "empty": lambda path, rng: path.write_bytes(b""),  # type: ignore[dict-item]
    "missing": _replace(lambda path: None),
    "a FIFO": _replace(os.mkfifo),
    "a directory": _replace(Path.mkdir),
    "a link to nothing": _replace(lambda path: path.symlink_to("nothing")),
    "a link to itself": _replace(lambda path: path.symlink_to(path.name)),
    "a link to /dev/null": _replace(lambda path: path.symlink_to("/dev/null")),
}
_DAMAGES_OF_THE_INDEX: dict[str, Callable[[Path, Random], None]] = {
    "a value": _change_a_value,
    "deep": lambda path, rng: path.write_text("[" * 100_000),  # type: ignore[dict-item]
    "long numbers": lambda path, rng: path.write_text("1" * 5000),  # type: ignore[dict-item]
    "no text": lambda path, rng: path.write_bytes(b"\xff\xfe\x00"),  # type: ignore[dict-item]
}


def damage(rng: Random, here: Place) -> str:
    """One file of a saved cache is not what it was."""
    config, length = _draw_config(rng), rng.choice([1, 7, 60, 200])
    layout = draw_layout(rng, here.world_size, length)
    kv_dtype = rng.choice([None, None, "int8", "fp8"])
    cache = _filled(rng, config, here.comm, layout, length, kv_dtype=kv_dtype)
    to = rng.choice([layout, draw_layout(rng, here.world_size, length)])
    with shared_folder(here.world_size) as folder:
        cache.save(folder / "it")
        expected = _held(hf.TreeCache.load(folder / "it", config, here.comm, to))
        files = sorted((folder / "it").iterdir())
        index = folder / "it" / "index.json"
        kinds = _DAMAGES | (_DAMAGES_OF_THE_INDEX if rng.random() < 0.5 else {})
        names = [*kinds, *["bits"] * 6, *["a value"] * 4]
        name = rng.choice([name for name in names if name in kinds])
        target = index if name in _DAMAGES_OF_THE_INDEX else rng.choice([index, *files])
        here.comm.agree((("target", target.name),))  # before rank 0 changes the listing
        if here.rank == 0:
            kinds[name](target, rng)
        here.comm.agree((("damage", name),))  # which is done
        with _no_hang():
            outcome = attempt(hf.TreeCache.load, folder / "it", config, here.comm, to, timeout=9.0)
        try:
            said = _judged(outcome, expected, folder / "it")
        except AssertionError as error:
            raise AssertionError(f"{target.name}: {name}: {error}") from error
        here.probe()
    return said


def mix(rng: Random, here: Place) -> str:
    """Files of two saves of equal shape, or of two ranks, in each other's places."""
    config, length = _draw_config(rng), rng.choice([24, 60])
    layout = draw_layout(rng, here.world_size, length)
    seeds = [rng.getrandbits(31) for _ in range(2)]
    caches = [_filled(Random(seed), config, here.comm, layout, length) for seed in seeds]
    with shared_folder(here.world_size) as folder:
        for cache, name in zip(caches, ("it", "other"), strict=True):
            cache.save(folder / name)
        expected = _held(caches[0])
        files, others = (sorted((folder / name).glob("*.safetensors")) for name in ("it", "other"))
        victim, source = rng.choice(files), rng.choice([*files, *others])
        if here.rank == 0:
            content = source.read_bytes()
            if source in files:
                source.write_bytes(victim.read_bytes())
            victim.write_bytes(content)
        here.comm.agree((("mixed", True),))
        outcome = attempt(hf.TreeCache.load, folder / "it", config, here.comm, layout)
        said = _judged(outcome, expected, folder / "it")
        here.probe()
    return said


def swap_places(rng: Random, here: Place) -> str:
    """A tensor group's ranks have other heads each: what one saved is not another one's."""
    parted = split("llama", 2, 2)
    group, rank = hf.mesh(parted).context_group, hf.mesh(parted).tensor_rank
    cache = hf.TreeCache(parted.config, group)
    torch.manual_seed(1000 * rank + rng.randrange(1000))
    length = rng.choice([1, 9])
    for layer_idx in range(len(cache)):
        cache.update(*torch.randn(2, 1, _HEADS // 2, length, _HEAD_DIM), layer_idx)
    swapped = rng.random() < 0.7
    with shared_folder(2) as folder:
        cache.save(folder / str(rank))
        here.comm.agree((("saved", True),))
        path = folder / str(1 - rank if swapped else rank)
        outcome = attempt(hf.TreeCache.load, path, parted.config, group)
        said = _judged(outcome, _held(cache), path)
    assert said == ("refused" if swapped else "loaded"), f"swapped={swapped}: {said}"
    return said


def beside(rng: Random, here: Place) -> str:
    """One process saves again and again what another one loads: a load has one save or none."""
    config, lengths = _draw_config(rng), (rng.choice([3, 60]), rng.choice([9, 200]))
    layout = draw_layout(rng, 1, max(lengths))
    seeds = [rng.getrandbits(31) for _ in lengths]
    caches = [
        _filled(Random(seed), config, Communicator(own_group(), AMPLE), layout, length)
        for seed, length in zip(seeds, lengths, strict=True)
    ]
    counts = {"loaded": 0, "refused": 0}
    with shared_folder(2) as folder:
        path, done = folder / "it", folder / "done"
        if here.rank == 0:
            caches[0].save(path)
        here.comm.agree((("saved once", True),))
        if here.rank == 0:
            for number in range(30):
                caches[(number + 1) % 2].save(path)
            done.touch()
        else:
            expected = [_held(cache) for cache in caches]
            while not done.exists():
                outcome = attempt(hf.TreeCache.load, path, config, own_group(), layout)
                is_first = outcome.error is None and len(outcome.value) and (
                    int(outcome.value.get_seq_length()) == lengths[0]
                )  # fmt: skip
                counts[_judged(outcome, expected[0 if is_first else 1], path)] += 1
        here.comm.agree((("done", True),))
    return "one or the other"


KINDS: dict[str, tuple[float, Callable[[Random, Place], str]]] = {
    "damage": (8, damage),
    "mix": (1, mix),
}
KINDS_OF_TWO: dict[str, tuple[float, Callable[[Random, Place], str]]] = {
    "swap_places": (1, swap_places),
    "beside": (0.4, beside),
}
