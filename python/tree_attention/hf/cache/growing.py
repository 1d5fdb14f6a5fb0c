# SPDX-License-Identifier: BSD-3-Clause
"""The keys and values of one layer that this rank holds."""

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers.cache_utils import CacheLayerMixin, DynamicLayer

from ..._memory import in_words, is_out_of_memory
from ..._numbers import integer, shown
from ...ops import append_kv
from .memory import Need, row_bytes, too_few
from .operands import check_taken
from .prefix import Prefix
from .shard import Shard
from .token_split import TokenSplit, current_token_split

# Largest growth, in local slots, of the tokens that rows have after a common document.
_GROWTH_OF_OWN = 64
# transformers 5.5 passes `crop` the tokens to keep, later releases the tokens to remove, as a
# number <= 0. The name of the parameter tells which.
CROP_KEEPS = "max_length" in inspect.signature(DynamicLayer.crop).parameters

_REFUSED = "TreeCache: it is given keys that"
_ASSIGNED = (
    "TreeCache: the {0} of a layer cannot be replaced or removed, as attention reads buffers in "
    "which all ranks count the tokens; write to layer.{0} in place (in a world of one), take "
    "tokens back with cache.crop, sequences with cache.batch_select_indices, and for codes that "
    "drop single tokens call tree_attention.hf.disable(model), which gives it a DynamicCache"
)
_COUNTED_TOGETHER = (
    "TreeCache: a layer has no cumulative_length, as the layers count their tokens together; "
    "get_seq_length() is their number, and cache.crop takes some back"
)


class WrongAttentionError(AttributeError):
    """Keys of a `TreeCache` reached an attention function that cannot use them."""

    def __init__(self) -> None:
        super().__init__(
            "tree_attention: the keys and values of a TreeCache are spread over ranks and only "
            "attn_implementation='tree_attention' can use them; load the model with it, or call "
            "tree_attention.hf.enable(model) or model.set_attn_implementation('tree_attention'); "
            "multi-head latent attention needs enable, and models that otherwise work on cached "
            "keys themselves are not supported"
        )


class KVShard:
    """Takes the place of a layer's keys, and of its values, on the way to the attention function.

    It has none of a tensor's attributes, so any other attention function fails on it instead of
    attending to the keys of one rank. The error is an AttributeError, so that `hasattr` works.
    """

    __slots__ = ("layer",)
    layer: "TreeCacheLayer"

    def __init__(self, layer: "TreeCacheLayer") -> None:
        self.layer = layer

    def __getattr__(self, name: str) -> NoReturn:
        raise WrongAttentionError

    @classmethod
    def __torch_function__(cls, *_: Any, **__: Any) -> NoReturn:
        raise WrongAttentionError


def as_autocast(x: Tensor) -> Tensor:
    """An operand of attention, which autocast leaves in float32 where it was rotated."""
    kind = x.device.type
    if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
        return x.to(torch.get_autocast_dtype(kind))
    return x


