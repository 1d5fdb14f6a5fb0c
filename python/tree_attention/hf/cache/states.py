# SPDX-License-Identifier: BSD-3-Clause
"""A cache that refuses a forward pass after one that moved on only a part of its states."""

from typing import Any

import torch
import transformers
from packaging.version import Version
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.configuration_utils import PreTrainedConfig

from .build import goes_on_from_states, keeps_state
from .growing import TreeCacheLayer

# A layer with a state asks for it by `get_conv_state` since transformers 5.21. Before that it asks
# whether there is one: in OLMo Hybrid without its number, in Jamba of 5.14 twice.
_ASKS_WHETHER = Version("5.15") <= Version(transformers.__version__) < Version("5.21")


class StateCache(Cache):
    """A cache that follows the forward passes of a model with layers that keep a state.

    Layers with keys know how many tokens they hold. A state does not tell which tokens it has, and
    a forward pass of one token moves it on in place, without a call of the cache.
    """

    layers: list[Any]

    def __init__(self, layers: list[Any], config: PreTrainedConfig) -> None:
        super().__init__(layers=layers)
        states = [i for i, layer in enumerate(layers) if keeps_state(layer)]
        kept = [i for i, layer in enumerate(layers) if isinstance(layer, TreeCacheLayer)] + states
        self._first, self._last = min(kept), max(kept)
        self._has_states = len(states) > 0
        self._goes_on, self._name = goes_on_from_states(config), config.model_type
        # Other layers with a state keep no recurrent one.
        self._ends_with_recurrent_state = (
            self._last in states and config.layer_types[self._last] == "linear_attention"
        )
        # With states: whether a forward pass has reached some layers and not yet the last one.
        self._is_in_pass = False
        self._asks = False  # whether the layers ask for a state before they move it on
        self._num_tokens = 0  # of the last forward pass, from the first layer with keys on

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        self._check_begin(layer_idx)
        handles = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        if not torch.compiler.is_compiling():
            self._num_tokens = key_states.shape[2]
        self._note(layer_idx)
        return handles

    def get_mask_sizes(self, query_length: int, layer_idx: int) -> tuple[int, int]:
        """Called by every forward pass before its first layer."""
        is_checked = not (self._goes_on or self._is_in_pass or torch.compiler.is_compiling())
        if is_checked and query_length > 1:
            length = int(self.get_seq_length())
            if length > 0:
                raise NotImplementedError(
                    f"TreeCache: layers of {self._name!r} keep a state, which a forward pass of "
                    f"several tokens forgets in transformers {transformers.__version__}; this one "
                    f"has {query_length} tokens and the cache {length}: give them one by one, or "
                    "the whole text to an empty cache, without prefill_chunk_size"
                )
        return super().get_mask_sizes(query_length, layer_idx)

    def get_conv_state(self, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        self._begin_state(layer_idx)
        return super().get_conv_state(layer_idx, *args, **kwargs)

    def has_previous_state(self, layer_idx: int | None = None, *args: Any, **kwargs: Any) -> bool:
        if _ASKS_WHETHER and layer_idx is not None:
            self._begin_state(layer_idx)
        return super().has_previous_state(layer_idx, *args, **kwargs)

    def update_conv_state(
        self, conv_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        if not self._asks:
            self._check_begin(layer_idx)
        states = super().update_conv_state(conv_states, layer_idx, *args, **kwargs)
        self._note(layer_idx, is_end=not self._ends_with_recurrent_state)
        return states

    def update_recurrent_state(
        self, recurrent_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> Any:
        states = super().update_recurrent_state(recurrent_states, layer_idx, *args, **kwargs)
        self._note(layer_idx)
        return states

    def reset(self) -> None:
        super().reset()
        self._is_in_pass = False

    def _begin_state(self, layer_idx: int) -> None:
        """Records a state read; for one-token steps the cache gets no other call."""
        self._check_begin(layer_idx)
        if not torch.compiler.is_compiling():
            self._asks = True
            self._note(layer_idx, is_end=self._num_tokens == 1)

    def _check_begin(self, layer_idx: int) -> None:
        """Refuses a forward pass after one that moved on only a part of the states."""
        # A graph is a whole pass, and would be compiled again wherever this changes.
        if torch.compiler.is_compiling():
            return
        if self._is_in_pass and layer_idx == self._first:
            raise RuntimeError(
                "TreeCache: the last forward pass did not reach the last layer, and some layers "
                "keep a state that has its tokens; forget all tokens with reset"
            )

    def _note(self, layer_idx: int, is_end: bool = True) -> None:
        """Notes that a layer has the tokens of this forward pass."""
        if not torch.compiler.is_compiling() and self._has_states:
            self._is_in_pass = not (is_end and layer_idx == self._last)
