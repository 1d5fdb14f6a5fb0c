# SPDX-License-Identifier: BSD-3-Clause
"""The attention function that transformers calls in every layer."""

import functools
import warnings
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AttentionInterface

from ..exchange import all_merge_states
from ..ops import lean_decode
from ..patterns import by_rows, pages_of
from ..weights.mesh import Mesh
from ..weights.split import mesh_of, own_heads
from .cache.chosen_keys import NEEDS_CACHE, BlockChoice, Choice
from .cache.far import FarLayer
from .cache.growing import KVShard, TreeCacheLayer, as_autocast
from .cache.latent import LatentLayer, attend_to_latents
from .cache.prefix import Prefix
from .cache.shard import Shard
from .cache.token_split import current_token_split
from .cache.window import WindowLayer
from .masks import HOLE_BESIDE_STATES, KeyRanges
from .parts import Part, attend_to_parts, parts_of
from .prompts.split_attention import attend_split
from .release import CACHE_NAME

# Each rank keeps one send buffer as large as the largest state and world_size more to receive into.
# The state of a forward pass over many queries is exchanged in pieces of at most this size.
_MAX_STATE_BYTES = 32 << 20
_IN_PARTS = "ALiBi where the padding mask of a row has a hole: generate from each row alone"
# Keyword arguments that change the result of attention and have no counterpart in the operator.
_UNSUPPORTED_KEYWORDS = (
    *("position_bias", "alibi", "head_mask", "cu_seq_lens_q", "block_table"),
    "sinks",  # a sink of each token
)


