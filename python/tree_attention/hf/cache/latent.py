# SPDX-License-Identifier: BSD-3-Clause
"""Multi-head latent attention over a sharded cache of latents.

A layer caches one row for a token: its latent `c`, of kv_lora_rank columns, and a rotated key `r`
that all heads share. Head `h` has the key `[K_h c, r]` and the value `V_h c`, where `K_h` and `V_h`
are rows of kv_b_proj. Attention of few queries `[n, p]` never forms these, as it is

    score = n . K_h c + p . r = (K_h^T n) . c + p . r
    o     = sum_i weight_i V_h c_i = V_h (sum_i weight_i c_i)

that is attention of all heads to one head of keys, the rows, whose first columns are the values.
For many queries, as in a prompt, it is less work to form keys and values for as long as it lasts.

Source: DeepSeek-V2 (arXiv:2405.04434), section 2.1.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import transformers
from torch import Tensor, nn

from .growing import KVShard, TreeCacheLayer
from .token_split import current_token_split

# The method of attention modules that makes keys and values of all heads from cached latents.
EXPAND = "expand_kv"
# What keys and values of all heads take at most for the length of a layer's attention, in pieces
# of so many heads.
_MAX_EXPANDED_BYTES = 1 << 30


class LatentLayer(TreeCacheLayer):
    """The latents of one layer that this rank holds: rows of keys, and values without columns."""

    def __init__(self, *args: Any, kv_lora_rank: int, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.kv_lora_rank = kv_lora_rank

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[KVShard, KVShard]:
        """Appends the tokens that this rank keeps of latents `[batch, 1, tokens, kv_lora_rank]` and
        the keys that all heads share `[batch, 1, tokens, qk_rope_head_dim]`."""
        if key_states.shape[1] != 1 or key_states.shape[3] != self.kv_lora_rank:
            raise ValueError(
                "TreeCache: of multi-head latent attention it takes latents [batch, 1, tokens, "
                f"{self.kv_lora_rank}], got {list(key_states.shape)}; transformers >= 5.17 caches "
                f"these, this is {transformers.__version__}"
            )
        rows = torch.cat((key_states, value_states), dim=3)
        return super().update(rows, rows[..., :0])

    @property
    def head_dim_v(self) -> int:
        return self.kv_lora_rank

    def rows_of(self, name: str) -> Tensor:
        """As `update` takes them, latents and the keys that all heads share."""
        latents, rope = self.key_rows.tensor_split((self.kv_lora_rank,), dim=3)
        return latents if name == "keys" else rope

    def operands(self, buffers: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        rows = buffers["keys"]
        scales = {}
        if self.kv_dtype is not None:  # one for the whole row
            scales = dict.fromkeys(("k_scale", "v_scale"), buffers["k_scale"])
        return rows, rows[..., : self.kv_lora_rank], scales


def attend_to_latents(
    module: Any,
    query: Tensor,
    layer: LatentLayer,
    attend: Callable[[Tensor, Any, bool], tuple[Tensor, Tensor]],
    own_heads: tuple[int, int] | None,
    is_chosen: bool,
) -> tuple[Tensor, Tensor]:
    """Attention of one module, over all ranks of a layer, with all heads or only with `own_heads`.

    `attend` is called for queries and the layer. Where an index `is_chosen` keys of each query,
    these are few. Returns `o [batch, num_heads, seqlen_q,
    v_head_dim]` and `lse`.
    """
    is_head_sharded, weight = own_heads is not None, weight_of(module)
    if is_chosen or not _pays_to_expand(module, query, layer):
        o, lse = attend(_absorb(module, query), layer, is_head_sharded)
        return _expand(module, o, weight[slice(*own_heads or (None,))]), lse
    # Columns of keys without a position exist twice: next to the values, and in the keys.
    columns = 2 * module.qk_nope_head_dim + module.qk_rope_head_dim + module.v_head_dim
    head_bytes = query.shape[0] * layer.kv_length * columns * query.itemsize
    heads = max(1, _MAX_EXPANDED_BYTES // head_bytes)
    if heads >= query.shape[1]:
        return attend(query, _ExpandedLayer(layer, module, weight, query.dtype), is_head_sharded)
    pieces = [
        attend(q, _ExpandedLayer(layer, module, its_weight, query.dtype), False)
        for q, its_weight in zip(query.split(heads, 1), weight.split(heads), strict=True)
    ]
    own = slice(*own_heads or (None,))
    o, lse = (torch.cat(parts, dim=1)[:, own] for parts in zip(*pieces, strict=True))
    return o, lse


class _ExpandedLayer:
    """Stands for a layer of latents, with keys and values of some heads as the operands."""

    def __init__(self, layer: LatentLayer, module: Any, weight: Tensor, dtype: torch.dtype) -> None:
        self.shard, self.kv_length, self.key_rows = layer.shard, layer.kv_length, layer.key_rows
        self.window, self.dropped = layer.window, layer.dropped
        self.is_beside_states, self.prefix = layer.is_beside_states, None
        self.head_dim_v = module.v_head_dim
        self._layer, self._weight, self._dtype = layer, weight, dtype

    def buffers(self) -> dict[str, Tensor]:
        used = self.shard.count(self.kv_length)
        return {name: x[:, :, :used] for name, x in self._layer.buffers().items()}

    def operands(self, buffers: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        rows, latents, scales = self._layer.operands(buffers)
        if scales:
            rows = (rows.float() * scales["k_scale"][..., None]).to(self._dtype)
        latents, rope = rows.tensor_split((latents.shape[3],), dim=3)
        num_heads, columns, _ = self._weight.shape
        expanded = nn.functional.linear(latents[:, 0], self._weight.flatten(0, 1))
        expanded = expanded.unflatten(2, (num_heads, columns)).transpose(1, 2)
        nope, values = expanded.tensor_split((columns - self.head_dim_v,), dim=3)
        keys = torch.cat((nope, rope.expand(-1, num_heads, -1, -1)), dim=3)
        return keys, values, {}


def _pays_to_expand(module: Any, query: Tensor, layer: LatentLayer) -> bool:
    """True where keys and values of all heads need fewer multiplications than absorbed queries."""
    # Multiplications for a head, a slot and `n` queries: `rank * (nope + v)` make the keys and
    # values and `n * (nope + rope + v)` use them; absorbed queries take `n * (rank + rope + rank)`.
    # All ranks decide alike.
    if layer.prefix is not None:  # a document's rows and the others are in two buffers
        return False
    split = current_token_split()
    num_queries = query.shape[2] if split is None else split.length // layer.shard.world_size
    rank, columns = layer.kv_lora_rank, module.qk_nope_head_dim + module.v_head_dim
    # By half, as keys and values are also written and read again. With the sizes of DeepSeek-V2 and
    # V3 it pays from 342 queries on.
    return num_queries * (2 * rank - columns) > 2 * rank * columns


def _absorb(module: Any, query: Tensor) -> Tensor:
    """The queries of rows of latents."""
    batch, num_heads_q, seqlen_q, _ = query.shape
    weight = weight_of(module)[:, : module.qk_nope_head_dim]
    nope, rope = query.split((module.qk_nope_head_dim, module.qk_rope_head_dim), dim=3)
    product = torch.bmm(_by_head(nope), weight).view(num_heads_q, batch, seqlen_q, -1)
    return torch.cat((product.transpose(0, 1), rope), dim=3)


def _expand(module: Any, o: Tensor, weight: Tensor) -> Tensor:
    """Sums of values from sums of latents `[batch, num_heads, seqlen_q, kv_lora_rank]`."""
    batch, num_heads, seqlen_q, _ = o.shape
    weight = weight[:, module.qk_nope_head_dim :]
    # With the weight on the right, torch would transpose it in a copy in bfloat16 and float16.
    product = torch.bmm(weight, _by_head(o).transpose(1, 2))
    return product.view(num_heads, weight.shape[1], batch, seqlen_q).permute(2, 0, 3, 1)


def expand_unless_sharded(
    original: Callable[..., Any], module: Any, kv_nope: Any, k_rot: Any
) -> Any:
    """Hands on latents that come from a `TreeCache` as they are."""
    return (kv_nope, k_rot) if isinstance(kv_nope, KVShard) else original(kv_nope, k_rot)


def _by_head(x: Tensor) -> Tensor:
    """`[num_heads_q, batch * seqlen_q, columns]`, so that a product does not repeat the weight."""
    batch, num_heads_q, seqlen_q, columns = x.shape  # also of no heads
    return x.transpose(0, 1).reshape(num_heads_q, batch * seqlen_q, columns)


def weight_of(module: Any) -> Tensor:
    """The weight that makes keys and values of latents, `[num_heads_q, qk_nope_head_dim +
    v_head_dim, kv_lora_rank]`, or ValueError."""
    projection = module.kv_b_proj
    kind: type = type(projection)
    weight: Any = getattr(projection, "weight", None)
    if kind is not nn.Linear:
        got = f"a {kind.__module__}.{kind.__name__}"
    elif type(weight.data) is not Tensor or not weight.is_floating_point():
        got = f"one whose weight is a {type(weight.data).__name__} of {weight.dtype}"
    elif projection.bias is not None:
        got = "one with a bias"
    else:
        return weight.view(-1, module.qk_nope_head_dim + module.v_head_dim, weight.shape[1])
    raise ValueError(
        f"tree_attention: kv_b_proj of {type(module).__name__} must be a torch.nn.Linear with "
        f"numbers of floating point and no bias, as queries are multiplied with its weight, got "
        f"{got}; do not quantise it, and merge adapters into it"
    )
