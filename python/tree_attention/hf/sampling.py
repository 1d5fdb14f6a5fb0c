# SPDX-License-Identifier: BSD-3-Clause
"""Sampling that stays together: every rank draws every token itself."""

from datetime import timedelta

import torch
from torch import Tensor
from torch.distributed import ProcessGroup
from transformers import LogitsProcessor

from .._numbers import integer
from ..exchange import DEFAULT_TIMEOUT, Communicator, get_communicator


def seed_ranks(
    group: ProcessGroup | Communicator | None = None,
    seed: int | None = None,
    timeout: float | timedelta = DEFAULT_TIMEOUT,
) -> None:
    """Sets the random generators of every rank to the state that the group's first rank has.

    Every rank calls it before sampling. It covers the generator of the CPU and that of the current
    CUDA device. Ranks that draw the same number of random values from then on draw the same values.

    Args:
        group: process group or `Communicator`, by default the world.
        seed: first calls `torch.manual_seed(seed)`; None: the generators go on from where they are.
        timeout: seconds after which a lost rank becomes an `ExchangeError`.

    Raises:
        ExchangeError: a rank did not call it within `timeout` seconds.

    For example::

        import torch
        from tree_attention import hf

        hf.seed_ranks(seed=1)  # on every rank, before `generate` samples
        print(torch.initial_seed())  # 1
    """
    comm = get_communicator(group)
    seconds = comm.seconds_of("seed_ranks", timeout)
    if seed is not None:
        torch.manual_seed(integer("seed_ranks", "seed", seed, -(1 << 63), (1 << 64) - 1))
    torch.set_rng_state(_of_first_rank(comm, torch.get_rng_state(), seconds))
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(_of_first_rank(comm, torch.cuda.get_rng_state(), seconds))


class SynchronizeLogits(LogitsProcessor):
    """Replaces the logits of every rank by the logits of the group's first rank.

    It is for ranks whose devices round differently: equal logits and equal random generators give
    equal tokens. `enable(model, synchronize_logits=True)` adds it to every generation.

    Args:
        group: process group or `Communicator`, by default the world.
        timeout: seconds after which a lost rank becomes an `ExchangeError`.

    For example::

        import torch
        from tree_attention import hf

        scores = hf.SynchronizeLogits()(torch.tensor([[1]]), torch.randn(1, 8))
        print(scores.shape)  # torch.Size([1, 8])
    """

    def __init__(
        self,
        group: ProcessGroup | Communicator | None = None,
        timeout: float | timedelta = DEFAULT_TIMEOUT,
    ) -> None:
        self.comm = get_communicator(group)
        self.timeout = self.comm.seconds_of("SynchronizeLogits", timeout)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return _of_first_rank(self.comm, scores, self.timeout)


def _of_first_rank(comm: Communicator, tensor: Tensor, seconds: float) -> Tensor:
    if comm.world_size == 1:
        return tensor
    device = comm.meeting_device(tensor.device)
    message = tensor.to(device, copy=True, memory_format=torch.contiguous_format)
    signature = (("dtype and shape", f"{tensor.dtype} {list(tensor.shape)}"),)
    link = comm.link

    def run(deadline: float) -> None:
        link.exchange_call_ids(deadline)
        link.broadcast(message, deadline)

    with comm.begin("broadcast", seconds) as call:
        call.run(signature, run)
    return message.to(tensor.device)
