# SPDX-License-Identifier: BSD-3-Clause
"""Tree decoding with the same bits for every number of ranks, of threads and of sequences.

Sums of floating-point numbers depend on where they are cut. Here the keys of a sequence are cut at
multiples of a number of *global* slots, whoever holds them; each of these blocks is attended to in
one run, and the states of all blocks are merged in the canonical order of their numbers.
"""

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import Unpack

from ._numbers import integer
from .decode_call import DECODE_SCHEMA, DecodeCall, DecodeOptions, fake_decode
from .exchange import (
    MERGE_DEFAULTS,
    Call,
    Communicator,
    StateLayout,
    collective,
    get_communicator,
)
from .ops import lean_decode, merge_states
from .options import AttentionOptions
from .sharding import BlockCyclic, ShardLayout
from .shares import Shares

_ALL_SLOTS = 1 << 62  # more than any cache has


@collective(
    "(Tensor q, Tensor k_local, Tensor v_local, Tensor? key_ranges=None, *, int block_size, "
    f"str? group=None, {DECODE_SCHEMA}) -> (Tensor o, Tensor lse)",
    fake_decode,
)
def tree_decode_by_blocks(
    q: Tensor,
    k_local: Tensor,
    v_local: Tensor,
    key_ranges: Tensor | None = None,
    *,
    block_size: int,
    group: dist.ProcessGroup | Communicator | None = None,
    **options: Unpack[DecodeOptions],
) -> tuple[Tensor, Tensor]:
    """The operator of graphs for `tree_decode(..., deterministic=block_size)`."""
    comm = get_communicator(group)
    with comm.begin("tree_decode", options.pop("timeout", None)) as call:
        decode = DecodeCall("tree_decode", q, k_local, v_local, key_ranges, options, MERGE_DEFAULTS)
        return decode_by_blocks(comm, call, decode, block_size)


def decode_by_blocks(
    comm: Communicator, call: Call, decode: DecodeCall, size: int
) -> tuple[Tensor, Tensor]:
    """Attends to blocks of `size` global slots, and merges the blocks of all ranks in order."""
    q, exchange, options = decode.q, decode.exchange, decode.attention
    for name, value, needed in (
        ("strategy", exchange.strategy, "auto"),
        ("payload_dtype", exchange.payload_dtype, torch.float32),
        ("head_sharded", exchange.head_sharded, False),
        ("the device", q.device.type, "cpu"),
    ):
        if value != needed:
            raise ValueError(
                f"tree_decode: with deterministic={size} {name} must be {needed}, got {value}"
            )
    decode.check()
    page_table = options.get("page_table")
    seqlen_k = decode.k.shape[2] * (1 if page_table is None else page_table.shape[-1])
    key_layout = tuple(options.get("key_layout", (0, 1, 1)))
    if not _is_cut(key_layout, seqlen_k, size):
        raise ValueError(
            f"tree_decode: with deterministic={size} key_layout must cut at multiples of {size} "
            f"global slots, got {key_layout}"
        )
    states = _attend_to_blocks(decode, seqlen_k, size)
    layout = StateLayout(decode.shape[:3], decode.shape[3], exchange.payload_dtype)
    fields = comm.fields(layout, exchange, q.device)
    signature = (("deterministic", size), *decode.signature, *fields)
    # Where a rank's keys are may differ, and changes while a cache grows. So it is no field of
    # the signature, which would then be compared in every call.
    place = torch.tensor([[*key_layout, seqlen_k]], device="cpu")

    def gather(deadline: float) -> tuple[list[int], Tensor]:
        places = comm.gather(place, (1,) * comm.world_size, 0, deadline).tolist()
        comm.link.check_call_id()
        blocks = [_block_numbers(own[:3], own[3], size) for own in places]
        numbers = [number for own in blocks for number in own]
        if len(set(numbers)) < len(numbers):
            return numbers, states
        return numbers, comm.gather(states, tuple(map(len, blocks)), 0, deadline)

    numbers, gathered = _block_numbers(key_layout, seqlen_k, size), states
    if comm.world_size > 1:
        numbers, gathered = call.run(signature, gather, q.device, queries=decode.queries)
    if len(set(numbers)) < len(numbers):
        raise ValueError(
            f"tree_decode: with deterministic={size} no two ranks may hold keys of one block, "
            f"got the blocks {numbers} of all ranks: give each rank its key_layout"
        )
    if not numbers:
        o = q.new_zeros(decode.shape, dtype=exchange.out_dtype)
        return o, q.new_full(decode.shape[:3], -torch.inf, dtype=torch.float32)
    gathered = gathered[torch.tensor(numbers, device="cpu").argsort()]
    return merge_states(gathered[..., :-1], gathered[..., -1], out_dtype=exchange.out_dtype)


