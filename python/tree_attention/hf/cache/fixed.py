# SPDX-License-Identifier: BSD-3-Clause
"""The layers of a cache of fixed size: in a decoding step, the host neither waits nor chooses."""

from collections.abc import Mapping

import torch
from torch import Tensor

from .growing import TreeCacheLayer, interrupted
from .latent import LatentLayer
from .shard import Shard
from .token_split import TokenSplit


class Progress:
    """The number of slots in use, in tensors on the device; one object for all layers.

    The first layer finds the slots of the new tokens, and the last one counts the tokens: what a
    forward pass that was interrupted has written is not in use.
    """

    def __init__(self, max_length: int) -> None:
        self.max_length, self.num_layers = max_length, 0
        # int64 [], of the sequence, on all ranks together; None before there are buffers.
        self.length: Tensor | None = None
        # int64 [tokens], the local slots of the new tokens, as `Shard.slots` gives them, and the
        # number of these tokens; None and 0 between forward passes.
        self.slots: Tensor | None = None
        self.num_tokens = 0

    def place(self, device: torch.device) -> None:
        """Moves the length to `device`."""
        if self.length is None or self.length.device != device:
            self.length = _static(torch.tensor(self.read(), dtype=torch.int64, device=device))

    def read(self) -> int:
        """The length as a number, for which the host waits."""
        length = 0 if self.length is None else int(self.length)
        self.check(length)
        return length

    def write(self, length: int) -> None:
        """Sets the length, and forgets a forward pass that was interrupted."""
        self.check(length)
        self.slots, self.num_tokens = None, 0
        if self.length is not None:
            self.length.fill_(length)

    def check(self, length: int) -> None:
        if length > self.max_length:
            raise ValueError(
                f"TreeCache: the cache has max_length {self.max_length}, and cannot hold "
                f"{length} tokens; make it larger"
            )

    def begin(self, shard: Shard, num_tokens: int, split: TokenSplit | None) -> None:
        """Finds the slots of new tokens; ValueError if there are too many."""
        # The host asks for their number only where it need not wait, or has a prompt. Otherwise a
        # token beyond `max_length` gets the slot -2, on every rank: `append_kv`
        # refuses it on the CPU and drops it on CUDA, where `read` says so later.
        assert self.length is not None
        device = self.length.device
        if self.slots is not None:
            raise interrupted()
        if not torch.compiler.is_compiling() and (device.type == "cpu" or num_tokens > 1):
            self.check(int(self.length) + num_tokens)
        self.num_tokens = num_tokens
        if split is not None:
            self.slots = shard.slots(split.begin, split.end, device, is_own=True)
            return
        slots = torch.arange(num_tokens, device=device) + self.length
        local = slots if shard.world_size == 1 else shard.layout.local_slots_of(shard.rank, slots)
        self.slots = torch.where(slots < self.max_length, local, -2)

    def end(self) -> None:
        assert self.length is not None
        self.length.add_(self.num_tokens)
        self.slots, self.num_tokens = None, 0


class StaticTreeCacheLayer(TreeCacheLayer):
    """The keys and values of one layer that this rank holds, in buffers for `max_length` tokens."""

    is_compileable = True

    def __init__(self, shard: Shard, progress: Progress, kv_dtype: torch.dtype | None) -> None:
        self.progress, self.number = progress, progress.num_layers
        progress.num_layers += 1
        self.max_length = progress.max_length
        super().__init__(shard, growth=1, kv_dtype=kv_dtype)

    @property
    def length(self) -> int:
        """The number of tokens, for which the host waits: nothing in a decoding step asks."""
        return self.progress.read()

    @length.setter
    def length(self, length: int) -> None:
        self.progress.write(length)

    @property
    def pending(self) -> int:  # type: ignore[override]
        return self.progress.num_tokens

    @property
    def kv_length(self) -> int:
        return self.progress.max_length

    def capacity(self, num_slots: int) -> int:
        return self.shard.count(self.progress.max_length)

    def hold(self, buffers: Mapping[str, Tensor], dropped: int) -> None:
        self.progress.place(buffers["keys"].device)
        super().hold({name: _static(x) for name, x in buffers.items()}, dropped)

    def begin(self, num_tokens: int, split: TokenSplit | None) -> Tensor:
        if self.number == 0:
            self.progress.begin(self.shard, num_tokens, split)
        assert self.progress.slots is not None, "the first layer comes first"
        return self.progress.slots

    def end(self, num_tokens: int) -> None:
        if self.number == self.progress.num_layers - 1:
            self.progress.end()

    def get_seq_length(self) -> Tensor | int:  # type: ignore[override]
        length = self.progress.length
        return 0 if length is None else length.clone()  # the cache's own is changed in place

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.progress.max_length, 0

    def get_max_length(self) -> int:
        return self.progress.max_length

    get_max_cache_shape = get_max_length  # its name before transformers 5.17

    def cut(self, length: int) -> None:
        if self.number == self.progress.num_layers - 1:  # all layers share one length
            super().cut(length)


class StaticLatentLayer(LatentLayer, StaticTreeCacheLayer):
    """The latents of one layer that this rank holds, in buffers for `max_length` tokens."""


def _static(x: Tensor) -> Tensor:
    """Tells CUDA graphs that the tensor stays where it is, so that they write to it in place."""
    if not torch.compiler.is_compiling():
        torch._dynamo.mark_static_address(x, guard=False)
    return x
