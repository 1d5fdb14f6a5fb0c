# SPDX-License-Identifier: BSD-3-Clause
"""The host attends to far keys while the device attends to near ones, by a modelled time.

The mistakes these tests are for: the device that begins when the host has ended, the host that
waits for the device, and a step that waits until keys have left the device.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from fake_device import fake_cuda
from modelled_time import Timeline

pytest.importorskip("transformers")

from hf_models import make_model
from tree_attention import hf
from tree_attention.hf import CACHE_NAME, parts
from tree_attention.hf.cache import far

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is imitated")

NEAR, PAGE = 100, 64


def filled(model: Any) -> hf.TreeCache:
    """A cache with some 300 near tokens and 6,000 far ones."""
    cache = hf.TreeCache(model.config, growth=PAGE, far="cpu", near_tokens=NEAR)
    for count in (2048, 2048, *[PAGE] * 40):  # until the last large chunk has left
        x = torch.randn(1, 2, count, 8).to("cuda")
        for number in range(len(cache.layers)):
            cache.update(x, x, number)
    layer = cache.kv_layers[0]
    assert isinstance(layer, far.FarLayer) and layer.dropped > 4000
    assert layer.length - layer.dropped < NEAR + 4 * PAGE
    return cache


class Steps:
    """Decoding steps, and what they took."""

    def __init__(self, timeline: Timeline) -> None:
        self.timeline, self.token = timeline, torch.tensor([[7]], device="cuda")
        self.model: Any = make_model("llama", "tree_attention").to("cuda")
        self.cache = filled(self.model)

    def take(self) -> tuple[float, float, float]:
        """Seconds of the device's attention, of what the host does, and of both together."""
        timeline = self.timeline
        begin, before = timeline.elapsed, dict(timeline.busy)
        timeline.host = begin
        self.model(self.token, **{CACHE_NAME: self.cache})
        near, host, bus = (timeline.busy[x] - before[x] for x in ("device", "host", "bus"))
        return near, host + bus, timeline.elapsed - begin


def finished_first(begin: Callable[..., Callable[[], Any]]) -> Callable[..., Callable[[], Any]]:
    """The host ends before the device begins."""

    def wrong(*args: Any) -> Callable[[], Any]:
        state = begin(*args)()
        return lambda: state

    return wrong


# Bytes per second of the device and of the host. A far part has some 20 times as many bytes.
@pytest.mark.parametrize("device_rate, host_rate", [(1e7, 5e8), (1e7, 2.5e8), (1e8, 2.5e8)])
def test_the_shorter_part_takes_no_time(device_rate: float, host_rate: float) -> None:
    with fake_cuda(), Timeline(device_rate, host_rate, bus=1e9) as timeline:
        steps = Steps(timeline)
        for _ in range(3):
            near, far_away, took = steps.take()
            assert near > 0 and far_away > 0
            assert near + far_away - took >= 0.9 * min(near, far_away)
        wrong = finished_first(parts._begin_on_host)
        with mock.patch.object(parts, "_begin_on_host", wrong):
            near, far_away, took = steps.take()
        assert near + far_away - took < 0.1 * min(near, far_away)


def test_the_host_does_not_wait_for_the_device() -> None:
    """As it would for a copy of the state out of memory that is not page-locked."""
    empty = torch.empty

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> Tensor:
        return empty(*args, **kwargs)

    with fake_cuda(), Timeline(1e6, 1e12, bus=1e9) as timeline:
        steps = Steps(timeline)
        near, _, _ = steps.take()
        assert timeline.host < timeline.elapsed - near / 3  # of two layers the last one
        with mock.patch.object(parts.torch, "empty", pageable):
            steps.take()
        assert timeline.host == pytest.approx(timeline.elapsed)


WRONG: dict[str, Any] = {
    "nothing": lambda timeline: mock.patch.object(far, "_MORE_PAGES", far._MORE_PAGES),
    "one stream": lambda timeline: mock.patch.object(far, "_stream", lambda _: timeline.usual),
    "a wait": lambda timeline: mock.patch.object(far.FarLayer, "grow", grow_and_wait),
}
grow = far.FarLayer.grow


def grow_and_wait(layer: far.FarLayer, num_slots: int) -> None:
    grow(layer, num_slots)
    layer.host.wait()


@pytest.mark.deep
@pytest.mark.parametrize("wrong", WRONG)
def test_no_step_waits_for_a_copy_of_keys(wrong: str) -> None:
    """The copy of a page takes as long as several steps, and its step no longer than others."""
    num_moves, seconds = 0, list[float]()
    num_expected = 2 if wrong == "nothing" else 1  # pages that move
    with fake_cuda(), Timeline(1e8, 2.5e8, bus=1e9) as timeline:
        steps = Steps(timeline)
        timeline.rates["bus"] = 4e5
        layer = steps.cache.kv_layers[0]
        assert isinstance(layer, far.FarLayer)
        with WRONG[wrong](timeline):
            for _ in range(num_expected * (PAGE + 1)):
                count = layer.host.count
                *_, took = steps.take()
                seconds.append(took)
                if layer.host.count > count:
                    num_moves += 1
                    assert wrong != "nothing" or timeline.side.end > timeline.elapsed + 3 * took
    assert num_moves == num_expected
    assert (max(seconds) <= 1.2 * median(seconds)) == (wrong == "nothing")
