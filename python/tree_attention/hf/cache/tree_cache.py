# SPDX-License-Identifier: BSD-3-Clause
"""A transformers cache that is spread over ranks: each keeps its share of the slots."""

import copy
from collections.abc import Iterator, Sequence
from os import PathLike
from typing import Any

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers.configuration_utils import PreTrainedConfig
from typing_extensions import Unpack

from ..._memory import in_words
from ..._numbers import integer, shown
from ...exchange import Communicator, Signature, on_every_rank
from ...sharding import ShardLayout
from ...weights.text import text_config
from ..options import KV_DTYPES, CacheOptions, blocks_of, takes_cache_options, with_defaults
from .build import keeps_state, new_layers
from .growing import TreeCacheLayer, check_room_to_move, cropped_length, interrupted
from .shard import Moves, Shard
from .share import shared_rows
from .snapshot import files as snapshot
from .snapshot.index import describe_model, kinds_of_states, layers_of
from .states import StateCache


class TreeCache(StateCache):
    """The key/value cache of a model, with its slots spread over the ranks of a group.

    Every rank makes one and passes it by `**{CACHE_NAME: cache}` to a model whose attention is
    `"tree_attention"`; `enable` does both. All ranks run the same model on the same inputs, each
    keeps the slots that `layout` gives it, and attention is merged over the group. A slot is a
    position in the cache, left padding included. Layers with a sliding window keep the slots of the
    last window and 128 more, by which `crop` can go back. Of multi-head latent attention it holds
    latents alone, and `enable` has the model attend to these. Where an index chooses the keys of a
    query, layers keep its keys too, in the model's dtype. Layers that keep a state, as in
    linear attention, are transformers' own, the same on every rank; a cache with such layers cannot
    be cropped. `copy.deepcopy` copies the keys and values and keeps the group, so that a
    common prefix needs to be computed only once.

    Args:
        config: the configuration of the model, which says the number and kind of layers. If the
            model takes text and images, its configuration of the text counts.
        group: process group or `Communicator`, by default the world; where torch.distributed is
            not initialised, a world of one.
        layout: which rank holds which slot, by default `BlockCyclic(world_size, 64)`.
        growth: number of local slots by which the buffers of a layer grow, without `max_length`.
        Everything else: see `CacheOptions`.

    Raises:
        TypeError: there is no such option, or `layout` is no layout.
        ValueError: the layers of the model cache anything but keys and values, latents or states of
            their own, `layout` is for another world size or ends before `max_length`, or an option
            is out of range, or not for these layers or this layout.

    For example::

        import torch
        from transformers import AutoModelForCausalLM
        from tree_attention import hf

        model = hf.enable(AutoModelForCausalLM.from_pretrained("examples/passkey-llama"))
        cache = hf.TreeCache(model.config, kv_dtype="int8")
        ids = torch.tensor([[5, 6, 7]])
        model.generate(ids, **{hf.CACHE_NAME: cache}, max_new_tokens=4, do_sample=False)
        print(cache.get_seq_length())  # 6
    """

    @takes_cache_options
    def __init__(
        self,
        config: PreTrainedConfig,
        group: ProcessGroup | Communicator | None = None,
        layout: ShardLayout | None = None,
        *,
        growth: int = 1024,
        **options: Unpack[CacheOptions],
    ) -> None:
        options = with_defaults("TreeCache", options)
        if not isinstance(config, PreTrainedConfig):
            raise TypeError(
                "TreeCache: config must be a configuration of transformers, such as model.config, "
                f"got a {type(config).__name__}"
            )
        growth, max_length = integer("TreeCache", "growth", growth, 1), options["max_length"]
        if max_length is not None:
            max_length = integer("TreeCache", "max_length", max_length, 1)
        self.max_length = max_length
        name = options["kv_dtype"]
        if name is not None and name not in KV_DTYPES:
            names = ", ".join(map(repr, KV_DTYPES))
            raise ValueError(f"TreeCache: kv_dtype must be None or one of {names}, got {name!r}")
        kv_dtype = None if name is None else KV_DTYPES[name]
        self.near_tokens = _near_tokens(options)
        self.shard = Shard(
            group, layout, options["strategy"], options["timeout"], blocks_of(options)
        )
        if self.has_far_keys and self.shard.blocks.size:
            raise self.shard.blocks.refusal("TreeCache", "is not supported with far='cpu'")
        config = text_config(config)
        self.model = describe_model(config)
        sizes = growth, kv_dtype, max_length, self.near_tokens
        super().__init__(new_layers(config, self.shard, *sizes), config)
        kv = [i for i, layer in enumerate(self.layers) if isinstance(layer, TreeCacheLayer)]
        self._first_kv, self._last_kv = kv[0], kv[-1]
        self.note_layers()
        self._is_half_cut = False  # whether `crop` has reached some layers and not yet all

    def note_layers(self) -> None:
        """Notes which layers there are; none of them may be replaced."""
        self._made = self.kv_layers

    def __repr__(self) -> str:
        layers = self.kv_layers
        first, shard = layers[0], self.shard
        dtype = first.key_rows.dtype if first.is_initialized else self.kv_dtype
        kind = "" if dtype is None else f", {str(dtype).removeprefix('torch.')}"
        most = "" if self.max_length is None else f" of max_length {self.max_length:,}"
        batch = len(first.key_rows) if first.is_initialized else 0
        several = f" in {batch} sequences" if batch > 1 else ""
        return (
            f"{type(self).__name__}({first.length:,} tokens{most}{several}, {len(layers)} layers"
            f"{kind}, rank {shard.rank} of {shard.world_size}, {in_words(self.num_bytes)} on this "
            f"rank)"
        )

    @property
    def kv_layers(self) -> list[TreeCacheLayer]:
        """The layers that have keys and values, whose slots are spread over the ranks."""
        return [layer for layer in self.layers if isinstance(layer, TreeCacheLayer)]

    @property
    def state_layers(self) -> list[Any]:
        """The layers that keep a state of all tokens."""
        return [layer for layer in self.layers if keeps_state(layer)]

    def __iter__(self) -> Iterator[tuple[Tensor | None, Tensor | None, Tensor | None]]:
        """Keys, values and window of each layer, as `DynamicCache` gives them."""
        for layer in self.layers:
            window = getattr(layer, "window", None)
            yield layer.keys, layer.values, None if window is None else torch.tensor(window)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        # Before the first layer appends: after that nobody knows which tokens all layers hold. With
        # max_length the first layer finds it out by itself.
        if layer_idx == self._first_kv and self._is_half_cut:
            raise interrupted()
        if layer_idx == self._first_kv and not torch.compiler.is_compiling():
            self._check_layers("update")
        if layer_idx == self._first_kv and self.max_length is None:
            first, last = self.layers[layer_idx], self.layers[self._last_kv]
            if first.length != last.length or first.is_torn:
                raise interrupted()
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def reserve(self, length: int) -> None:
        """Makes room for `length` tokens at the next allocation, so that a prompt of known length
        is stored without growing step by step."""
        for layer in self.kv_layers:
            layer.reserve(length)

    def reset(self) -> None:
        super().reset()
        self._is_half_cut = False
        for i, layer in enumerate(self.layers):
            if keeps_state(layer):  # of any batch next time, as the others
                self.layers[i] = type(layer)(number_of_states=layer.number_of_states)

    def batch_select_indices(self, indices: Tensor) -> None:
        layer = self.kv_layers[0]
        if layer.length > 0:  # any index of a tensor will do, as in transformers
            rows = torch.arange(len(layer.key_rows), device=layer.device)[indices]
            self.reorder_cache(rows)  # type: ignore[arg-type]  # the one that states have too

    def batch_repeat_interleave(self, repeats: int) -> None:
        layer = self.kv_layers[0]
        if layer.is_initialized:
            rows = torch.arange(len(layer.key_rows), device=layer.device)
            times = integer("TreeCache", "repeats", repeats)
            self.batch_select_indices(rows.repeat_interleave(times))

    def share(self, batch: int) -> "TreeCache":
        """A cache of `batch` rows that begin with all tokens of this one, which are stored once.

        Equivalent, with a copy for each row::

            shared = copy.deepcopy(cache)
            shared.batch_repeat_interleave(batch)

        Local, not collective: each rank makes its part. Attention reads the keys of these tokens
        once for all rows. Layers with a window or a state copy what they keep, as do all layers of
        a model that chooses its keys by an index. Both caches go on independently, and more may be
        made. The result can be cropped down to these tokens, to ask again, and `reorder_cache`,
        `batch_select_indices` and `copy.deepcopy` touch the rows' own tokens alone; it cannot be
        saved, resharded or shared.

        Args:
            batch: at least 1.

        Raises:
            TypeError, ValueError: `batch` is no such integer; this cache holds no tokens, several
                sequences, or a part of a forward pass, was made by `share`, or has a max_length,
                far keys or attention that is cut at blocks.

        For example::

            import torch
            from transformers import AutoModelForCausalLM
            from tree_attention import hf

            model = hf.enable(AutoModelForCausalLM.from_pretrained("examples/passkey-llama"))
            cache = hf.TreeCache(model.config)
            with torch.no_grad():
                model(torch.tensor([[5, 6, 7, 8]]), **{hf.CACHE_NAME: cache})
            texts = torch.tensor([[5, 6, 7, 8, 9], [5, 6, 7, 8, 10]])
            shared = cache.share(2)
            model.generate(texts, **{hf.CACHE_NAME: shared}, max_new_tokens=4, do_sample=False)
            print(cache.get_seq_length(), shared.get_seq_length())  # 4 8
        """
        batch = integer("TreeCache", "batch of share", batch, 1)
        self.check_not_shared("share")
        self.check_not_far("share")
        if self.common_length("share") == 0:
            raise ValueError(
                "TreeCache.share: the cache holds no tokens; give them to a model first"
            )
        num_rows = len(self.kv_layers[0].key_rows)
        if num_rows > 1:
            raise ValueError(
                f"TreeCache.share: the cache must hold one sequence, got {num_rows}; take one with "
                "batch_select_indices, in a copy.deepcopy"
            )
        if self.max_length is not None:
            raise ValueError(
                f"TreeCache.share: the cache has max_length {self.max_length}, and what is shared "
                "cannot be of fixed size; make the cache without"
            )
        if self.shard.blocks.size:
            words = "is not supported, as rows attend to what they share in another call"
            raise self.shard.blocks.refusal("TreeCache.share", words)
        new = copy.copy(self)
        is_chosen_from = any(layer.index_columns > 0 for layer in self.kv_layers)
        new.layers = [shared_rows(layer, batch, is_chosen_from) for layer in self.layers]
        new.note_layers()
        return new

    @property
    def is_shared(self) -> bool:
        """True where `share` made this cache, and it was not reset."""
        return any(layer.prefix is not None for layer in self.kv_layers)

    def check_not_shared(self, op: str) -> None:
        """Raises ValueError where rows share their first tokens, which `op` does not support."""
        if self.is_shared:
            raise ValueError(
                f"TreeCache.{op}: the rows of this cache share their first tokens; call it on the "
                "cache that was shared"
            )

    @property
    def has_far_keys(self) -> bool:
        """True where older keys lie in the host's memory."""
        return self.near_tokens is not None

    def check_not_far(self, op: str) -> None:
        """Raises ValueError where older keys lie on the host, which `op` does not support."""
        if self.has_far_keys:
            raise ValueError(
                f"TreeCache.{op}: is not supported with far='cpu', where older keys lie on the "
                "host; make the cache without far"
            )

    def activate_past_recording(self) -> None:
        """Refuses decoding that takes tokens back, before which transformers calls this."""
        if self.state_layers:
            raise NotImplementedError(
                "generate: prompt lookup and assisted decoding take tokens back, and the layers of "
                "this model that keep a state cannot; generate without them"
            )

    def crop(self, tokens_to_remove: int | Tensor) -> None:
        """Forgets the last `-tokens_to_remove` tokens of every layer, or raises and keeps all.

        A forward pass that did not reach the last layer is forgotten first: the tokens of the cache
        are those that all layers hold.

        Raises:
            ValueError: layers with a sliding window have forgotten what would then be seen, or
                layers keep a state, which does not tell what it was, or which has the tokens of a
                forward pass that was interrupted.
        """
        layers = self.kv_layers
        lengths = [layer.length for layer in layers]
        length = min(lengths)
        kept = cropped_length(length, tokens_to_remove)
        is_interrupted = max(lengths) > length or any(layer.pending for layer in layers)
        if self.state_layers and (is_interrupted or self._is_in_pass):
            raise ValueError(
                "TreeCache: crop cannot forget the forward pass that did not reach the last layer, "
                "as some layers keep a state that has its tokens; forget all tokens with reset"
            )
        if self.state_layers and kept < length:
            raise ValueError(
                f"TreeCache: crop cannot take back {length - kept} tokens, as some layers keep a "
                "state of all tokens and not the tokens; copy.deepcopy the cache to which to return"
            )
        for layer in layers:
            layer.check_cut(kept)
        self._is_half_cut = True
        for layer in layers:
            layer.cut(kept)
        self._is_half_cut = False

    def save(
        self, directory: str | PathLike[str], tokens: Tensor | Sequence[int] | None = None
    ) -> None:
        """Writes the keys and values of all ranks to a directory, from which `load` reads them.

        Collective. Each rank writes one safetensors file, the first one the index. What was saved
        there before is replaced as a whole at the end, or stays if this does not get that far.
        Needs memory on the host for a second copy of this rank's keys and values.

        Args:
            directory: a path at which all ranks of the group reach the same directory, and no
                other group writes. It is made if need be.
            tokens: the ids that the cache holds, of one sequence: a list or a tensor `[length]` or
                `[1, length]`, the same on every rank. They are kept for `find_prefix`.

        Raises:
            TypeError: `tokens` are no such ids.
            ValueError: the cache holds no tokens, is inside a forward pass, or has far keys or a
                layout that is none of this package; or it holds another number of tokens, or
                several sequences.
            OSError: a file cannot be written, or the first rank does not find another rank's.
            ExchangeError: one of that happened on another rank, or a rank was lost.
        """
        snapshot.save(self, directory, tokens)

    @classmethod
    @takes_cache_options
    def load(
        cls,
        directory: str | PathLike[str],
        config: PreTrainedConfig,
        group: ProcessGroup | Communicator | None = None,
        layout: ShardLayout | None = None,
        *,
        growth: int = 1024,
        **options: Unpack[CacheOptions],
    ) -> "TreeCache":
        """A cache with the keys and values that `save` wrote, on any number of ranks.

        Collective. Each rank reads the files that hold its slots, and compares them with their
        digests. They are on the CPU until a model on another device appends to them, and states of
        layers on torch's default device, which must be the model's. The weights of the model are
        not compared: they must be those that computed the keys.

        Equivalent, with the model run again::

            cache = TreeCache(config, group, layout)
            model(input_ids, **{CACHE_NAME: cache})

        Args:
            directory: what `save` was given, at a path by which this rank reaches it.
            config, group, layout, growth: see `TreeCache`; world size and layout may be new.
            kv_dtype: "int8" or "fp8" quantises what was saved otherwise; None: as it was saved.
            Everything else: see `CacheOptions`.

        Raises:
            OSError: a file is missing, or removed by one save after another, or no regular file.
            ValueError: a file is damaged, or of another model, version or part of the heads; an
                argument is wrong, or more tokens were saved than `max_length`, or only the last
                slots of layers with a sliding window for a cache that needs all.
            ExchangeError: one of that happened on another rank, or a rank was lost.
        """
        cache = cls(config, group, layout, growth=growth, **options)
        cache.check_not_far("load")
        return snapshot.restore(cache, directory)

    def reshard(self, layout: ShardLayout) -> None:
        """Moves the slots to the ranks that `layout` gives them, inside the group and in place.

        Collective. Needs memory for three copies of one layer, and for the tokens that this rank
        gets more of. An enabled model is told by `enable(model, layout=layout)`. A lost rank makes
        the cache unusable: save it first where that matters. For another world size, `save` and
        `load`.

        Raises:
            ValueError: `layout` is for another world size, or has no rank for a slot in use; or the
                cache has far keys.
            torch.OutOfMemoryError: this rank certainly has no room, and nothing was moved.
            ExchangeError: one of that happened on another rank, or the ranks differ, and nothing
                was moved; or a rank was lost.
        """
        old = self.shard

        def check() -> tuple[Signature, tuple[Shard, int]]:
            length = self.common_length("reshard")
            new = old.with_layout(layout)
            new.check_holds(self.max_length or length)
            layouts = ("layout of the cache", old.layout), ("layout", layout)
            signature = *self.signature("reshard"), *layouts
            if old.world_size > 1:
                layers = [layer for layer in self.kv_layers if layer.is_initialized]
                layers.sort(key=lambda layer: layer.first)  # as they are moved below
                check_room_to_move(layers, new, length)
            return signature, (new, length)

        (new, length), _ = on_every_rank("TreeCache.reshard", old.comm, old.timeout, check)
        self.shard = new
        firsts = {layer.first for layer in self.kv_layers if old.world_size > 1}
        # Tensors made in inference mode could not be written to outside of it.
        with torch.inference_mode(False), torch.no_grad():
            for first in sorted(firsts):
                self._move(old, first, length)
        for layer in self.kv_layers:
            layer.shard = new

    def _move(self, old: Shard, first: int, length: int) -> None:
        """Gives the slots of [first, length) to the layers that begin there."""
        new, count = self.shard, length - first
        moves = Moves(old, (old.layout, first), (new.layout, first), count)
        dropped = new.count(first)
        places = (("slots", (first, length)), ("layouts", (old.layout, new.layout)))
        for layer in self.kv_layers:
            if layer.first != first or not layer.is_initialized:
                continue
            held, moved = layer.held(), {}
            for name, x in layer.buffers().items():
                kind = (("dtype", x.dtype), ("shape", (*x.shape[:2], *x.shape[3:])))
                moved[name] = moves.apply("reshard", (*places, *kind), x[:, :, held])
            layer.first, layer.shard = first, new  # `hold` makes its buffers for these
            layer.hold(moved, dropped)
            layer.grow(new.count(length))

    def _check_layers(self, op: str) -> None:
        """Refuses a cache whose layers with keys have changed since it was made."""
        shards = {self.shard, *(layer.shard for layer in self._made)}
        if self.kv_layers != self._made or len(shards) > 1:
            raise RuntimeError(
                f"TreeCache.{op}: layers of the cache, or its shard, were replaced, removed or put "
                "in another order, and these count tokens together; make another TreeCache, "
                "copy.deepcopy this one before it is changed, or load one"
            )

    def common_length(self, op: str) -> int:
        """The number of slots in use, which all layers have in common between forward passes."""
        self._check_layers(op)
        layers = self.kv_layers
        lengths = {layer.length for layer in layers}
        if len(lengths) > 1:
            raise ValueError(
                f"TreeCache.{op}: the layers hold {min(lengths)} to {max(lengths)} tokens; call it "
                "between forward passes, after one that ended"
            )
        length = max(lengths, default=0)
        # Layers of fixed size share their length, and the first layer changes before its own.
        is_inside = any(layer.pending or length < layer.shortest for layer in layers)
        is_inside = is_inside or self._is_in_pass
        if is_inside or self._is_half_cut:
            raise ValueError(
                f"TreeCache.{op}: a forward pass has not reached the last layer; call it after one "
                "that ended, or forget that pass with crop, or all tokens with reset"
            )
        return length

    def signature(self, op: str) -> Signature:
        """The facts about the slots that ranks compare before `op`."""
        self.check_not_shared(op)
        self.check_not_far(op)
        return (
            ("length", self.common_length(op)),
            ("layers", layers_of(self)),
            ("states", kinds_of_states(self)),
            ("first slots of the layers", [layer.first for layer in self.kv_layers]),
        )

    @property
    def kv_dtype(self) -> torch.dtype | None:
        """The dtype of keys and values of 8 bits; None: the model's."""
        return self.kv_layers[0].kv_dtype

    @property
    def num_bytes(self) -> int:
        """Size in bytes of the buffers that this rank has allocated for keys and values, with those
        that rows share, once."""
        shared = (layer.prefix for layer in self.kv_layers)
        own = sum(layer.num_bytes for layer in self.kv_layers)
        return own + sum(prefix.num_bytes for prefix in shared if prefix is not None)


def _near_tokens(options: CacheOptions) -> int | None:
    """The option of that name, None where all keys stay on one device; or an error."""
    far, near_tokens = options["far"], options["near_tokens"]
    if far is None:
        if near_tokens is not None:
            raise ValueError(
                f"TreeCache: near_tokens is for far='cpu', got near_tokens={shown(near_tokens)} "
                "and far=None"
            )
        return None
    if far != "cpu":
        raise ValueError(f"TreeCache: far must be None or 'cpu', got {shown(far)}")
    if near_tokens is None:
        raise ValueError(
            "TreeCache: far='cpu' needs near_tokens, the number of newest tokens whose keys stay "
            "on the GPU, for example 8192, got None"
        )
    if options["max_length"] is not None:
        raise ValueError(
            f"TreeCache: far='cpu' is not supported with max_length, got {options['max_length']}, "
            "as a cache of fixed size leaves the host nothing to do; leave one of them out"
        )
    return integer("TreeCache", "near_tokens", near_tokens, 1)
