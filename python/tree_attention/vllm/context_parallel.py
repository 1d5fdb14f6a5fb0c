# SPDX-License-Identifier: BSD-3-Clause
"""Decode context parallelism: the ranks of vLLM's group, each with its keys of every sequence.

The ranks have the same key heads and different query heads. Each attends with the query heads of
all ranks over its own keys; the states are merged, and each rank keeps the heads that are its own.

vLLM's CPU worker computes the slots of a step by a function that asserts that there is no context
parallelism, which its arguments describe. It is replaced, for more than one rank, if it is there
with the parameters that are known, or else context parallelism is refused. Plug-ins are loaded
before `CpuPlatform.register_triton_kernel_overrides` takes it from its module.
"""

import functools
import importlib
import inspect

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from ..sharding import BlockCyclic
from . import checks
from .batches import LayoutAndRank
from .groups import communicator

MODULE, NAME = "vllm.utils.cpu_triton_utils", "_compute_slot_mapping_kernel_impl"
PARAMETERS = (
    "num_tokens max_num_tokens query_start_loc positions block_table block_table_stride "
    "slot_mapping KV_CACHE_BLOCK_SIZE TOTAL_CP_WORLD_SIZE TOTAL_CP_RANK "
    "CP_KV_CACHE_INTERLEAVE_SIZE PAD_ID BLOCK_SIZE"
)


class GroupExchange:
    """Gathers of heads and merges of states over the ranks of vLLM's group."""

    def __init__(self, group: ProcessGroup, interleave: int) -> None:
        # One communicator per kind of call: alternating kinds would compare signatures every time.
        self._gathers, self._merges = (communicator(group) for _ in range(2))
        self.world_size, rank = self._merges.world_size, self._merges.rank
        self.shard: LayoutAndRank = BlockCyclic(self.world_size, interleave), rank

    def gather_heads(self, x: Tensor) -> Tensor:
        """`[tokens, heads, ...]` with the heads of all ranks, in rank order."""
        return self._gathers.all_gather(x, [x.shape[1]] * self.world_size, dim=1)

    def state(self, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """`o` of `shape` `[tokens, heads, head_dim]` and `lse`, to be written and merged."""
        tokens, heads, head_dim = shape
        o = torch.empty((heads, tokens, head_dim), dtype=torch.float32)
        return o.transpose(0, 1), torch.empty(o.shape[:2], dtype=torch.float32).transpose(0, 1)

    def merge(self, o: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
        """The state over the keys of all ranks, of this rank's heads, in float32."""
        o, lse = (x.transpose(0, 1)[None] for x in (o, lse))
        o, lse = self._merges.all_merge_states(o, lse, head_sharded=True)
        return o[0].transpose(0, 1), lse[0].transpose(0, 1)


_kept = functools.cache(GroupExchange)


def exchange_of(interleave: int) -> GroupExchange:
    """The exchange of vLLM's group in this process; the first call for a group is collective."""
    from vllm.distributed.parallel_state import get_dcp_group

    return _kept(get_dcp_group().cpu_group, interleave)


def replace_slot_mapping() -> None:
    """Replaces vLLM's function, unless it is not the one that is known."""
    if checks.faults_of(MODULE, NAME, PARAMETERS):
        return
    module = importlib.import_module(MODULE)
    original = getattr(module, NAME)
    signature = inspect.signature(original)

    @functools.wraps(original)
    def slot_mapping(*arguments: object, **named: object) -> None:
        given = signature.bind(*arguments, **named)
        given.apply_defaults()
        if given.arguments["TOTAL_CP_WORLD_SIZE"] == 1:
            original(*arguments, **named)
        else:
            write_slots(**given.arguments)

    setattr(module, NAME, slot_mapping)


def check_slot_mapping() -> None:
    """Raises RuntimeError if the function was not replaced."""
    faults = checks.faults_of(MODULE, NAME, PARAMETERS)
    if faults:
        raise RuntimeError(
            f"{checks.PLUG_IN} does --decode-context-parallel-size with vLLM "
            f"{', '.join(checks.TESTED)}, and this one differs: {faults[0]}"
        )


def write_slots(
    query_start_loc: Tensor,  # int32 [requests + 1]: where each request's tokens begin
    positions: Tensor,  # int64 [tokens], in their sequences
    block_table: Tensor,  # int32 [requests, blocks]
    slot_mapping: Tensor,  # int64, to be written
    KV_CACHE_BLOCK_SIZE: int,
    TOTAL_CP_WORLD_SIZE: int,
    TOTAL_CP_RANK: int,
    CP_KV_CACHE_INTERLEAVE_SIZE: int,
    PAD_ID: int,
    **others: object,
) -> None:
    """Writes `block * block_size + offset` of each new token, PAD_ID for tokens of other ranks."""
    layout = BlockCyclic(TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE)
    lens = query_start_loc.long().diff()
    request = torch.arange(len(lens)).repeat_interleave(lens)
    position = positions[: len(request)].long()
    # A rank fills the blocks of a sequence with its own tokens, one after another. For another
    # rank's token this index may be out of range.
    is_here = layout.owner(position) == TOTAL_CP_RANK
    local = torch.where(is_here, layout.count(TOTAL_CP_RANK, position), 0)
    block, offset = local // KV_CACHE_BLOCK_SIZE, local % KV_CACHE_BLOCK_SIZE
    slots = block_table[request, block] * KV_CACHE_BLOCK_SIZE + offset
    slot_mapping.fill_(PAD_ID)[: len(request)] = torch.where(is_here, slots, PAD_ID)
