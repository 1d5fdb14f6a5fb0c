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
        step = given.arguments
        if step["TOTAL_CP_WORLD_SIZE"] == 1:
            original(*arguments, **named)
            return
        slots = slots_of_rank(
            BlockCyclic(step["TOTAL_CP_WORLD_SIZE"], step["CP_KV_CACHE_INTERLEAVE_SIZE"]),
            step["TOTAL_CP_RANK"],
            step["query_start_loc"],
            step["positions"],
            step["block_table"],
            step["KV_CACHE_BLOCK_SIZE"],
            step["PAD_ID"],
        )
        step["slot_mapping"].fill_(step["PAD_ID"])[: len(slots)] = slots

    setattr(module, NAME, slot_mapping)


def check_replaced() -> None:
    """Raises RuntimeError if the function was not replaced."""
    faults = checks.faults_of(MODULE, NAME, PARAMETERS)
    if faults:
        raise RuntimeError(
            f"{checks.PLUG_IN} does --decode-context-parallel-size with vLLM "
            f"{', '.join(checks.TESTED)}, and this one differs: {faults[0]}"
        )


def slots_of_rank(
    layout: BlockCyclic,
    rank: int,
    query_starts: Tensor,
    positions: Tensor,
    block_table: Tensor,
    block_size: int,
    elsewhere: int,
) -> Tensor:
    """`block * block_size + offset` of each new token, `elsewhere` for those of other ranks.

    Args:
        query_starts: int32 `[requests + 1]`: where each request's tokens begin.
        positions: int64 `[tokens]`, of the tokens in their sequences.
        block_table: int32 `[requests, blocks]`; a rank fills a sequence's blocks with its slots.
    """
    lens = query_starts.long().diff()
    request = torch.arange(len(lens)).repeat_interleave(lens)
    position = positions[: len(request)].long()
    local = layout.count(rank, position)
    slots = block_table[request, local // block_size] * block_size + local % block_size
    return torch.where(layout.owner(position) == rank, slots, elsewhere)
