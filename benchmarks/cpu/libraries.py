# SPDX-License-Identifier: BSD-3-Clause
"""SGLang's CPU kernels and the CPU backend of the hub's flash-attention, from shared libraries that
register their operators with torch, and that `--peers` names."""

from argparse import ArgumentParser
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .cases import DecodeCase, Inputs

SGLANG, HUB = "SGLang", "hub"


def add_peers(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        type=Path,
        nargs="+",
        default=(),
        metavar="LIBRARY",
        help="shared libraries with SGLang's CPU kernels or the CPU backend of the hub's "
        "flash-attention, which get cases and results of their own; on cuda with vLLM's "
        "FlashAttention-3 or FlashMLA",
    )


def load(paths: Sequence[Path]) -> dict[str, Callable[[DecodeCase, Inputs], Any]]:
    """Load the libraries; return what makes each peer of a case, by the peer's name."""
    peers: dict[str, Callable[[DecodeCase, Inputs], Any]] = {}
    for path in paths:
        torch.ops.load_library(path)
        # The hub's packages name their operators' namespace as the library.
        namespace = getattr(torch.ops, path.name.split(".")[0])
        if hasattr(namespace, "varlen_fwd"):
            peers[HUB] = partial(HubFlash, namespace.varlen_fwd)
        elif hasattr(torch.ops.sgl_kernel, "decode_attention_cpu"):
            peers[SGLANG] = Sglang
        else:
            raise ValueError(
                f"--peers: {path.name} must register sgl_kernel::decode_attention_cpu or "
                f"{path.name.split('.')[0]}::varlen_fwd, and it has neither"
            )
    return peers


class SglangDecode:
    """SGLang's operator for one new token a sequence, with the splits of its engine.

    Args:
        query: `[batch, num_heads_q, head_dim]`.
        slots: where the keys of each sequence are in the pool, `[batch, longest]`, int32.
    """

    SPLITS = 8

    def __init__(
        self, query: Tensor, value_dim: int, slots: Tensor, lengths: Sequence[int], scale: float
    ) -> None:
        batch, heads, _ = query.shape
        self._query, self._scale = query, scale
        self._output = query.new_empty(batch, heads, value_dim)
        self._state = torch.zeros(batch, heads, self.SPLITS, value_dim + 1)
        self._sequences = (slots, torch.arange(batch), torch.tensor(lengths))

    def __call__(self, k: Tensor, v: Tensor) -> Tensor:
        """The shared output `[batch, num_heads_q, value_dim]`, from pools `[slots, heads, dim]`."""
        no_new_token, no_window = (None, None, torch.empty(0, dtype=torch.int64)), 0
        torch.ops.sgl_kernel.decode_attention_cpu(
            self._query, k, v, self._output, *no_new_token, self._state, *self._sequences,
            self._scale, 0.0, False, no_window, None, None,
        )  # fmt: skip
        return self._output


class SglangExtend:
    """SGLang's operator for the last tokens of one prompt, whose keys it takes beside the pool."""

    def __init__(self, query: Tensor, value_dim: int, slots: Tensor, scale: float) -> None:
        self._query, self._scale = query, scale
        self._output = query.new_empty(*query.shape[:2], value_dim)
        new, length = query.shape[0], slots.shape[1]
        self._sequences = (slots, torch.arange(1), torch.tensor([length]))
        self._new = (torch.tensor([new], dtype=torch.int32), torch.zeros(1, dtype=torch.int32), new)

    def __call__(self, k: Tensor, v: Tensor) -> Tensor:
        """The shared output `[seqlen_q, num_heads_q, value_dim]`."""
        new = len(self._query)
        torch.ops.sgl_kernel.extend_attention_cpu(
            self._query, k[-new:], v[-new:], self._output, k, v, *self._sequences, *self._new,
            self._scale, 0.0, False, 0, None, None,
        )  # fmt: skip
        return self._output


