# SPDX-License-Identifier: BSD-3-Clause
"""Tree decoding with the same bits for every number of ranks, of threads and of sequences.

Sums of floating-point numbers depend on where they are cut. Here the keys of a sequence are cut at
multiples of a number of *global* slots, whoever holds them; each of these blocks is attended to in
one run, and the states of all blocks are merged in the canonical order of their numbers.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from typing_extensions import Unpack

from .exchange import Communicator
from .ops import AttentionOptions, lean_decode, merge_states


def decode_by_blocks(
    comm: Communicator,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None,
    size: int,
    out_dtype: torch.dtype,
    seconds: float,
    **options: Unpack[AttentionOptions],
) -> tuple[Tensor, Tensor]:
    """`tree_decode` with blocks of `size` global slots, whose states all ranks gather.

    Raises:
        ValueError: a block would lie on several ranks, or a rank's key_layout does not say where
            its keys are.
    """
    page_table = options.get("page_table")
    seqlen_k = k.shape[2] if page_table is None else k.shape[2] * page_table.shape[-1]
    with comm.before_call():
        own = _block_numbers(options.get("key_layout", (0, 1, 1)), seqlen_k, size)
        states = _attend_to_blocks(q, k, v, key_ranges, len(own), size, options)
        # Its arguments are checked where no block needs it, and this is the result of no blocks.
        empty = None if own else lean_decode(q, k, v, key_ranges, out_dtype=out_dtype, **options)
    counts = _gather_counts(comm, len(own), seconds)
    numbers = comm.all_gather(torch.tensor(own, dtype=torch.int64), counts, 0, timeout=seconds)
    if len(numbers.unique()) < len(numbers):
        raise ValueError(
            f"tree_decode: with deterministic={size} no two ranks may hold keys of one block, got "
            f"the blocks {numbers.tolist()} of all ranks: give each rank its key_layout"
        )
    if empty is not None and not sum(counts):
        return empty
    states = comm.all_gather(states, counts, 0, timeout=seconds)
    states = states[numbers.argsort().to(states.device)]
    return merge_states(states[..., :-1], states[..., -1], out_dtype=out_dtype)


def _block_numbers(key_layout: Sequence[int], seqlen_k: int, size: int) -> list[int]:
    """The global numbers of a rank's blocks, of which its keys `[i * size, (i + 1) * size)` are
    one."""
    first, block, stride = key_layout
    is_one_run = stride == block or seqlen_k <= block
    if first % size or not (is_one_run or (block % size == 0 and stride % size == 0)):
        raise ValueError(
            f"tree_decode: with deterministic={size} key_layout must cut at multiples of {size} "
            f"global slots, got {tuple(key_layout)}"
        )
    begins = range(0, seqlen_k, size)
    return [(first + i // block * stride + i % block) // size for i in begins]


def _attend_to_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    key_ranges: Tensor | None,
    num_blocks: int,
    size: int,
    options: AttentionOptions,
) -> Tensor:
    """The states of a rank's blocks, float32 `[blocks, batch, num_heads_q, seqlen_q, head_dim + 1]`
    with `lse` in the last column."""
    batch, num_heads_q, seqlen_q, _ = q.shape
    states = q.new_empty(
        (num_blocks, batch, num_heads_q, seqlen_q, v.shape[3] + 1), dtype=torch.float32
    )
    if key_ranges is None:
        everything = torch.tensor([0, num_blocks * size], dtype=torch.int32, device=q.device)
        key_ranges = everything.expand(batch, seqlen_q, 2)
    uncut: AttentionOptions = {**options, "num_workers": -1}
    for i, state in enumerate(states):
        ranges = key_ranges.clamp(i * size, (i + 1) * size)
        lean_decode(q, k, v, ranges, out=(state[..., :-1], state[..., -1]), **uncut)
    return states


def _gather_counts(comm: Communicator, count: int, seconds: float) -> list[int]:
    ones = [1] * comm.world_size
    counts: list[int] = comm.all_gather(torch.tensor([count]), ones, 0, timeout=seconds).tolist()
    return counts
