# SPDX-License-Identifier: BSD-3-Clause
"""Digests of the weights of a model, by which ranks compare what they have loaded."""

import hashlib
from collections.abc import Iterable, Iterator, MutableMapping
from operator import itemgetter

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils.weak import WeakIdKeyDictionary

from .._loader import load
from .split import split_tensors

_SAMPLES_PER_PARAMETER = 8
_HEX_DIGITS = 16
# How much of a device's tensor the host reads at a time.
_PIECE_BYTES = 64 << 20
# The digests of tensors that were compared before, with their versions and addresses.
_digests: MutableMapping[Tensor, tuple[tuple[int, int] | None, str]] = WeakIdKeyDictionary()


def digest(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()[:_HEX_DIGITS]


def digest_parameters(model: torch.nn.Module) -> str:
    """The digest of a model's parameters, see `digest_tensors`; of split ones, of the whole."""
    split, of_whole = split_tensors(model)
    return of_whole + digest_tensors(_whole(model.named_parameters(), split))


def digest_buffers(model: torch.nn.Module) -> str:
    """The digest of a model's buffers, also of those that are never saved."""
    split, _ = split_tensors(model)
    return digest_tensors(_whole(model.named_buffers(), split))


def _whole(
    tensors: Iterable[tuple[str, Tensor]], split: frozenset[str]
) -> Iterator[tuple[str, Tensor]]:
    """The tensors that every rank holds whole, so no DTensor. A tensor of a subclass, for example
    a quantised weight, is replaced by the tensors that it is made of."""
    for name, tensor in tensors:
        if name in split or isinstance(tensor, DTensor) or tensor.is_meta:
            continue
        if hasattr(tensor, "__tensor_flatten__"):
            inner = tensor.__tensor_flatten__()[0]
            yield from _whole(((f"{name}.{x}", getattr(tensor, x)) for x in inner), split)
        else:
            yield name, tensor


@torch.no_grad()
def digest_tensors(tensors: Iterable[tuple[str, Tensor]], *, reads_all: bool = True) -> str:
    """The digest of the names, shapes and values of tensors, or of a few evenly spaced values if
    not all of them are to be read."""
    sha = hashlib.sha256()
    samples = []
    for name, tensor in sorted(tensors, key=itemgetter(0)):
        values = _digest_of(tensor) if reads_all else ""
        sha.update(f"{name} {tensor.dtype} {list(tensor.shape)} {values}".encode())
        # Only these show what was written through `.data`, which changes no version.
        step = max(1, tensor.numel() // _SAMPLES_PER_PARAMETER)
        samples.append(tensor.flatten()[::step][:_SAMPLES_PER_PARAMETER].cpu().float())
    if samples:
        sha.update(to_bytes(torch.cat(samples)))
    return sha.hexdigest()[:_HEX_DIGITS]


def _digest_of(tensor: Tensor) -> str:
    """The digest of all values of a tensor: a second for 16 GB on the CPU."""
    # It stands until the tensor was written to.
    is_tracked = not tensor.is_inference()
    state = (tensor._version if is_tracked else 0, tensor.data_ptr())
    known, found = _digests.get(tensor, (None, ""))
    if known != state:
        pieces = tensor.detach().flatten().view(torch.uint8).split(_PIECE_BYTES)
        found = digest(repr([load().digest([piece.cpu()]) for piece in pieces]).encode())
        if is_tracked:
            _digests[tensor] = state, found
    return found


def to_bytes(x: Tensor) -> bytes:
    """The elements of `x` as they lie in memory."""
    return x.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().tobytes()
