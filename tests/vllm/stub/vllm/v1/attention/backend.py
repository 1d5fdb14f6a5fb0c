# SPDX-License-Identifier: BSD-3-Clause
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from vllm.distributed.parallel_state import get_dcp_group

T = TypeVar("T")


class AttentionType:
    DECODER = "decoder"
    ENCODER_ONLY = "encoder_only"


@dataclass
class CommonAttentionMetadata:
    query_start_loc: Any
    seq_lens: Any
    num_reqs: int
    num_actual_tokens: int
    max_query_len: int
    block_table_tensor: Any
    slot_mapping: Any
    causal: Any = True


class AttentionBackend:
    @classmethod
    def supported_kv_cache_layouts(cls):
        raise NotImplementedError


class AttentionMetadataBuilder(Generic[T]):
    def __init__(self, kv_cache_spec, layer_names, vllm_config, device):
        self.kv_cache_spec = kv_cache_spec

    def build(self, common_prefix_len, common_attn_metadata, fast_build=False):
        raise NotImplementedError


class AttentionImpl(Generic[T]):
    def __new__(cls, *args, **kwargs):
        self = super().__new__(cls)
        self.dcp_world_size = 1 if get_dcp_group() is None else get_dcp_group().world_size
        return self

    def __init__(
        self,
        num_heads,
        head_size,
        scale,
        num_kv_heads=None,
        alibi_slopes=None,
        sliding_window=None,
        kv_cache_dtype="auto",
        logits_soft_cap=None,
        attn_type=AttentionType.DECODER,
        kv_sharing_target_layer_name=None,
    ):
        raise NotImplementedError

    def forward(
        self,
        layer,
        query,
        key,
        value,
        kv_cache,
        attn_metadata,
        output,
        output_scale=None,
        output_block_scale=None,
    ):
        raise NotImplementedError