class Sglang:
    """SGLang's kernels on the same keys, in a pool of tokens whose slots are in the order of our
    pages, or of the sequences where our keys are contiguous."""

    def __init__(self, case: DecodeCase, inputs: Inputs) -> None:
        batch, value_dim, scale = len(case.lengths), case.value_shape[3], case.head_dim**-0.5
        slots = _slots(case, inputs)
        self._pools = _pools(case, inputs, slots)
        query = inputs.q.transpose(1, 2).flatten(0, 1).contiguous()
        if case.seqlen_q == 1:
            self._attend: Any = SglangDecode(query, value_dim, slots, case.lengths, scale)
        elif batch == 1 and not case.page_size:
            self._attend = SglangExtend(query, value_dim, slots, scale)
        else:
            raise ValueError("prompts are compared in one sequence of contiguous keys only")
        self._shape = (batch, case.seqlen_q, case.heads[0], value_dim)

    def __call__(self, i: int) -> Tensor:
        """The shared output, `[batch, num_heads_q, seqlen_q, value_dim]`."""
        return self._attend(*self._pools[i]).view(self._shape).transpose(1, 2)


class HubFlash:
    """The hub's flash-attention on the same keys, end to end in one tensor for all sequences."""

    def __init__(self, operator: Callable[..., Any], case: DecodeCase, inputs: Inputs) -> None:
        if case.page_size:
            raise ValueError("its CPU backend takes no pages")
        if case.value_dim:
            raise ValueError("its CPU backend takes values of the keys' columns only")
        self._operator, self._scale = operator, case.head_dim**-0.5
        self._pools = _pools(case, inputs, _slots(case, inputs))
        self._query = inputs.q.transpose(1, 2).flatten(0, 1).contiguous()
        self._output = torch.empty_like(self._query)
        counts = [[case.seqlen_q] * len(case.lengths), case.lengths]
        starts = [torch.tensor([0, *x]).cumsum(0).to(torch.int32) for x in counts]
        self._sequences = (*starts, None, None, None, None, case.seqlen_q, max(case.lengths))
        self._shape = (len(case.lengths), case.seqlen_q, *self._query.shape[1:])

    def __call__(self, i: int) -> Tensor:
        """The shared output, `[batch, num_heads_q, seqlen_q, head_dim]`."""
        no_dropout, causal = 0.0, True
        self._operator(
            self._query, *self._pools[i], self._output, *self._sequences, no_dropout, self._scale,
            False, causal, -1, -1, 0.0, False, None,
        )  # fmt: skip
        return self._output.view(self._shape).transpose(1, 2)


def _slots(case: DecodeCase, inputs: Inputs) -> Tensor:
    """The slots of the keys of every sequence, `[batch, longest]`; 0 behind a sequence's end."""
    slots = torch.zeros(len(case.lengths), max(case.lengths), dtype=torch.int32)
    begin = 0
    for b, length in enumerate(case.lengths):
        positions = torch.arange(length)
        if inputs.page_table is None:
            slots[b, :length] = begin + positions
        else:
            pages = inputs.page_table[b, positions // case.page_size]
            slots[b, :length] = pages * case.page_size + positions % case.page_size
        begin += length
    return slots


def _pools(case: DecodeCase, inputs: Inputs, slots: Tensor) -> list[tuple[Tensor, Tensor]]:
    """K and V of every set as pools `[slots, num_heads_kv, columns]`."""
    k, v = (
        torch.zeros(int(slots.max()) + 1, shape[1], shape[3], dtype=inputs.q.dtype)
        for shape in (case.kv_shape, case.value_shape)
    )
    for b, length in enumerate(case.lengths):
        for pool, x in zip((k, v), inputs.sequence(b), strict=True):
            pool[slots[b, :length].long()] = x.transpose(0, 1)
    return [(k.clone(), v.clone()) for _ in range(inputs.num_sets)]