def check_size(op: str, size: int) -> int:
    """The argument `deterministic` of `op`, an integer from 0 to _ALL_SLOTS."""
    return integer(op, "deterministic", size, 0, _ALL_SLOTS)


@dataclass(frozen=True)
class Blocks:
    """The blocks at which a cache has its attention cut."""

    size: int  # global slots; 0 where it is not cut
    option: ClassVar[str] = "deterministic"  # the argument by which callers ask for blocks

    def __str__(self) -> str:
        return f"{self.option}={self.size}"

    def layout(self, world_size: int, shares: Shares = None) -> BlockCyclic:
        """The default layout of a cache, in which ranks hold whole blocks."""
        return BlockCyclic(world_size, self.size or BlockCyclic.block, shares)

    def refusal(self, op: str, words: str) -> ValueError:
        """The error of `op`, where `words` say what the option needs or is not for."""
        return ValueError(f"{op}: {self.option} {words}")


UNCUT = Blocks(0)


def check_layout(layout: ShardLayout, size: int) -> None:
    """Raises ValueError unless no block of `size` slots is on several ranks."""
    with suppress(ValueError):  # some layouts have no key_layout
        ranks = range(layout.world_size)
        if all(_is_cut(layout.key_layout(r), layout.count(r, _ALL_SLOTS), size) for r in ranks):
            return
    raise ValueError(
        f"TreeCache: with deterministic={size} layout must be a BlockCyclic or a Contiguous that "
        f"is cut at multiples of {size} slots, got {layout}"
    )


def _is_cut(key_layout: tuple[int, ...], seqlen_k: int, size: int) -> bool:
    """True where a rank's keys begin, and are cut, at multiples of `size` global slots."""
    first, block, stride = key_layout
    is_one_run = stride == block or seqlen_k <= block
    is_cut = first % size == 0 and (is_one_run or (block % size == 0 and stride % size == 0))
    return seqlen_k == 0 or is_cut


def _block_numbers(key_layout: Sequence[int], seqlen_k: int, size: int) -> list[int]:
    """The global numbers of a rank's blocks, whose keys are its `[i * size, (i + 1) * size)`."""
    first, block, stride = key_layout
    begins = range(0, seqlen_k, size)
    return [(first + i // block * stride + i % block) // size for i in begins]


def _attend_to_blocks(decode: DecodeCall, seqlen_k: int, size: int) -> Tensor:
    """The states of a rank's blocks, float32 `[blocks, batch, num_heads_q, seqlen_q, head_dim + 1]`
    with `lse` in the last column."""
    q, key_ranges, options = decode.q, decode.key_ranges, decode.attention
    batch, num_heads_q, seqlen_q, head_dim = decode.shape
    num_blocks = -(-seqlen_k // size)
    shape = (num_blocks, batch, num_heads_q, seqlen_q, head_dim + 1)
    states = q.new_empty(shape, dtype=torch.float32)
    if num_blocks == 0:
        return states
    if key_ranges is None:
        everything = torch.tensor([0, seqlen_k], dtype=torch.int32, device="cpu")
        key_ranges = everything.expand(batch, seqlen_q, 2)
    # Every block is a sequence of its own in one call. Without pages, a sequence's keys are a page.
    uncut: AttentionOptions = {**options, "num_workers": -1}
    page_table, query_positions = options.get("page_table"), options.get("query_positions")
    if page_table is None:
        page_table = torch.arange(batch, dtype=torch.int32, device="cpu")[:, None]
    uncut["page_table"] = _repeated(page_table, num_blocks)
    if query_positions is not None:
        uncut["query_positions"] = _repeated(query_positions, num_blocks)
    begins = torch.arange(0, seqlen_k, size, device="cpu").view(-1, *(1,) * key_ranges.dim())
    ranges = key_ranges.clamp(begins, (begins + size).clamp(max=seqlen_k)).int()
    flat = states.flatten(0, 1)
    out = (flat[..., :-1], flat[..., -1])
    queries = _repeated(q, num_blocks)
    lean_decode(queries, decode.k, decode.v, ranges.flatten(0, 1), out=out, **uncut)
    return states


def _repeated(x: Tensor, times: int) -> Tensor:
    return x.repeat(times, *(1,) * (x.dim() - 1))
