# SPDX-License-Identifier: BSD-3-Clause
"""The attention backend that vLLM's CPU worker calls.

vLLM's cache of a layer is `[blocks, num_heads_kv, block_size, 2 * head_dim]`. Here each block has,
for each head, `block_size` rows of keys and then as many of values: pages of `lean_decode`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor
from vllm.config import get_current_vllm_config
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionImpl,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.kv_cache_interface import KVCacheLayout

from ..ops import append_kv
from ..options import AttentionOptions
from . import checks, groups
from .batches import Batch, attend, batches_of
from .context_parallel import GroupExchange, check_slot_mapping, exchange_of


@dataclass
class Metadata:
    """A step, the same for all layers whose caches are one group."""

    num_tokens: int
    batches: list[Batch]
    slot_mapping: Tensor  # int64 [num_tokens]: block * block_size + offset, -1 on other ranks


class MetadataBuilder(AttentionMetadataBuilder[Metadata]):
    reorder_batch_threshold = 1  # requests with one new token come first, and are one call

    def __init__(self, kv_cache_spec: Any, *arguments: Any) -> None:
        super().__init__(kv_cache_spec, *arguments)
        # True for a prefix LM, whose layers say that they are a decoder's.
        if getattr(kv_cache_spec, "non_causal", False):
            raise ValueError(f"{checks.PLUG_IN}: attention must be causal, this model's is not")

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> Metadata:
        step = common_attn_metadata
        if step.causal is not True:
            raise ValueError(f"{checks.PLUG_IN}: attention must be causal, got {step.causal!r}")
        groups.step_begins()
        num_tokens, pages = step.num_actual_tokens, step.block_table_tensor
        starts, lens = step.query_start_loc, step.seq_lens
        batches = batches_of(starts, lens, pages, num_tokens, step.max_query_len)
        return Metadata(num_tokens, batches, step.slot_mapping[:num_tokens])


class TreeAttentionImpl(AttentionImpl[Metadata]):
    can_return_lse_for_decode = True
    supports_dcp = True
    supports_mtp_with_cp_non_trivial_interleave_size = True  # tokens of a request are any number

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
    ) -> None:
        config = get_current_vllm_config()
        checks.check_layer(attn_type, kv_cache_dtype, config)
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        self.sliding_window, self.kv_cache_dtype = sliding_window, kv_cache_dtype
        self.kv_sharing_target_layer_name, self.sinks = kv_sharing_target_layer_name, sinks
        self.is_cascade = checks.is_cascade()
        self.options: AttentionOptions = {"softcap": logits_soft_cap or 0.0}
        slopes = None if alibi_slopes is None else torch.tensor(alibi_slopes, dtype=torch.float32)
        self.exchange: GroupExchange | None = None
        if self.dcp_world_size > 1:
            check_slot_mapping()
            checks.check_drafts(config)
            self.exchange = exchange_of(config.parallel_config.cp_kv_cache_interleave_size)
            layout, rank = self.exchange.shard
            self.options["key_layout"] = layout.key_layout(rank)
            if slopes is not None:
                slopes = self.exchange.gather_heads(slopes[None])[0]
        if slopes is not None:
            self.options["alibi_slopes"] = slopes

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor,
        attn_metadata: Metadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """Writes into `output` the attention of `query`, both `[tokens, num_heads, head_size]`."""
        if output_scale is not None or output_block_scale is not None:
            raise ValueError(f"{checks.PLUG_IN}: quantised outputs are not supported")
        step = attn_metadata
        if step is None:  # a run that measures memory or compiles
            return output
        groups.step_runs()
        blocks, num_heads_kv, block_size, _ = kv_cache.shape
        pages = kv_cache.view(blocks, num_heads_kv, 2 * block_size, self.head_size)
        # The scales of the checkpoint: an 8-bit cache has numbers divided by them.
        k_scale = v_scale = 1.0
        if self.kv_cache_dtype.startswith("fp8"):
            pages = pages.view(torch.float8_e4m3fn)
            k_scale, v_scale = layer._k_scale_float, layer._v_scale_float
        k, v = pages[:, :, :block_size], pages[:, :, block_size:]
        # A layer may ask for the keys of another pass (LoopCoder). Another layer is told only after
        # this was made which layer's cache it shares (Gemma 4's drafter).
        is_own = self.kv_sharing_target_layer_name is None
        if is_own and key is not None and value is not None:
            key, value = (
                (x if scale == 1.0 else x / scale)[None, : step.num_tokens].transpose(1, 2)
                for x, scale in ((key, k_scale), (value, v_scale))
            )
            append_kv(key, value, k, v, step.slot_mapping[None], paged=True)
        query, output = query[: step.num_tokens], output[: step.num_tokens]
        shard = None
        if self.exchange is None:
            o = output if self.sinks is None else torch.empty_like(output, dtype=torch.float32)
            lse = torch.empty(o.shape[:2], dtype=torch.float32)
        else:
            shard, query = self.exchange.shard, self.exchange.gather_heads(query)
            o, lse = self.exchange.state(query.shape)
        self.options["softmax_scale"] = self.scale * k_scale
        attend(
            step.batches,
            query,
            k,
            v,
            o,
            lse,
            window=self.sliding_window,
            shard=shard,
            is_cascade=self.is_cascade,
            options=self.options,
        )
        if v_scale != 1.0:
            o *= v_scale
        if self.exchange is not None:
            o, lse = self.exchange.merge(o, lse)
        if self.sinks is not None:
            o = o * torch.sigmoid(lse - self.sinks.float())[..., None]
        if o is not output:
            output.copy_(o)
        return output


class TreeAttentionBackend(AttentionBackend):
    @staticmethod
    def get_name() -> str:
        return "CPU_ATTN"  # a name that vLLM knows: the one that is taken over

    @staticmethod
    def get_impl_cls() -> type[TreeAttentionImpl]:
        return TreeAttentionImpl

    @staticmethod
    def get_builder_cls() -> type[MetadataBuilder]:
        return MetadataBuilder

    @classmethod
    def supported_kv_cache_layouts(cls) -> tuple[KVCacheLayout, ...]:
        return (KVCacheLayout.LBHNC,)


class LatentAttentionBackend(AttentionBackend):
    """Replaces vLLM's backend of latent attention, which such a model would otherwise take."""

    @staticmethod
    def get_name() -> NoReturn:
        raise ValueError(f"{checks.PLUG_IN}: latent attention (MLA) is not supported")

    get_impl_cls = get_builder_cls = get_name
