# SPDX-License-Identifier: BSD-3-Clause
"""Models whose attention is code of their own in transformers: BLOOM, MPT and XGLM; and the index
of MiniMax-M3.

Their attention modules call no attention function that could be chosen. So the forward of each one
is replaced by one that makes the same queries, keys and values and calls this library. Everything
around them stays transformers'.
"""

import functools
import inspect
from typing import Any

import torch
from torch import Tensor, nn

from ..positions import alibi_slopes
from .attention import tree_attention_forward
from .cache.chosen_keys import BlockChoice, BlockLayer, IndexQuery
from .release import CACHE_NAME


def own_forward(original: Any, module: Any, *args: Any, **kwargs: Any) -> Any:
    """Takes the place of the forward of an attention module in `FORWARDS`."""
    return FORWARDS[type(module).__name__](module, *args, **kwargs)


def _bloom_forward(
    self: Any,
    hidden_states: Tensor,
    residual: Tensor,
    alibi: Tensor,
    attention_mask: Any,
    layer_past: Any = None,
    use_cache: bool = False,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    # Each head has its query, key and value side by side.
    fused = self.query_key_value(hidden_states).unflatten(2, (self.num_heads, 3, self.head_dim))
    q, k, v = fused.transpose(1, 2).unbind(3)
    # The biases in `alibi` are the products of slopes and positions, rounded to the model's dtype.
    # They count positions from the first token that is no padding, and this library from the first
    # slot. The scores of a query differ by a constant, which softmax does not notice.
    kwargs |= {"alibi_slopes": _slopes(self.num_heads, q.device)}
    dropout = self.attention_dropout.p
    o = _attend(self, q, k, v, layer_past, attention_mask, self.inv_norm_factor, dropout, **kwargs)
    o = nn.functional.dropout(self.dense(o), self.hidden_dropout, self.training)
    return residual + o, None


def _mpt_forward(
    self: Any,
    hidden_states: Tensor,
    position_bias: Tensor,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    mixed = self.Wqkv(hidden_states)
    if self.clip_qkv:
        mixed = mixed.clamp(-self.clip_qkv, self.clip_qkv)
    q, k, v = (_by_head(x, self.head_dim) for x in mixed.chunk(3, dim=2))
    # `position_bias [n_heads, 1, max_seq_len]` is 0 for the newest key, in float32.
    kwargs |= {"alibi_slopes": -position_bias[:, 0, -2]}
    cache, scale = kwargs.pop(CACHE_NAME, None), self.softmax_scale
    o = _attend(self, q, k, v, cache, attention_mask, scale, self.attn_dropout_p, **kwargs)
    return self.out_proj(o), None


def _xglm_forward(
    self: Any,
    hidden_states: Tensor,
    key_value_states: Tensor | None = None,
    attention_mask: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    if key_value_states is not None:
        raise NotImplementedError(
            "tree_attention: attention to an encoder's states is not supported; call the model "
            "without encoder_hidden_states"
        )
    projections = self.q_proj, self.k_proj, self.v_proj
    q, k, v = (_by_head(project(hidden_states), self.head_dim) for project in projections)
    cache = kwargs.pop(CACHE_NAME, None)
    o = _attend(self, q, k, v, cache, attention_mask, self.scaling, self.dropout, **kwargs)
    return self.out_proj(o), None


def choose_blocks(
    original: Any,
    self: Any,
    hidden_states: Tensor,
    position_embeddings: tuple[Tensor, Tensor],
    cache: Any,
    position_ids: Tensor,
) -> Any:
    """Takes the place of the forward of an indexer in `INDEXERS`, over the ranks of a TreeCache."""
    layer = None if cache is None else cache.layers[self.layer_idx]
    if not isinstance(layer, BlockLayer):
        return original(hidden_states, position_embeddings, cache, position_ids)
    rotate: Any = inspect.getmodule(type(self))
    cos, sin = (x[..., : self.head_dim] for x in position_embeddings)
    q = self.q_norm(_by_head(self.q_proj(hidden_states), self.head_dim))
    k = self.k_norm(_by_head(self.k_proj(hidden_states), self.head_dim))
    q, k = rotate.apply_rotary_pos_emb(q, k, cos, sin)
    layer.append_index_keys(k)
    numbers = self.topk_blocks, self.block_size, self.local_blocks
    return BlockChoice(IndexQuery(layer, q, None), *numbers)


# By the class of a module that chooses blocks.
INDEXERS = {"MiniMaxM3VLIndexer"}
# By the class of the attention module.
FORWARDS: dict[str, Any] = {
    "BloomAttention": _bloom_forward,
    "MptAttention": _mpt_forward,
    "XGLMAttention": _xglm_forward,
}


def _attend(
    module: Any,
    query: Tensor,
    key: Any,
    value: Any,
    cache: Any,
    attention_mask: Any,
    scaling: float,
    dropout: float,
    **kwargs: Any,
) -> Tensor:
    """Attention `[batch, seqlen_q, hidden_size]` to the keys of `cache`, with these new ones."""
    if cache is not None:
        key, value = cache.update(key, value, module.layer_idx)
    kwargs |= {"scaling": scaling, "dropout": dropout if module.training else 0.0}
    o, _ = tree_attention_forward(module, query, key, value, attention_mask, **kwargs)
    return o.flatten(2)


def _by_head(x: Tensor, head_dim: int) -> Tensor:
    return x.unflatten(2, (-1, head_dim)).transpose(1, 2)


@functools.cache
def _slopes(num_heads: int, device: torch.device) -> Tensor:
    """The slopes on a device, so that a step does not wait for a copy."""
    return alibi_slopes(num_heads).to(device)