class TreeCacheLayer(CacheLayerMixin):
    """The keys and values of one layer that this rank holds, in buffers that grow in steps.

    The slots in use are `key_rows[:, :, held()]`; the rest of a buffer is uninitialised, or of
    slots that nothing needs, and no key range reaches it. `keys` and `values` show them as the
    layers of `DynamicCache` do. Growing copies the layer once per `growth` local slots, which is
    `2 / growth` of what attention reads in the meantime, and keeps the shard one dense run of
    slots, which the kernel streams.
    """

    is_sliding = False
    is_croppable = True
    is_compileable = False

    number = 0  # among the layers with keys, where they share a `Progress`
    pending = 0  # number of tokens of a forward pass that has begun, where they are known
    window: int | None = None  # no query sees more slots than this; None: any
    first = 0  # the global slot from which on this layer holds all slots, on all ranks together
    dropped = 0  # number of local slots before the one at the beginning of the buffers
    # The document with which all rows begin, if they share one; buffers have the slots after it.
    prefix: Prefix | None = None
    lent = 0  # the number of tokens that other caches read in these buffers
    page_size = 0  # of the pages in which a ring is attended to; 0: the buffers are no ring
    max_length: int | None = None  # of a cache of fixed size
    index_columns = 0  # of the keys by which an index chooses, where the layer has one
    index_dtype: torch.dtype | None = None  # of these; None until they come: the dtype of keys
    # In the first of several equal layers their number: it compares the memory that all of them
    # will allocate with what is free. The other layers have 1.
    allocates_for = 1
    is_beside_states = False  # whether other layers of the model keep a state of all tokens
    keeps_last_pass = False  # for assisted decoding, which takes back all candidates of a pass

    key_rows: Tensor  # [batch, num_heads_kv, capacity, head_dim]
    value_rows: Tensor  # [batch, num_heads_kv, capacity, head_dim_v]
    k_scale: Tensor  # [batch, num_heads_kv, capacity], with kv_dtype only, like v_scale
    v_scale: Tensor
    index_keys: Tensor  # [batch, 1, capacity, index_columns], with an index only

    def __init__(self, shard: Shard, growth: int, kv_dtype: torch.dtype | None = None) -> None:
        # transformers' own __init__ is not called: it sets `keys` and `values`, properties here.
        self.is_initialized = False
        self.shard = shard
        self.growth = growth
        self.kv_dtype = kv_dtype  # int8 or float8_e4m3fn; None: the dtype of the model's keys
        self.length = 0  # of the sequence, on all ranks together
        self.reserved = 0  # local slots for which the next allocation makes room
        self.handle = KVShard(self)
        # What `keys` and `values` last gave, each with an alias, which tells whether it was moved.
        self._shown: dict[str, tuple[Tensor, Tensor]] = {}

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        rows = key_states[:, :, :0], value_states[:, :, :0]
        if self.kv_dtype is not None:
            rows = rows[0].to(self.kv_dtype), rows[1].to(self.kv_dtype)
            self.k_scale, self.v_scale = (
                x.new_empty(x.shape[:3], dtype=torch.float32) for x in rows
            )
        self.key_rows, self.value_rows = rows
        self.grow(self.dropped)
        if not torch.compiler.is_compiling():
            check_taken(_REFUSED, key_states.dtype, *self.operands(self.buffers()))
        self.is_initialized = True

    @property
    def keys(self) -> Tensor | None:
        """Keys of the tokens in use, `[batch, num_heads_kv, tokens, head_dim]`, as `DynamicCache`
        shows them: a view of the buffer, in a world of one and without `kv_dtype`."""
        return self._show("keys")

    @keys.setter
    def keys(self, x: object) -> None:
        self._check_assigned("keys", x)

    @keys.deleter
    def keys(self) -> NoReturn:
        raise NotImplementedError(_ASSIGNED.format("keys"))

    @property
    def values(self) -> Tensor | None:
        """The values of the tokens in use; see `keys`."""
        return self._show("values")

    @values.setter
    def values(self, x: object) -> None:
        self._check_assigned("values", x)

    @values.deleter
    def values(self) -> NoReturn:
        raise NotImplementedError(_ASSIGNED.format("values"))

    def _show(self, name: str) -> Tensor | None:
        if not self.is_initialized:
            return None
        own = f"this rank's are layer.buffers()[{name!r}][:, :, layer.held()]"
        if self.prefix is not None:
            raise RuntimeError(
                f"TreeCache: no tensor has the {name} of rows that share {self.prefix.length} "
                f"tokens: these are in the cache that was shared, and {own}"
            )
        if self.shard.world_size > 1:
            raise RuntimeError(
                f"TreeCache: the {name} of a layer are spread over {self.shard.world_size} ranks, "
                f"and none has them all: {own}, of the slots that cache.shard.layout gives it"
            )
        if self.kv_dtype is not None:
            raise RuntimeError(
                f"TreeCache: the {name} of a layer with kv_dtype are {self.kv_dtype} with scales, "
                f"and no tensor has them: {own}, to be multiplied by the scales there"
            )
        if self.pending or self.is_torn:
            raise RuntimeError(
                f"TreeCache: the {name} of this layer are whole between forward passes, and one "
                "has not reached the last layer; read them after it, or forget it with cache.crop"
            )
        begin, end = self.in_sight()
        found = self.rows_of(name)[:, :, begin:end]
        if found.shape[2] < end - begin:
            raise RuntimeError(
                f"TreeCache: the {name} of a sliding window of {self.window} lie in a ring, and "
                f"no view has them in order here: {own}, a copy, of the slots from layer.first on"
            )
        view, alias = self._shown.get(name, (None, None))
        if view is None or alias is None or not alias.is_set_to(found):
            view = found[:]
            self._shown[name] = view, found
        return view

    def in_sight(self) -> tuple[int, int]:
        """The places in the buffers of the tokens that `keys` shows, in a world of one; the end may
        lie beyond the end of a ring."""
        return 0, self.length

    def rows_of(self, name: str) -> Tensor:
        """The buffer of the keys or the values."""
        return self.buffers()[name]

    def _check_assigned(self, name: str, x: object) -> None:
        """Refuses any tensor but the one shown, which `layer.keys *= 2` assigns after its work."""
        if x is None or x is not self._shown.get(name, (None, None))[0]:
            raise NotImplementedError(_ASSIGNED.format(name))

    def _check_shown(self) -> None:
        """Refuses tokens after what `keys` or `values` gave was made to show other memory."""
        shown, self._shown = self._shown, {}
        for name, (view, alias) in shown.items():
            # Without this: tokens are appended to the memory that the caller put there.
            if not view.is_set_to(alias):
                raise NotImplementedError(_ASSIGNED.format(name))

    @property
    def device(self) -> torch.device:
        return self.key_rows.device

    @property
    def dtype(self) -> torch.dtype:
        return self.key_rows.dtype

    @property
    def cumulative_length(self) -> NoReturn:
        raise AttributeError(_COUNTED_TOGETHER)

    @cumulative_length.setter
    def cumulative_length(self, _: object) -> NoReturn:
        raise AttributeError(_COUNTED_TOGETHER)

    def buffers(self) -> dict[str, Tensor]:
        """All tensors of the layer by the name of the attribute; the axis of the slots is 2."""
        found = {"keys": self.key_rows, "values": self.value_rows, **self.scales()}
        if self.index_columns:
            found["index_keys"] = self.index_keys
        return found

    def hold(self, buffers: Mapping[str, Tensor], dropped: int) -> None:
        """Replaces all buffers by some that begin at the local slot with the number `dropped`."""
        # Ctrl-C is raised where functions are called and loops go on, not between these statements:
        # keys, values and scales always have equally many slots.
        self.key_rows, self.value_rows = buffers["keys"], buffers["values"]
        self.dropped, self.lent = dropped, 0
        if self.kv_dtype is not None:
            self.k_scale, self.v_scale = buffers["k_scale"], buffers["v_scale"]
        if self.index_columns:
            self.index_keys = buffers["index_keys"]

    def scales(self) -> dict[str, Any]:
        """The operators' arguments `k_scale` and `v_scale`, where keys have 8 bits."""
        if self.kv_dtype is None:
            return {}
        return {"k_scale": self.k_scale, "v_scale": self.v_scale}

    def operands(self, buffers: Mapping[str, Tensor]) -> tuple[Tensor, Tensor, dict[str, Any]]:
        """Keys, values and scales for the operators, from `buffers` or from a part of each."""
        scales = {name: buffers[name] for name in self.scales()}
        return buffers["keys"], buffers["values"], scales

    @property
    def head_dim_v(self) -> int:
        return self.value_rows.shape[3]

    def places(self, slots: Tensor) -> Tensor:
        """The places of local slots in the buffers; negative numbers stay below 0."""
        return torch.where(slots < 0, slots, slots - self.dropped) if self.dropped else slots

    def held(self) -> Tensor:
        """The places of this rank's slots from `first` on that are in use, but for a prefix."""
        first = self.first if self.prefix is None else self.prefix.length
        begin, end = self.shard.count(first), self.shard.count(self.length)
        return self.places(torch.arange(begin, end, device=self.key_rows.device))

    @property
    def is_torn(self) -> bool:
        """True where an interrupted pass or `crop` has overwritten what the next token sees."""
        return False

    def first_kept(self, first: int, length: int) -> int:
        """The first slot that the layer holds after it was given the slots [first, length)."""
        return first

    def capacity(self, num_slots: int) -> int:
        """The number of local slots to allocate where `num_slots` must be held."""
        growth = self.growth
        if self.prefix is not None:
            num_slots, growth = num_slots - self.dropped, min(growth, _GROWTH_OF_OWN)
        return -(-max(num_slots, self.reserved) // growth) * growth

    def update(  # type: ignore[override]
        self, key_states: Tensor, value_states: Tensor, *_: Any, **__: Any
    ) -> tuple[KVShard, KVShard]:
        """Appends the new tokens that this rank keeps; the arguments are `[batch, num_heads_kv,
        new tokens, head_dim]` of all of them, or in a split forward pass of those computed here."""
        key_states, value_states = as_autocast(key_states), as_autocast(value_states)
        self._prepare(key_states, value_states)
        keys, values, split = key_states.detach(), value_states.detach(), current_token_split()
        num_tokens = keys.shape[2] if split is None else split.length
        slots = self.begin(num_tokens, split)
        if split is not None:
            keys, values = split.rows_of_owner(keys, values)
        handle = self.append(keys, values, slots.expand(len(keys), -1), num_tokens)
        self.end(num_tokens)
        return handle, handle

    def begin(self, num_tokens: int, split: TokenSplit | None) -> Tensor:
        """Makes room for new tokens, and returns their local slots as `Shard.slots` does."""
        begin, end = self.length, self.length + num_tokens
        if self.shard.count(end) - self.dropped > self.key_rows.shape[2]:
            self.grow(self.shard.count(end))
        return self.shard.slots(begin, end, self.key_rows.device, is_own=split is not None)

    def append(self, keys: Tensor, values: Tensor, slots: Tensor, num_tokens: int) -> KVShard:
        """Writes rows of the `num_tokens` new tokens, and returns what their queries attend to."""
        append_kv(keys, values, self.key_rows, self.value_rows, self.places(slots), **self.scales())
        return self.handle

    def end(self, num_tokens: int) -> None:
        self.length += num_tokens

    def _prepare(self, key_states: Tensor, value_states: Tensor) -> None:
        """Makes the buffers fit tokens such as these, or raises ValueError."""

        def of(x: Tensor) -> tuple[object, ...]:
            return len(x), x.device, self._kind(x)

        if not torch.compiler.is_compiling():
            if self._shown:
                self._check_shown()
            if not self.is_initialized and self.length > 0:
                raise RuntimeError(
                    f"TreeCache: is_initialized of a layer was set to False, and the cache holds "
                    f"{self.length} tokens; forget all tokens with cache.reset"
                )
        if not self.is_initialized or (of(key_states) != of(self.key_rows) and self.length == 0):
            self.lazy_initialization(key_states, value_states)
        if len(key_states) != len(self.key_rows):
            raise ValueError(
                f"TreeCache: the cache holds {self.key_rows.shape[0]} sequences, got new tokens of "
                f"{key_states.shape[0]}; repeat the sequences with batch_repeat_interleave, or "
                "forget them with reset"
            )
        pairs = {"keys": (key_states, self.key_rows), "values": (value_states, self.value_rows)}
        for name, (new, held) in pairs.items():
            if self._kind(new) != self._kind(held):
                raise ValueError(
                    f"TreeCache: the cache holds {name} of (dtype, num_heads_kv, head_dim) = "
                    f"{self._kind(held)}, got {self._kind(new)}; convert them, or forget the "
                    "tokens with reset"
                )
        if self.key_rows.device != key_states.device:  # as `load` leaves them on the CPU
            with torch.inference_mode(False):  # see _reallocate
                moved = {name: x.to(key_states.device) for name, x in self.buffers().items()}
                self.hold(moved, self.dropped)
                if self.prefix is not None:
                    self.prefix.move(key_states.device)

    def _kind(self, x: Tensor) -> tuple[torch.dtype | None, int, int]:
        """The dtype (unless it is converted to 8 bits), num_heads_kv and head_dim."""
        return x.dtype if self.kv_dtype is None else None, x.shape[1], x.shape[3]

    @property
    def kv_length(self) -> int:
        """The number of keys that masks are made for."""
        return self.length

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        split = current_token_split()
        return self.length + (int(query_length) if split is None else split.length), 0

    def get_max_length(self) -> int:
        return -1

    get_max_cache_shape = get_max_length  # its name before transformers 5.17

    @property
    def shortest(self) -> int:
        """The smallest length at which the layer holds everything that the next query sees."""
        first = self.first
        return first + (self.window or 0) if first > 0 else 0

    def check_cut(self, length: int) -> None:
        """Raises ValueError if the layer cannot go back to the first `length` tokens."""
        if self.prefix is not None and length < self.prefix.length:
            raise ValueError(
                f"TreeCache: crop can remove {self.length - self.prefix.length} of these "
                f"{self.length} tokens, got {self.length - length}: all rows share the first "
                f"{self.prefix.length}; crop the cache that was shared, and share it again"
            )
        if length < self.shortest:
            raise ValueError(
                f"TreeCache: crop can remove {self.length - self.shortest} of these "
                f"{self.length} tokens, got {self.length - length}: layers with a sliding window "
                f"of {self.window} have forgotten the slots before {self.first}; copy.deepcopy the "
                "cache where it must go back further, or forget all tokens with reset"
            )

    def cut(self, length: int) -> None:
        """Forgets all tokens but the first `length`."""
        # Without this: rows read what the next tokens put in place of their document.
        if length < self.lent:
            size = self.key_rows.shape[2]
            self._reallocate(slice(0, self.shard.count(length) - self.dropped), size, self.dropped)
        self.length = length

    def reset(self) -> None:
        """Forgets all tokens and keeps the buffers for the next batch of the same size."""
        self._shown = {}
        if self.prefix is not None or self.lent > 0:
            self.is_initialized, self.prefix, self.lent = False, None, 0  # others read the buffers
        self.length = self.first = self.dropped = 0

    def reorder_cache(self, beam_idx: Tensor) -> None:
        length = self.length
        if length > 0:  # after a reset the buffers may be of another batch
            size = self.key_rows.shape[2]
            used = slice(0, min(self.shard.count(length) - self.dropped, size))
            self._reallocate(used, size, self.dropped, beam_idx.to(self.key_rows.device))

    batch_select_indices = reorder_cache

    def crop(self, *_: object) -> NoReturn:
        raise NotImplementedError(
            "TreeCache: a layer is not cropped by itself; crop all layers together with cache.crop"
        )

    def offload(self) -> None:
        raise NotImplementedError(
            "TreeCache: offloading is not supported; more ranks hold fewer keys each"
        )

    prefetch = offload

    def reserve(self, length: int) -> None:
        """Makes room for `length` global slots at the next allocation."""
        self.reserved = self.shard.count(length) - (self.dropped if self.prefix else 0)

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the buffers that this rank has allocated for the layer."""
        return sum(x.nbytes for x in self.buffers().values()) if self.is_initialized else 0

    def grow(self, num_slots: int) -> None:
        """Makes room for the first `num_slots` local slots, those before `dropped` aside."""
        size, capacity = self.key_rows.shape[2], self.capacity(num_slots)
        if size == 0 or size < capacity:
            self._reallocate(slice(0, size), capacity, self.dropped)

    def _reallocate(
        self, used: slice | Tensor, capacity: int, dropped: int, rows: Tensor | None = None
    ) -> None:
        """Replaces the buffers by ones with `capacity` slots, and copies into them the slots `used`
        of the sequences `rows`, or of all sequences."""

        batch = len(self.key_rows if rows is None else rows)

        def reallocate(x: Tensor) -> Tensor:
            new = x.new_empty((batch, x.shape[1], capacity, *x.shape[3:]))
            kept = x[:, :, used]
            begin = new[:, :, : kept.shape[2]]
            if rows is None:
                begin.copy_(kept)
            else:
                torch.index_select(kept, 0, rows, out=begin)
            if not torch.compiler.is_compiling():
                # A graph takes the size for a variable at once, not after the first time it grows.
                torch._dynamo.maybe_mark_dynamic(new, 2)
            return new

        # Tensors made in inference mode cannot be written to outside of it, where buffers live on.
        with torch.inference_mode(False), torch.no_grad():
            new = self._allocated(batch, capacity, reallocate)
            self.hold(new, dropped)

    def need(self, batch: int, capacity: int, num_layers: int) -> Need:
        """Buffers of this layer, and of others with rows of the same size."""
        world_size = self.shard.world_size
        return Need(self.buffers(), batch, capacity, num_layers, self.max_length, world_size)

    def _allocated(
        self, batch: int, capacity: int, reallocate: Callable[[Tensor], Tensor]
    ) -> dict[str, Tensor]:
        """The buffers that `reallocate` makes of the layer's, or torch.OutOfMemoryError."""
        old = self.buffers()
        if torch.compiler.is_compiling():
            return {name: reallocate(x) for name, x in old.items()}
        need = self.need(batch, capacity, 1 if self.is_initialized else self.allocates_for)
        need.check()
        try:
            return {name: reallocate(x) for name, x in old.items()}
        except RuntimeError as error:
            if is_out_of_memory(error):
                raise need.error() from None
            raise


def check_room(layers: Sequence[TreeCacheLayer], num_slots: int) -> None:
    """Raises torch.OutOfMemoryError where the device certainly has no room for the first
    `num_slots` local slots of those layers that keep most of them, before any has its buffers."""
    capacities = [layer.capacity(num_slots) - layer.key_rows.shape[2] for layer in layers]
    most = max(capacities)
    if most > 0:
        layer, count = layers[capacities.index(most)], capacities.count(most)
        layer.need(len(layer.key_rows), most, count).check()


def check_room_to_move(layers: Sequence[TreeCacheLayer], new: Shard, length: int) -> None:
    """Raises torch.OutOfMemoryError where a device certainly has no room to replace the first
    `length` slots of layers, one layer after the other, by those that `new` has of them."""
    for device in {layer.device for layer in layers}:
        own = [layer for layer in layers if layer.device == device]
        needed = _bytes_to_move(own, new, length)
        free = too_few(device, needed)
        if free is not None:
            token_bytes = sum(layer.need(1, 1, 1).num_bytes for layer in own)
            batch = len(own[0].key_rows)
            several = f", {batch} sequences" if batch > 1 else ""
            raise torch.OutOfMemoryError(
                f"TreeCache.reshard: {shown(new.layout)} gives this rank {new.count(length):,} of "
                f"{length:,} tokens, for which it needs {in_words(needed)} of {device} beyond what "
                f"it holds ({token_bytes:,} bytes each in {len(own)} layers, one of which is "
                f"copied at a time{several}), and {in_words(free)} are free; take a layout that "
                "gives it fewer, or save the cache and load it on more ranks"
            )


def _bytes_to_move(layers: Sequence[TreeCacheLayer], new: Shard, length: int) -> int:
    """The most bytes that `TreeCache.reshard` allocates in addition to the layers' buffers."""
    peak = grown = 0
    for layer in layers:
        rows = [len(x) * row_bytes(x) for x in layer.buffers().values()]
        sent, kept = (x.count(length) - x.count(layer.first) for x in (layer.shard, new))
        for i, row in enumerate(rows):
            # The slots of one buffer, and these by rank; what comes by rank, and all in order.
            peak = max(peak, grown + sum(rows[:i]) * kept + 2 * row * (sent + kept))
        after = copy.copy(layer)
        after.shard = new
        grown += sum(rows) * (kept - layer.key_rows.shape[2])
        if (capacity := after.capacity(new.count(length))) > kept:  # then all is copied once more
            peak = max(peak, grown + sum(rows) * capacity)
            grown += sum(rows) * (capacity - kept)
    return peak


def interrupted() -> RuntimeError:
    """The error of a forward pass after one that was interrupted."""
    forget = "crop(cache.get_seq_length())" if CROP_KEEPS else "crop(0)"
    return RuntimeError(
        "TreeCache: the last forward pass did not reach the last layer; forget it with "
        f"cache.{forget}, or all tokens with reset"
    )


def cropped_length(length: int, tokens_to_remove: int | Tensor) -> int:
    """The length after `crop`, or ValueError."""
    if isinstance(tokens_to_remove, Tensor) and tokens_to_remove.numel() == 1:
        tokens_to_remove = tokens_to_remove.reshape(())
    tokens = integer("TreeCache", "the argument of crop", tokens_to_remove)
    if tokens > 0 and not CROP_KEEPS:
        raise ValueError(
            f"TreeCache: crop takes the number of tokens to remove with a minus, got {tokens}; "
            f"cache.crop({-tokens}) removes {tokens} tokens"
        )
    if tokens >= 0 and CROP_KEEPS:
        return min(length, tokens)
    return max(0, length + tokens)
