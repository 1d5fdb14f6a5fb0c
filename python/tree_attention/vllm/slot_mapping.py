# SPDX-License-Identifier: BSD-3-Clause
"""The one function of vLLM that is replaced: which slot of the cache a new token goes to.

vLLM's CPU worker computes the slots of a step by `_compute_slot_mapping_kernel_impl` of
`vllm.utils.cpu_triton_utils`. It asserts that there is no context parallelism, which its arguments
describe. Plug-ins are loaded before `CpuPlatform.register_triton_kernel_overrides` takes it from
its module, so replacing it there is enough. One rank is left to vLLM's function. This is for the
releases in `checks.TESTED`: if the function is not there, or its parameters differ, it is not
replaced, and context parallelism is refused.
"""

import functools
import importlib
import inspect

import torch
from torch import Tensor

from ..sharding import BlockCyclic
from . import checks

MODULE, NAME = "vllm.utils.cpu_triton_utils", "_compute_slot_mapping_kernel_impl"
PARAMETERS = (
    "num_tokens max_num_tokens query_start_loc positions block_table block_table_stride "
    "slot_mapping KV_CACHE_BLOCK_SIZE TOTAL_CP_WORLD_SIZE TOTAL_CP_RANK "
    "CP_KV_CACHE_INTERLEAVE_SIZE PAD_ID BLOCK_SIZE"
)


def replace() -> None:
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


def check_replaced() -> None:
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
    """Writes `block * block_size + offset` of each new token, PAD_ID for those of other ranks."""
    layout = BlockCyclic(TOTAL_CP_WORLD_SIZE, CP_KV_CACHE_INTERLEAVE_SIZE)
    lens = query_start_loc.long().diff()
    request = torch.arange(len(lens)).repeat_interleave(lens)
    position = positions[: len(request)].long()
    # A rank fills the blocks of a sequence with its own slots in turn.
    local = layout.count(TOTAL_CP_RANK, position)
    block, offset = local // KV_CACHE_BLOCK_SIZE, local % KV_CACHE_BLOCK_SIZE
    slots = block_table[request, block] * KV_CACHE_BLOCK_SIZE + offset
    is_here = layout.owner(position) == TOTAL_CP_RANK
    slot_mapping.fill_(PAD_ID)[: len(request)] = torch.where(is_here, slots, PAD_ID)
