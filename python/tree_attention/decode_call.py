# SPDX-License-Identifier: BSD-3-Clause
"""The arguments of a collective decoding call, checked and as `lean_decode` and ranks need them."""

from collections.abc import Container, Mapping
from typing import Any

from torch import Tensor

from .exchange import (
    MERGE_DEFAULTS,
    MERGE_SCHEMA,
    Communicator,
    ExchangeOptions,
    MergeOptions,
    Signature,
    fake_merge,
)
from .ops import check_decode
from .options import (
    ATTENTION_DEFAULTS,
    ATTENTION_SCHEMA,
    OF_QUERIES,
    AttentionOptions,
    check_no_vmap,
    check_option_names,
    check_tensors,
    check_values,
    fields_of_options,
    split_options,
    with_numbers,
)


class DecodeOptions(AttentionOptions, MergeOptions, total=False):
    """Keyword arguments of `tree_decode` that other functions have too."""


DECODE_DEFAULTS = {**MERGE_DEFAULTS, **ATTENTION_DEFAULTS}
DECODE_SCHEMA = f"{MERGE_SCHEMA}, {ATTENTION_SCHEMA}"


def fake_decode(
    q: Tensor, v_local: Tensor, group: Communicator, **options: Any
) -> tuple[Tensor, Tensor]:
    """Outputs of `tree_decode` from shapes alone, for graphs."""
    merge, _ = split_options(options, MERGE_DEFAULTS)
    return fake_merge(q, v_local.shape[3], group, merge)


class DecodeCall:
    """One rank's part of a call of `op`: its arguments, and what ranks have to have in common.

    Raises:
        TypeError: q, k or v is no tensor, or an option is no number or does not exist.
        ValueError: q, k or v has not four axes, or an option of the merge cannot be followed.
    """

    def __init__(
        self,
        op: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        key_ranges: Tensor | None,
        options: Mapping[str, Any],
        merge_options: Container[str] = (),
    ) -> None:
        """`merge_options`: the options of `op` that `lean_decode` does not have."""
        self.op, self.q, self.k, self.v, self.key_ranges = op, q, k, v, key_ranges
        check_tensors(op, q=q, k_local=k, v_local=v)
        check_no_vmap(op, q=q, k_local=k, v_local=v)
        merging, attention = split_options(options, merge_options)
        check_option_names(op, attention)
        self.attention: AttentionOptions = with_numbers(op, attention) if attention else attention
        if not q.dim() == k.dim() == v.dim() == 4:
            check_decode(q, k, v, **self.attention)  # which says which of them
        self.exchange = ExchangeOptions.of(op, merging, q.dtype)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the output `o`."""
        return (*self.q.shape[:3], self.v.shape[3])

    @property
    def arguments(self) -> dict[str, Any]:
        """All of `lean_decode`'s, by name."""
        own = {"q": self.q, "k": self.k, "v": self.v, "key_ranges": self.key_ranges}
        return {**own, **self.attention}

    def check(self) -> None:
        """Raises what `lean_decode` would, before anything is computed or sent."""
        check_decode(**self.arguments)
        check_values(self.op, "q", self.q)

    @property
    def signature(self) -> Signature:
        """Fields that must be equal on all ranks, in addition to the fields of the merge."""
        return (
            ("num_heads_kv", self.k.shape[1]),
            ("head_dim", self.q.shape[3]),
            ("dtype", self.q.dtype),
            *fields_of_options(self.attention),
        )

    @property
    def queries(self) -> tuple[Tensor, ...]:
        """Tensors whose values must be equal on all ranks."""
        arguments = self.arguments
        given = [x for name in OF_QUERIES if (x := arguments.get(name)) is not None]
        # As they are in memory: torch.view_as_real of a conjugate has the other sign there.
        return tuple(x.resolve_neg() for x in given)
