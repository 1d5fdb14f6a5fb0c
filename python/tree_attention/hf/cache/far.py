# SPDX-License-Identifier: BSD-3-Clause
"""The keys and values of one layer that lie partly on a GPU and partly in the host's memory.

The newest slots are near: in buffers on the device, as in any layer. Older ones are far: whole
pages of them move to page-locked memory of the host, once, and stay there. A state over the far
keys and one over the near keys are states of the same queries, so that a decoding step sends its
queries to the host and gets a state back, whatever the number of keys (`..parts`).

A page that moves is copied while the device goes on, and is near until the next time that buffers
are replaced. Nothing that a step needs is on its way then.
"""

import functools
from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ..._memory import is_out_of_memory
from .growing import TreeCacheLayer
from .memory import Need
from .operands import check_taken
from .shard import Shard

# Pages of each sequence for which memory is taken at a time beyond a prompt of known length.
_MORE_PAGES = 16
# Pages of each sequence that the device puts in order at a time before they are copied.
_PAGES_AT_A_TIME = 16


@dataclass
class Run:
    """Pages of the host in one allocation."""

    buffers: dict[str, Tensor]  # [pages, num_heads_kv, page_size, ...]
    table: Tensor  # int32 [batch, pages of a sequence], in the order of slots
    used: int = 0  # pages that were written, which nobody writes again

    @property
    def num_pages(self) -> int:
        """The number of pages of each sequence."""
        return self.table.shape[1]

    @property
    def room(self) -> int:
        return len(self.buffers["keys"]) - self.used