def tree_attention_forward(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor | KVShard,
    value: Any,
    attention_mask: KeyRanges | Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    alibi_slopes: Tensor | None = None,
    indices: Any = None,
    block_indices: Any = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Attends to the keys of a `TreeCache` on all its ranks, or to plain tensors on this one alone.

    Like every attention function of transformers, it takes `query [batch, num_heads_q, seqlen_q,
    head_dim]` and returns `[batch, seqlen_q, num_heads_q, head_dim]`, and None in place of
    attention weights. In a split forward pass the tokens are this rank's. If the model's weights
    are split, the returned heads are this rank's. `s_aux [num_heads_q]` are attention sinks, scores
    in the softmax's denominator alone. `alibi_slopes [num_heads_q]` are as in `lean_decode`.
    `indices` and `block_indices` are what an index chose among the keys of a `TreeCache`.
    """
    ranges = _checked(query, attention_mask, dropout, kwargs)
    choice = _choice(indices, block_indices, ranges)
    query = as_autocast(query)
    if not isinstance(key, KVShard):
        key, value = as_autocast(key), as_autocast(value)
    mesh = mesh_of(module)
    own = own_heads(module, query.shape[1])
    # A sink scales what all ranks have merged, which is rounded to query's dtype after that.
    out_dtype = query.dtype if s_aux is None else torch.float32
    keywords: dict[str, Any] = {"softmax_scale": scaling, "softcap": softcap or 0.0}
    if alibi_slopes is not None:
        keywords["alibi_slopes"] = alibi_slopes
    if not isinstance(key, KVShard):
        if ranges.kv_length != key.shape[2]:
            raise _wrong_length(ranges, key.shape[2])
        if not torch.compiler.is_compiling() and dist.is_initialized():
            _warn_if_not_sharded(dist.get_world_size())
        whole = attend_to_parts(
            query, parts_of(key, value, ranges.whole(), keywords, ranges), out_dtype
        )
        o, lse = (x[:, slice(*own or (None,))] for x in whole)
    else:
        layer = key.layer
        if mesh is not None:
            _check_place(layer.shard, mesh)
        options: dict[str, Any] = {"ranges": ranges, "out_dtype": out_dtype, "keywords": keywords}
        if mesh is not None and own is not None:
            options["counts"] = mesh.head_counts(query.shape[1])
        attend: Any = functools.partial(_over_shard, **options)
        if choice is not None:
            attend = functools.partial(_over_chosen, choice=choice, own=own, **options)
        if isinstance(layer, LatentLayer):
            o, lse = attend_to_latents(module, query, layer, attend, own, choice is not None)
        else:
            o, lse = attend(query, layer, own is not None)
    if s_aux is not None:
        weight = torch.sigmoid(lse - s_aux.to(lse.dtype)[None, :, None])
        o = (o * weight[..., None]).to(query.dtype)
    return o.transpose(1, 2).contiguous(), None


def _over_shard(
    query: Tensor,
    layer: TreeCacheLayer,
    is_head_sharded: bool,
    ranges: KeyRanges,
    out_dtype: torch.dtype,
    keywords: dict[str, Any],
    counts: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to the keys of a layer on all ranks of its cache; `counts` of heads for each rank,
    where these are sharded by shares."""
    _check_layer(layer, ranges)
    shard, split = layer.shard, current_token_split()
    if shard.world_size == 1 and not torch.compiler.is_compiling():
        shard.comm.check_group("TreeCache")
    if split is not None:
        return attend_split(split, query, layer, ranges, out_dtype, keywords)
    buffers = layer.buffers()
    if shard.blocks.size:  # what buffers have room for may be another rank's blocks
        in_use = shard.count(layer.kv_length)
        buffers = {name: x[:, :, :in_use] for name, x in buffers.items()}
    keys, values, scales = layer.operands(buffers)
    keywords = {**keywords, **scales}
    is_alone = shard.world_size == 1 and not shard.blocks.size
    if isinstance(layer, WindowLayer) and layer.page_size:
        place = shard.layout, shard.rank, layer.key_rows, layer.page_size
        local_ranges, keywords["page_table"] = ranges.in_ring(*place)
    elif is_alone and layer.prefix is None:
        local_ranges = ranges.whole(layer.dropped)
    else:
        if layer.prefix is not None:
            document = ranges.within(0, layer.prefix.length)
            ranges = ranges.within(layer.prefix.length, layer.kv_length)
        local_ranges = ranges.local(shard.layout, shard.rank, layer.dropped)
    # In a world of one, and from its first slot on, keys have the numbers of their slots.
    counts_slots = is_alone and layer.dropped == 0
    if shard.blocks.size or ("alibi_slopes" in keywords and not counts_slots):
        first, block, stride = shard.layout.key_layout(shard.rank)
        keywords["key_layout"] = first + layer.dropped // block * stride, block, stride
    parts = parts_of(keys, values, local_ranges, keywords, ranges)
    if layer.prefix is not None:
        parts = [*_parts_of_prefix(layer, layer.prefix, keywords, document), *parts]
    if isinstance(layer, FarLayer):
        parts += _parts_on_host(layer, keywords, ranges)
    if is_alone:
        return attend_to_parts(query, parts, out_dtype)
    if len(parts) > 1 and shard.blocks.size:
        raise shard.blocks.refusal("tree_attention", f"is not supported with {_IN_PARTS}")
    merging = {"out_dtype": out_dtype, **_merging(shard, is_head_sharded, counts)}

    # Far keys come to the device once for all queries. Some ranks may have none yet, and all make
    # the same call.
    state = None
    if isinstance(layer, FarLayer):
        state = attend_to_parts(query, parts, torch.float32, out_dtype)

    def decode(q: Tensor, parts: Sequence[Part]) -> tuple[Tensor, Tensor]:
        if len(parts) == 1:
            (part,) = parts
            return shard.decode(q, part.keys, part.values, part.ranges, **part.options, **merging)
        return all_merge_states(*attend_to_parts(q, parts, torch.float32, out_dtype), **merging)

    def piece(own: slice) -> tuple[Tensor, Tensor]:
        if state is None:
            return decode(query[:, :, own], [part.of(own) for part in parts])
        o, lse = (x[:, :, own].contiguous() for x in state)
        return all_merge_states(o, lse, **merging)

    # States of a query, as many on all ranks.
    num_states = -(-layer.kv_length // shard.blocks.size) if shard.blocks.size else 1
    batch, num_heads_q, seqlen_q, _ = query.shape
    state_bytes = 4 * batch * num_heads_q * (layer.head_dim_v + 1) * num_states
    step = max(1, _MAX_STATE_BYTES // state_bytes)
    if seqlen_q <= step:
        return decode(query, parts) if state is None else all_merge_states(*state, **merging)
    pieces = (slice(begin, begin + step) for begin in range(0, seqlen_q, step))
    states = map(piece, pieces)
    o, lse = zip(*states, strict=True)
    return torch.cat(o, dim=2), torch.cat(lse, dim=2)


def _merging(shard: Shard, is_head_sharded: bool, counts: tuple[int, ...] | None) -> dict[str, Any]:
    """The options of the exchange between the ranks of a cache."""
    found = {
        "head_sharded": is_head_sharded,
        "strategy": shard.strategy,
        "group": shard.comm,
        "timeout": shard.timeout,
    }
    return found if counts is None or not is_head_sharded else found | {"head_counts": counts}


def _parts_of_prefix(
    layer: TreeCacheLayer, prefix: Prefix, keywords: dict[str, Any], ranges: KeyRanges
) -> list[Part]:
    """The keys with which all rows begin."""
    place = layer.shard.layout, layer.shard.rank
    keys, values, scales = layer.operands(prefix.buffers)
    keywords = keywords | scales
    if "key_layout" in keywords:
        keywords["key_layout"] = place[0].key_layout(place[1])
    parts = parts_of(keys, values, ranges.local(*place), keywords, ranges)
    return [part._replace(is_common=True) for part in parts]


def _parts_on_host(layer: FarLayer, keywords: dict[str, Any], ranges: KeyRanges) -> list[Part]:
    """The keys that are not on the device."""
    parts: list[Part] = []
    layout, rank = layer.shard.layout, layer.shard.rank
    for slot, run in layer.host.until(layer.dropped):
        keys, values, scales = layer.operands(run.buffers)
        own = {**keywords, **scales, "page_table": run.table}
        if "key_layout" in own:
            first, block, stride = layout.key_layout(rank)
            own["key_layout"] = first + slot // block * stride, block, stride
        parts += parts_of(keys, values, ranges.local(layout, rank, slot), own, ranges)
    return parts


def _choice(indices: Any, block_indices: Any, ranges: KeyRanges) -> Choice | None:
    """The choice of an index; None: every query's range."""
    if isinstance(block_indices, BlockChoice):
        indices, block_indices = block_indices.choose(ranges), None
    for chosen in (indices, block_indices):
        if chosen is not None and not isinstance(chosen, Choice):
            raise NotImplementedError(f"tree_attention: {NEEDS_CACHE}")
    return None if indices is None or indices.rows is None else indices


def _over_chosen(
    query: Tensor,
    layer: TreeCacheLayer,
    is_head_sharded: bool,
    choice: Choice,
    own: tuple[int, int] | None,
    ranges: KeyRanges,
    out_dtype: torch.dtype,
    keywords: dict[str, Any],
    counts: tuple[int, ...] | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention to the chosen slots of a layer on all ranks."""
    _check_layer(layer, ranges)
    shard, decode, split = layer.shard, lean_decode, current_token_split()
    buffers = layer.buffers()
    if split is not None:
        buffers = {
            name: split.all_rows(name, x, choice.run)
            for name, x in buffers.items()
            if name != "index_keys"
        }
    keys, values, scales = layer.operands(buffers)
    keywords, kv_heads = {**keywords, "out_dtype": out_dtype}, keys.shape[1]
    rows, lengths = choice.rows, choice.lengths
    assert rows is not None
    if rows.shape[1] > 1:  # each head has rows of its own, also heads of other tensor ranks
        rows = rows.narrow(1, shard.column[0] * kv_heads, kv_heads)
    # With several heads of keys these are sequences here, which ranks cannot divide.
    is_divided = is_head_sharded and kv_heads == 1
    if shard.world_size > 1 and split is None:
        decode, keywords = shard.decode, keywords | _merging(shard, is_divided, counts)
    elif split is None and not torch.compiler.is_compiling():
        shard.comm.check_group("TreeCache")
    batch, num_heads_q, seqlen_q, _ = query.shape
    state_bytes = 4 * batch * num_heads_q * (layer.head_dim_v + 1)
    step, parts = max(1, _MAX_STATE_BYTES // state_bytes), []
    for tokens in (slice(begin, begin + step) for begin in range(0, seqlen_q, step)):
        q, k, v, its_ranges, keywords["page_table"] = by_rows(
            query[:, :, tokens],
            keys,
            values,
            rows[:, :, tokens],
            None if lengths is None else lengths[:, tokens],
            block=choice.run,
        )
        page_size = k.shape[2]
        keywords |= {name: pages_of(x[..., None], page_size)[..., 0] for name, x in scales.items()}
        found = decode(q, k, v, its_ranges, **keywords)
        # From a sequence for each row, head of keys and query.
        sizes = batch, kv_heads, -1
        o, lse = (x.squeeze(2).unflatten(0, sizes).transpose(2, 3).flatten(1, 2) for x in found)
        parts.append((o, lse))
    o, lse = (torch.cat(x, dim=2) for x in zip(*parts, strict=True))
    if is_head_sharded and not is_divided:
        o, lse = (x[:, slice(*own or (None,))] for x in (o, lse))
    return o, lse


def _check_layer(layer: TreeCacheLayer, ranges: KeyRanges) -> None:
    if ranges.kv_length != layer.kv_length:
        raise _wrong_length(ranges, layer.kv_length)
    if layer.window is not None and (ranges.window is None or ranges.window > layer.window):
        raise NotImplementedError(
            f"tree_attention: the layer keeps the keys of a sliding window of {layer.window}, as "
            f"the configuration says, and its mask has the window {ranges.window}"
        )
    if ranges.skipped is not None:
        if layer.is_beside_states:
            raise NotImplementedError(f"tree_attention: {HOLE_BESIDE_STATES}")
        if isinstance(layer, WindowLayer):
            layer.check_sees_around(ranges.first)
    kind = str(layer.shard.blocks) if layer.shard.blocks.size else ""
    if isinstance(layer, FarLayer):
        kind = "far='cpu'"
    if kind and current_token_split() is not None:
        raise ValueError(
            f"tree_attention: a TreeCache with {kind} needs a model that was enabled with it, or "
            "with prefill='replicated'"
        )


def _check_place(shard: Shard, mesh: Mesh) -> None:
    """Refuses a cache over other ranks than the model's, and notes which heads it holds."""
    sizes = shard.world_size, mesh.context_size
    if sizes == (1, 1) or (sizes[0] == sizes[1] and shard.comm.link.group is mesh.context_group):
        # A communicator of one rank does not know its group.
        if shard.column != mesh.column:
            shard.column = mesh.column
        return
    raise ValueError(
        f"tree_attention: the cache is rank {shard.rank} of {shard.world_size} in its group and "
        f"the model, whose weights are split, rank {mesh.context_rank} of {mesh.context_size} in "
        "its context group, which must be the same: make the cache with TreeCache(model.config, "
        "tree_attention.hf.mesh(model).context_group)"
    )


def _checked(
    query: Tensor, attention_mask: KeyRanges | Tensor | None, dropout: float, kwargs: dict[str, Any]
) -> KeyRanges:
    """The mask, if attention under it and the other arguments is supported."""
    if not isinstance(attention_mask, KeyRanges):
        shape = None if attention_mask is None else list(attention_mask.shape)
        got = "None" if shape is None else f"a tensor of shape {shape}"
        raise NotImplementedError(
            "tree_attention: needs the mask that transformers makes from a 2-D padding mask, got "
            f"{got}; pass the model the 2-D padding mask, or none"
        )
    if attention_mask.unsupported is not None:
        raise NotImplementedError(f"tree_attention: {attention_mask.unsupported}")
    if dropout > 0.0:
        raise NotImplementedError(
            f"tree_attention: is for inference, where dropout must be 0, got {dropout}; "
            "call model.eval()"
        )
    if kwargs.get("output_attentions"):
        raise NotImplementedError(
            "tree_attention: output_attentions is not supported, as the weights are never formed; "
            "use attn_implementation='eager'"
        )
    for name in _UNSUPPORTED_KEYWORDS:
        if kwargs.get(name) is not None:
            raise NotImplementedError(f"tree_attention: {name} is not supported")
    if query.requires_grad and torch.is_grad_enabled():
        raise NotImplementedError(
            "tree_attention: computes no gradients; call the model under torch.no_grad()"
        )
    return attention_mask


@functools.cache
def _warn_if_not_sharded(world_size: int) -> None:
    """Warns once in a process: a replicated cache may be meant, but gains nothing from ranks."""
    if world_size > 1:
        warnings.warn(
            f"tree_attention: each of {world_size} ranks attends to all keys by itself, as they "
            "are in no TreeCache. To share them, call tree_attention.hf.enable(model) and then "
            f"model.generate, or give the model {CACHE_NAME}=TreeCache(model.config)",
            stacklevel=2,
        )


def _wrong_length(ranges: KeyRanges, length: int) -> NotImplementedError:
    return NotImplementedError(
        f"tree_attention: the mask is for {ranges.kv_length} keys and the layer has {length}; "
        "models whose layers hold caches of different lengths are not supported"
    )


AttentionInterface.register("tree_attention", tree_attention_forward)
