# SPDX-License-Identifier: BSD-3-Clause
"""Do all processors round alike, and do messages arrive where they should? Tests at first use."""

import functools
import hashlib

import torch
from torch import Tensor

from ...ops import merge_states
from ..transport.process_group import Link

_NUM_PARTS, _NUM_ROWS, _HEAD_DIM = 7, 64, 16
# As long as a decoding step's message of 32 heads: libraries choose algorithms by size.
_MESSAGE_VALUES = 4096


@functools.lru_cache(maxsize=16)
def merge_digest(device: torch.device) -> str:
    """Digest of a merge of fixed states on `device`, far apart and near, one in eight empty.

    Ranks that merge the same states promise the same bits, which different kinds of processors
    keep only if they round alike.
    """
    # Integers and a division by a power of two: the same states everywhere.
    counts = torch.arange(_NUM_PARTS * _NUM_ROWS * (_HEAD_DIM + 1), dtype=torch.int64, device="cpu")
    numbers = ((counts * 2654435761 % 65536) - 32768).float() / 4096
    states = numbers.view(_NUM_PARTS, _NUM_ROWS, _HEAD_DIM + 1)
    o, lse = states[..., :-1], states[..., -1].clone()
    lse[:, ::2] *= 8
    lse[:, ::3] /= 64
    lse.view(-1)[::8] = -torch.inf
    merged = merge_states(o.to(device), lse.to(device))
    content = b"".join(x.cpu().contiguous().numpy().tobytes() for x in merged)
    return hashlib.sha256(content).hexdigest()[:12]


def delivery_fault(link: Link, device: torch.device, deadline: float) -> str:
    """Describe what came in a wrong order when ranks sent their ids by each operation of states.

    NCCL 2.26.2 gathered ranks in the order of their devices (its issue 1906): a merge would be of
    the right states in a wrong order, and slices would go to the wrong places.
    """
    everybody = torch.arange(link.world_size, dtype=torch.int32, device="cpu")
    # What rank a sends to rank b; a gathered message is to nobody in particular.
    own = everybody[link.rank, None]
    to_each = link.rank * link.world_size + everybody
    from_each = everybody * link.world_size + link.rank

    def messages(values: Tensor) -> Tensor:
        return values.to(device)[:, None].repeat(1, _MESSAGE_VALUES)

    gathered, exchanged, received = (messages(torch.full_like(everybody, -1)) for _ in range(3))
    outgoing = messages(to_each)
    link.all_gather(gathered, messages(own), deadline)
    link.all_to_all(exchanged, outgoing, deadline)
    receive, send = (dict(enumerate(x.view(torch.uint8))) for x in (received, outgoing))
    link.messages(receive, send, device, has_call_id=False).run(deadline)

    def from_to(value: int) -> str:
        sender, receiver = divmod(value, link.world_size)
        return f"{sender} to {receiver}"

    for operation, arrived, expected, name in (
        ("all_gather", gathered, everybody, str),
        ("all_to_all", exchanged, from_each, from_to),
        ("messages", received, from_each, from_to),
    ):
        values = arrived.cpu()
        if not torch.equal(values, expected[:, None].expand_as(values)):
            found, due = (
                ", ".join("/".join(map(name, sorted(set(row)))) for row in rows.tolist())
                for rows in (values, expected[:, None])
            )
            return f"{operation} brought rank {link.rank} messages {found} instead of {due}"
    return ""