class HostPages:
    """This rank's first slots of one layer in pages of the host.

    Pages belong to no sequence but by the tables: to choose or repeat sequences, and to copy the
    cache, moves no keys.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size  # in local slots
        self.runs: list[Run] = []
        self._arrives: Any = None  # the event after which all pages are written; None: they are

    def __deepcopy__(self, memo: dict[int, Any]) -> "HostPages":
        self.wait()
        new = HostPages(self.page_size)
        # Only the original writes to the rest of a run.
        new.runs = [replace(run, used=len(run.buffers["keys"])) for run in self.runs]
        return new

    @property
    def num_pages(self) -> int:
        """The number of pages of each sequence."""
        return sum(run.num_pages for run in self.runs)

    @property
    def count(self) -> int:
        """The number of slots of each sequence that are here, or on their way."""
        return self.num_pages * self.page_size

    @property
    def num_bytes(self) -> int:
        return sum(x.nbytes for run in self.runs for x in run.buffers.values())

    def wait(self) -> None:
        """Returns when all pages are written."""
        if self._arrives is not None:
            self._arrives.synchronize()
            self._arrives = None

    def take(self, rows: Mapping[str, Tensor], expected: int, world_size: int) -> None:
        """Begins to copy the next slots, whole pages, of `[batch, num_heads_kv, slots, ...]` on the
        device, which must stay there until `wait`; `expected` slots will come in all."""
        batch, _, slots, _ = rows["keys"].shape
        device, size = rows["keys"].device, self.page_size
        stream, missing = _stream(device), slots // size
        stream.wait_stream(torch.cuda.current_stream(device))
        # Tensors made in inference mode cannot be written to outside of it.
        with torch.inference_mode(False), torch.no_grad(), torch.cuda.stream(stream):
            try:
                while missing > 0:
                    if not self.runs or self.runs[-1].room < batch:
                        more = max(missing, expected // size - self.num_pages)
                        self.runs.append(self._new_run(rows, more, world_size))
                    run, begin = self.runs[-1], slots - missing * size
                    number = min(missing, run.room // batch, _PAGES_AT_A_TIME)
                    pages = torch.arange(run.used, run.used + number * batch, dtype=torch.int32)
                    for name, x in rows.items():
                        moved = x[:, :, begin : begin + number * size].unflatten(2, (number, size))
                        # A copy between memory that is not contiguous goes through memory that is
                        # not page-locked, and the host waits for it.
                        moved = moved.movedim(2, 0).flatten(0, 1).contiguous()
                        target = run.buffers[name][run.used : run.used + len(moved)]
                        target.copy_(moved, non_blocking=True)
                    # Before the table: an interrupt leaves pages unused, and none is written twice.
                    run.used += number * batch
                    run.table = torch.cat((run.table, pages.view(number, batch).T), 1)
                    missing -= number
            finally:  # pages that were begun before an error count, too
                self._arrives = stream.record_event()

    def _new_run(self, rows: Mapping[str, Tensor], num_pages: int, world_size: int) -> Run:
        """Room for about so many pages of each sequence, or torch.OutOfMemoryError."""
        wanted = max(num_pages, min(self.num_pages, _MORE_PAGES))
        # torch takes page-locked memory in powers of two.
        wanted = 1 << (wanted.bit_length() - 1)
        batch = len(rows["keys"])
        need = host_need(rows, wanted * self.page_size, world_size)
        _check_room(need)

        def pages(x: Tensor) -> Tensor:
            shape = wanted * batch, x.shape[1], self.page_size, *x.shape[3:]
            return torch.empty(shape, dtype=x.dtype, pin_memory=True)

        try:
            buffers = {name: pages(x) for name, x in rows.items()}
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise need.error() from None
            raise
        return Run(buffers, torch.empty((batch, 0), dtype=torch.int32))

    def until(self, end: int) -> Iterator[tuple[int, Run]]:
        """The runs with the pages before the slot `end`, where a page begins, and the first slot of
        each."""
        first = 0
        for run in self.runs:
            number = (end - first) // self.page_size
            if number <= 0:
                return
            yield first, replace(run, table=run.table[:, :number])
            first += run.num_pages * self.page_size

    def last_page(self, end: int, device: torch.device) -> dict[str, Tensor]:
        """On the device the page before the slot `end`: `[batch, num_heads_kv, page_size, ...]`."""
        *_, (_, run) = self.until(end)
        rows = run.table[:, -1]
        return {name: x[rows].to(device) for name, x in run.buffers.items()}

    def cut(self, end: int) -> None:
        """Forgets the slots from `end` on, where a page begins."""
        # Their pages are not written again: a copy of the cache may read them.
        self.runs = [run for _, run in self.until(end)]

    def select(self, rows: Tensor) -> None:
        """Put the sequences `rows` in place of all; on the host."""
        for run in self.runs:
            run.table = run.table[rows]


class FarLayer(TreeCacheLayer):
    """The keys and values of one layer on a GPU, whose older slots this rank keeps on the host.

    The host has the local slots up to `dropped`, with which the buffers on the device begin. A rank
    without a GPU among others with one keeps all slots as other layers do.
    """

    def __init__(
        self, shard: Shard, growth: int, kv_dtype: torch.dtype | None, *, near_tokens: int
    ) -> None:
        super().__init__(shard, growth, kv_dtype)
        self.near_tokens = near_tokens  # on all ranks together
        block = 1
        with suppress(ValueError):  # a layout without blocks
            _, block, _ = shard.layout.key_layout(shard.rank)
        # A page begins where a block does, as the arithmetic of the layout needs it.
        self.host = HostPages(-(-growth // block) * block)

    def _prepare(self, key_states: Tensor, value_states: Tensor) -> None:
        if torch.compiler.is_compiling():
            raise ValueError(
                "TreeCache: far='cpu' is not supported in a compiled forward pass, as the host "
                "computes a part of attention; call the model without torch.compile"
            )
        if self.shard.world_size == 1:
            check_device("TreeCache", key_states.device)
        super()._prepare(key_states, value_states)
        # Checked for each text, because a cache is used again after an error or a reset.
        if self.length == 0 and self.is_on_gpu:
            self._check_host(key_states.dtype)

    def _check_host(self, dtype: torch.dtype) -> None:
        """Raises an error where the host cannot attend to such keys, or has no room for them."""
        on_host = {
            n: torch.empty_like(x[:, :, :0], device="cpu") for n, x in self.buffers().items()
        }
        check_taken("TreeCache: far='cpu' keeps keys that", dtype, *self.operands(on_host))
        if (expected := self._expected()) > 0:
            need = host_need(self.buffers(), expected, self.shard.world_size, self.allocates_for)
            _check_room(need)

    def _expected(self) -> int:
        """The local slots that will be far at the length for which room was reserved."""
        return max(0, self.reserved - self.shard.most(self.near_tokens))

    @property
    def is_on_gpu(self) -> bool:
        """False on a rank without one, whose keys are all in the host's memory."""
        return self.device.type != "cpu"

    def capacity(self, num_slots: int) -> int:
        if not self.is_on_gpu:
            return super().capacity(num_slots)
        # The nearest tokens, pages on their way, and what comes until they have arrived.
        most = self.shard.most(self.near_tokens) + 2 * self.host.page_size
        return max(num_slots + self.growth, min(self.reserved, most))

    def grow(self, num_slots: int) -> None:
        """Makes room for the first `num_slots` local slots by what is on the host already, and
        begins to move what is no longer near."""
        if not self.is_on_gpu:
            super().grow(num_slots)
            return
        self.host.wait()
        dropped, length = self.host.count, self.length
        used = slice(dropped - self.dropped, self.shard.count(length) - self.dropped)
        self._reallocate(used, self.capacity(num_slots - dropped), dropped)
        far = self.shard.count(max(0, length - self.near_tokens))
        count = (far - dropped) // self.host.page_size * self.host.page_size
        if count > 0:
            rows = {name: x[:, :, :count] for name, x in self.buffers().items()}
            self.host.take(rows, self._expected(), self.shard.world_size)

    def cut(self, length: int) -> None:
        # First, so that nobody counts on what is gone if the rest is interrupted.
        super().cut(length)
        kept, size = self.shard.count(length), self.host.page_size
        if kept < self.host.count:
            self.host.wait()
            begin = kept // size * size
            if begin < self.dropped:
                self._take_back(begin)
            self.host.cut(begin)

    def _take_back(self, begin: int) -> None:
        """Replaces the buffers on the device by ones that begin with a page of the host."""
        page = self.host.last_page(begin + self.host.page_size, self.device)

        def with_room(x: Tensor) -> Tensor:
            new = x.new_empty((*x.shape[:2], self.capacity(self.host.page_size), *x.shape[3:]))
            new[:, :, : x.shape[2]] = x
            return new

        with torch.inference_mode(False), torch.no_grad():
            self.hold({name: with_room(x) for name, x in page.items()}, begin)

    def reset(self) -> None:
        self.host.wait()
        self.host = HostPages(self.host.page_size)
        super().reset()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        self.host.wait()  # for copies of the buffers that are replaced
        super().reorder_cache(beam_idx)
        self.host.select(beam_idx.cpu())

    batch_select_indices = reorder_cache

    @property
    def num_bytes(self) -> int:
        return super().num_bytes + self.host.num_bytes

    def _show(self, name: str) -> None:
        if not self.is_initialized:
            return None
        raise RuntimeError(
            f"TreeCache: the {name} of a layer with far='cpu' are partly on the device and partly "
            f"on the host, and no tensor has them all; layer.buffers()[{name!r}] has those from "
            "this rank's slot layer.dropped on"
        )


def check_device(op: str, device: torch.device) -> None:
    """Raises ValueError unless keys that are computed on `device` may move to the host."""
    if device.type != "cuda":
        raise ValueError(
            f"{op}: far='cpu' keeps older keys of a model on a GPU in the host's memory, and this "
            f"one computes keys on {device}; move it with model.to('cuda'), or leave far out"
        )


def host_need(rows: Mapping[str, Tensor], slots: int, world_size: int, num_layers: int = 1) -> Need:
    """The memory of the host for slots of such rows."""
    like = {name: torch.empty_like(x[:0], device="cpu") for name, x in rows.items()}
    return Need(like, len(rows["keys"]), slots, num_layers, None, world_size)


def _check_room(need: Need) -> None:
    try:
        need.check()
    except torch.OutOfMemoryError:
        torch._C._host_emptyCache()  # of page-locked memory that earlier caches gave back
        need.check()


@functools.cache
def _stream(device: torch.device) -> Any:
    """The stream on which keys leave a device while it computes."""
    return torch.cuda.Stream(device)
