# SPDX-License-Identifier: BSD-3-Clause
"""A conversation with an enabled model, and what whole sequences without any cache say of it."""

from __future__ import annotations

from dataclasses import dataclass
from random import Random
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from generations import stable_choices
from hf_models import EOS, PAD, VOCAB_SIZE
from tree_attention import BlockCyclic, Communicator, ShardLayout, hf
from tree_attention.hf import CACHE_NAME

from .cases import draw_layout, draw_shares, made_once
from .outcome import AMPLE
from .session_models import (
    CHOOSING,
    NAMES,
    UNPADDED,
    alone,
    exact,
    group,
    own_group,
    split,
    split_sizes,
    whole,
)

# Logits are near 10; a key that is lost, doubled or foreign moves them by a tenth and more. In 8
# bits a key that rounding puts on the other side of a step moves all that follow.
LIMITS = {None: 2e-3, "int8": 0.1, "fp8": 0.6}
MAX_LENGTH = 320  # slots that are used
ROOM = 400  # slots of a layout that cannot grow, and of a cache of fixed size


@made_once
def communicator(world_size: int) -> Communicator:
    return Communicator(group(world_size), AMPLE)


@dataclass
class Conversation:
    """The cache under test, and which token stands where, padding included."""

    name: str
    world_size: int
    model: PreTrainedModel
    comm: Any  # of the ranks that share the slots
    options: dict[str, Any]  # of enable
    cache_options: dict[str, Any]  # of the cache, beside its layout
    cache: hf.TreeCache
    ids: Tensor  # [batch, slots]: what the cache holds
    mask: Tensor  # [batch, slots]
    weights: str | None = None  # the scheme of weights of fewer bits
    reached: int = 0  # the most slots that the cache has held, refused turns included

    @staticmethod
    def begin(rng: Random, size: int) -> Conversation:
        name = rng.choice(NAMES)
        shared: dict[str, Any] = {
            "timeout": AMPLE,
            "kv_dtype": rng.choice([None, None, "int8", "fp8"]) if name not in CHOOSING else None,
            "max_length": rng.choice([None, ROOM]),
        }
        options = shared | {"prefill_chunk_size": rng.choice([None, 4, 50, 1024])}
        comm: Any
        layout: ShardLayout
        # Of every third model the weights are split, and of some of these they have fewer bits.
        sizes = [0, 0, 0, 0, *split_sizes(name, size)]
        tensor_parallel_size = rng.choice(sizes)
        weights = None
        if tensor_parallel_size and name not in CHOOSING:
            weights = rng.choice([None, None, "int8", "int4"])
        if tensor_parallel_size:
            options["layout"] = layout = draw_layout(rng, size // tensor_parallel_size, ROOM)
            # Few ones, as every process keeps the models of all of them.
            unequal = (*range(size // tensor_parallel_size - 1), 3)
            shares = rng.choice([None, unequal])
            model = split(name, size, tensor_parallel_size, weights, shares)
            hf.enable(model, **options)
            comm = hf.mesh(model).context_group
        else:
            layout = draw_layout(rng, size, ROOM)
            if rng.random() < 0.3:
                shares = {name: draw_shares(rng, size) for name in ("cache", "prompt")}
                options["shares"], layout = shares, BlockCyclic(size, shares=shares["cache"])
            else:
                options["layout"] = layout
            options["strategy"] = rng.choice(["auto", "all_gather", "butterfly", "three_allreduce"])
            options["prefill"] = rng.choice(["auto", "split", "split", "replicated"])
            if name in CHOOSING:  # whose prompts are not split
                options["prefill"] = "auto"
            comm = communicator(size)
            model = hf.enable(whole(name), comm, **options)
        cache_options = shared | {"growth": rng.choice([1, 5, 64, 1024])}
        cached = hf.TreeCache(model.config, comm, layout, **cache_options)
        empty = torch.zeros(rng.choice([1, 2, 3]), 0, dtype=torch.long)
        return Conversation(
            name, size, model, comm, options, cache_options, cached, empty, empty, weights
        )

    def __str__(self) -> str:
        shown = {name: x for name, x in (self.options | self.cache_options).items() if x != AMPLE}
        how = f"split, weights={self.weights}" if self.is_split else "whole"
        return f"{self.name} ({how}, world {self.world_size}, {shown})"

    @property
    def is_split(self) -> bool:
        """Whether every rank has a part of the weights."""
        return self.model is not whole(self.name)

    @property
    def context_size(self) -> int:
        return self.cache.shard.world_size

    @property
    def length(self) -> int:
        return self.ids.shape[1]

    @property
    def forgets(self) -> bool:
        """Whether layers drop the slots that their windows have left behind."""
        windows = self.model.config.to_dict().get("sliding_window")
        return windows is not None

    def move(self, layout: ShardLayout) -> None:
        """Has the model go on with a cache that has this layout."""
        self.options.pop("shares", None)  # which are not given together
        self.options["layout"] = layout
        hf.enable(self.model, None if self.is_split else self.comm, **self.options)

    def draw_layout(self, rng: Random) -> ShardLayout:
        return draw_layout(rng, self.context_size, ROOM)

    def draw_tokens(self, rng: Random, *, padded: bool) -> tuple[Tensor, Tensor]:
        batch, count = len(self.ids), rng.choice([1, 1, 2, 9, 30, 70, 150, 200])
        generator = torch.Generator().manual_seed(rng.getrandbits(31))
        end = rng.choice([VOCAB_SIZE, VOCAB_SIZE, 6])  # few kinds of tokens repeat themselves
        ids = torch.randint(3, end, (batch, count), generator=generator)
        mask = torch.ones_like(ids)
        if (
            padded and not self.length and self.name not in UNPADDED
        ):  # padding is on the left of everything
            for row in range(batch):
                padding = rng.randrange(count)
                ids[row, :padding], mask[row, :padding] = PAD, 0
        return torch.cat([self.ids, ids], 1), torch.cat([self.mask, mask], 1)

    def keep(self, ids: Tensor, mask: Tensor) -> None:
        self.ids, self.mask, self.reached = ids, mask, max(self.reached, ids.shape[1])
        length = int(self.cache.get_seq_length())
        assert length == self.length, f"the cache says {length} tokens and holds {self.length}"

    def empty(self, batch: int | None = None) -> None:
        self.cache.reset()
        self.reached = 0
        none = torch.zeros(batch or len(self.ids), 0, dtype=torch.long)
        self.keep(none, none)

    def feed(self, ids: Tensor, mask: Tensor, **options: Any) -> Any:
        """A forward pass over what the cache does not hold yet."""
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, self.length :]
        return self.model(
            ids[:, self.length :],
            attention_mask=mask,
            position_ids=positions,
            **{CACHE_NAME: self.cache},
            **options,
        )

    def logits(self, ids: Tensor, mask: Tensor, count: int) -> Tensor:
        """Of the last `count` tokens: every row by itself, from its first token on."""
        rows = []
        for row, seen in zip(ids, mask, strict=True):
            own = self._of_whole(row[seen.bool()][None])
            missing = own.new_full((max(0, count - len(own)), VOCAB_SIZE), torch.nan)
            rows.append(torch.cat([missing, own[-count:]]))
        return torch.stack(rows)

    def _of_whole(self, ids: Tensor) -> Tensor:
        kv_dtype = self.cache_options["kv_dtype"]
        if kv_dtype is None:
            with stable_choices():
                return exact(self.name, self.weights)(ids, use_cache=False).logits[0]
        # Attention reads what the cache holds, so one pass has the numbers of any other way there.
        model = alone(self.name, self.weights)
        fresh = hf.TreeCache(model.config, own_group(), kv_dtype=kv_dtype)
        return model(ids, **{CACHE_NAME: fresh}).logits[0].double()

    @property
    def limit(self) -> float:
        return LIMITS[self.cache_options["kv_dtype"]]

    def check(self, found: Tensor, ids: Tensor, mask: Tensor) -> None:
        expected = self.logits(ids, mask, found.shape[1])
        error = torch.where(expected.isfinite(), found.double() - expected, 0.0).abs().max().item()
        assert error < self.limit, f"logits are off by {error:.3g}"  # which NaN fails, too

    def check_greedy(self, sequences: Tensor, mask: Tensor, count: int) -> None:
        """Of two tokens that are as good as equal, either may be taken."""
        logits = self.logits(sequences, mask, count + 1)[:, :-1]
        logits[..., EOS] = -torch.inf  # min_new_tokens rules it out
        taken = logits.gather(2, sequences[:, -count:, None])[..., 0]
        short = (logits.amax(-1) - taken).max().item()
        assert short < self.limit, f"a token is {short:.3g} below the best"
