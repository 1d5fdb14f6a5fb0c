# SPDX-License-Identifier: BSD-3-Clause
"""A cache manager: block tables, an allocator, prefix reuse and swap (arXiv:2309.06180, section 4).

The rows of all sequences lie in blocks of one pool. A sequence has a block table, which is the
`page_table` of `lean_decode`. Full blocks with the same tokens before them and in them are shared;
a sequence that goes on from a fork copies the block that it writes to, where another one holds it.
"""

from dataclasses import dataclass, field

import torch
from torch import Tensor


class OutOfBlocks(RuntimeError):
    """The pool has too few free blocks; nothing was taken. Another sequence has to be swapped."""


class Pool:
    """Blocks of keys and values, with the number of sequences that hold each."""

    def __init__(self, num_blocks: int, num_heads_kv: int, block: int, head_dim: int) -> None:
        self.k, self.v = torch.zeros(2, num_blocks, num_heads_kv, block, head_dim)
        self.block = block
        self.holders = [0] * num_blocks
        self.free = list(range(num_blocks))[::-1]
        self.of_tokens: dict[tuple[int, ...], int] = {}  # full blocks, by all tokens to their end

    def take(self, count: int) -> list[int]:
        if count > len(self.free):
            raise OutOfBlocks(f"{count} blocks are asked for, and {len(self.free)} are free")
        taken = [self.free.pop() for _ in range(count)]
        for index in taken:
            self.holders[index] = 1
        return taken

    def release(self, index: int) -> None:
        self.holders[index] -= 1
        if not self.holders[index]:
            self.free.append(index)
            self.of_tokens = {key: at for key, at in self.of_tokens.items() if at != index}

    def copy(self, source: "Pool", from_: int, to: int) -> None:
        self.k[to], self.v[to] = source.k[from_], source.v[from_]


@dataclass
class Sequence:
    """The tokens of a sequence and its block table, in one of the two pools."""

    tokens: list[int] = field(default_factory=list)
    table: list[int] = field(default_factory=list)
    is_swapped: bool = False


class Manager:
    """The sequences' tables over a pool on the device and one on the host."""

    def __init__(self, device: Pool, host: Pool) -> None:
        self.device, self.host = device, host

    def start(self, prompt: list[int]) -> tuple[Sequence, int]:
        """A sequence with room for its prompt, and how many tokens' rows it already has.

        The last token of a prompt is always computed, as its output is asked for.
        """
        pool, table = self.device, []
        for end in range(pool.block, len(prompt), pool.block):
            found = pool.of_tokens.get(tuple(prompt[:end]))
            if found is None:
                break
            table.append(found)
        fresh = pool.take(-(-len(prompt) // pool.block) - len(table))
        for index in table:
            pool.holders[index] += 1
        return Sequence(list(prompt), table + fresh), len(table) * pool.block

    def fork(self, sequence: Sequence) -> Sequence:
        """A second continuation of the same tokens, which shares all blocks."""
        for index in sequence.table:
            self.device.holders[index] += 1
        return Sequence(list(sequence.tokens), list(sequence.table))

    def append(self, sequence: Sequence, token: int) -> None:
        """Makes room for a token: in the last block, in a copy of it, or in a new block."""
        pool = self.device
        if len(sequence.tokens) % pool.block == 0:
            sequence.table += pool.take(1)
        elif pool.holders[sequence.table[-1]] > 1:
            (own,) = pool.take(1)
            pool.copy(pool, sequence.table[-1], own)
            pool.release(sequence.table[-1])
            sequence.table[-1] = own
        sequence.tokens.append(token)

    def write(self, sequence: Sequence, first: int, k: Tensor, v: Tensor) -> None:
        """Stores the rows `[num_heads_kv, tokens, head_dim]` of the tokens from `first` on.

        Blocks that they fill can be found from now on.
        """
        pool = self.device
        last = first + k.shape[1]
        for place in range(first, last):
            index, offset = sequence.table[place // pool.block], place % pool.block
            pool.k[index, :, offset], pool.v[index, :, offset] = (
                x[:, place - first] for x in (k, v)
            )
        for end in range((first // pool.block + 1) * pool.block, last + 1, pool.block):
            key = tuple(sequence.tokens[:end])
            pool.of_tokens.setdefault(key, sequence.table[end // pool.block - 1])

    def free(self, sequence: Sequence) -> None:
        pool = self.host if sequence.is_swapped else self.device
        for index in sequence.table:
            pool.release(index)
        sequence.table = []

    def swap(self, sequence: Sequence) -> None:
        """Moves all blocks to the host, or back to the device; shared ones stay for the others."""
        source, target = self.device, self.host
        if sequence.is_swapped:
            source, target = target, source
        table = target.take(len(sequence.table))
        for from_, to in zip(sequence.table, table, strict=True):
            target.copy(source, from_, to)
            source.release(from_)
        sequence.table, sequence.is_swapped = table, not sequence.is_swapped

    def page_table(self, sequences: list[Sequence]) -> Tensor:
        """The block tables as int32 `[batch, pages]`; the end of shorter ones is never read."""
        tables = [torch.tensor(sequence.table, dtype=torch.int32) for sequence in sequences]
        return torch.nn.utils.rnn.pad_sequence(tables, batch_first=True)
