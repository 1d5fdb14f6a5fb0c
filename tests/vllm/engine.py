# SPDX-License-Identifier: BSD-3-Clause
"""An engine's part in attention, played with the stub of vLLM: caches, steps and slots."""

import importlib
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

import tree_attention.vllm
from helpers import NAN
from tree_attention import reference

STUB = Path(__file__).parent / "stub"


@contextmanager
def stub_of_vllm() -> Iterator[None]:
    """Here `vllm` is the stub, which leaves nothing behind."""
    sys.path.insert(0, str(STUB))
    importlib.invalidate_caches()
    try:
        yield
    finally:
        sys.path.remove(str(STUB))
        for name in [name for name in sys.modules if name.partition(".")[0] == "vllm"]:
            del sys.modules[name]
        for name in ("backend", "context_parallel", "groups"):  # which import it
            if sys.modules.pop(f"tree_attention.vllm.{name}", None) is not None:
                delattr(tree_attention.vllm, name)


@dataclass
class Engine:
    """Sequences of random keys and values, and this rank's cache of them, NaN where unwritten."""

    group: Any = None  # of context parallelism, with world_size, rank and cpu_group
    interleave: int = 1
    num_heads: int = 4  # of this rank
    num_kv_heads: int = 2
    head_dim: int = 16
    block_size: int = 16
    num_blocks: int = 64
    dtype: torch.dtype = torch.float32
    timeout: int = 60  # seconds of an exchange
    options: dict[str, Any] = field(default_factory=dict)  # of the layer
    scales: tuple[float, float] = (1.0, 1.0)  # of keys and values in a cache of 8 bits

    def __post_init__(self) -> None:
        import vllm.config
        import vllm.distributed.parallel_state

        from tree_attention.vllm import backend, context_parallel

        vllm.distributed.parallel_state.group = self.group
        vllm.config.current = SimpleNamespace(
            model_config=SimpleNamespace(dtype=self.dtype),
            parallel_config=SimpleNamespace(
                cp_kv_cache_interleave_size=self.interleave,
                cpu_distributed_timeout_seconds=self.timeout,
                nnodes=1,
            ),
            kv_transfer_config=None,
            speculative_config=None,
        )
        context_parallel.replace_slot_mapping()
        self.world_size, self.rank = 1, 0
        if self.group is not None:
            self.world_size, self.rank = self.group.world_size, self.group.rank
        scale = self.head_dim**-0.5
        self.layer = backend.TreeAttentionImpl(
            self.num_heads, self.head_dim, scale, self.num_kv_heads, **self.options
        )
        spec = SimpleNamespace(block_size=self.block_size, num_kv_heads=self.num_kv_heads)
        self.builder = backend.MetadataBuilder(spec, [], None, torch.device("cpu"))
        shape = self.num_blocks, self.num_kv_heads, self.block_size, 2 * self.head_dim
        self.cache = torch.full(shape, NAN, dtype=self.dtype)
        if self.options.get("kv_cache_dtype") == "fp8":  # as vLLM allocates it
            self.cache = self.cache.to(torch.float8_e4m3fn).view(torch.uint8)
        self.blocks: dict[int, list[int]] = {}
        self.free = torch.randperm(self.num_blocks).tolist()
        self.keys: dict[int, Tensor] = {}
        self.values: dict[int, Tensor] = {}

    def step(self, new_tokens: dict[int, int]) -> tuple[Tensor, Tensor]:
        """So many new tokens of each request at once: what the layer says and what is true."""
        shape = self.num_heads * self.world_size, self.head_dim
        queries, truths, keys, values, positions = [], [], [], [], []
        for request, count in new_tokens.items():
            before = len(self.keys.get(request, ()))
            rows = (before + count, self.num_kv_heads, self.head_dim)
            for kept, new in ((self.keys, keys), (self.values, values)):
                drawn = torch.randn(count, *rows[1:]).to(self.dtype)
                kept[request] = torch.cat([*([kept[request]] if before else []), drawn])
                new.append(drawn)
            queries.append(torch.randn(count, *shape).to(self.dtype))
            positions.append(torch.arange(before, before + count))
            truths.append(self.truth(request, queries[-1], positions[-1]))
            blocks = self.blocks.setdefault(request, [])
            while len(blocks) * self.block_size * self.world_size < before + count:
                blocks.append(self.free.pop())
        mine = slice(self.rank * self.num_heads, (self.rank + 1) * self.num_heads)
        query = torch.cat(queries)[:, mine]
        padding = torch.full_like(query[:1], NAN)  # engines may pass more rows than tokens
        output = torch.full((len(query) + 1, *query.shape[1:]), NAN, dtype=self.dtype)
        metadata = self.builder.build(0, self.common(new_tokens, torch.cat(positions)))
        k_scale, v_scale = self.scales
        self.layer.forward(
            SimpleNamespace(_k_scale_float=k_scale, _v_scale_float=v_scale),
            torch.cat((query, padding)),
            torch.cat(keys),
            torch.cat(values),
            self.cache,
            metadata,
            output,
        )
        assert output[-1].isnan().all()
        return output[:-1], torch.cat(truths)[:, mine]

    def fork(self, request: int, source: int, blocks: int) -> None:
        """A request that begins with so many blocks of another, as prefix caching gives it."""
        self.blocks[request] = self.blocks[source][:blocks]
        for kept in (self.keys, self.values):
            kept[request] = kept[source][: blocks * self.block_size * self.world_size]

    def common(self, new_tokens: dict[int, int], positions: Tensor) -> Any:
        """What vLLM says about a step to the builders of all backends."""
        from vllm.utils import cpu_triton_utils
        from vllm.v1.attention.backend import CommonAttentionMetadata

        lens = torch.tensor(list(new_tokens.values()))
        starts = torch.cat((torch.zeros(1, dtype=torch.int64), lens.cumsum(0))).int()
        width = max(len(self.blocks[request]) for request in new_tokens)
        table = torch.full((len(lens), width), 10**6, dtype=torch.int32)  # beyond all blocks
        for row, request in enumerate(new_tokens):
            table[row, : len(self.blocks[request])] = torch.tensor(self.blocks[request])
        slot_mapping = torch.full((len(positions) + 3,), 10**9)
        if self.world_size == 1:  # vLLM's own function, in an engine
            request = torch.arange(len(lens)).repeat_interleave(lens)
            blocks = table[request, positions // self.block_size].long()
            slot_mapping[: len(request)] = blocks * self.block_size + positions % self.block_size
        else:
            cpu_triton_utils._compute_slot_mapping_kernel_impl(
                len(positions),
                len(slot_mapping),
                starts,
                positions,
                table,
                table.stride(0),
                slot_mapping,
                self.block_size,
                self.world_size,
                self.rank,
                self.interleave,
                -1,
                1024,
            )
        seq_lens = torch.tensor([len(self.keys[request]) for request in new_tokens])
        return CommonAttentionMetadata(
            query_start_loc=starts,
            seq_lens=seq_lens.int(),
            num_reqs=len(lens),
            num_actual_tokens=len(positions),
            max_query_len=int(lens.max()),
            block_table_tensor=table,
            slot_mapping=slot_mapping,
        )

    def truth(self, request: int, query: Tensor, positions: Tensor) -> Tensor:
        """float64 `[tokens, heads, head_dim]`, of the heads of all ranks."""
        window = self.options.get("sliding_window")
        ends = positions + 1
        begins = torch.zeros_like(ends) if window is None else (ends - window).clamp(min=0)
        slopes = self.options.get("alibi_slopes")
        if slopes is not None:
            slopes = torch.tensor(slopes * self.world_size)
        keys, values = self.keys[request], self.values[request]
        if self.options.get("kv_cache_dtype") == "fp8":
            keys, values = (
                (x / scale).to(torch.float8_e4m3fn).double() * scale
                for x, scale in zip((keys, values), self.scales, strict=True)
            )
        o, lse = reference.attention(
            query.transpose(0, 1)[None],
            keys.transpose(0, 1)[None],
            values.transpose(0, 1)[None],
            torch.stack((begins, ends), -1)[None],
            softcap=self.options.get("logits_soft_cap") or 0.0,
            alibi_slopes=slopes,
            query_positions=positions[None],
        )
        sinks = self.options.get("sinks")
        if sinks is not None:
            o = o * torch.sigmoid(lse - sinks.repeat(self.world_size)[:, None])[..., None]
        return o[0].transpose(0, 1)
