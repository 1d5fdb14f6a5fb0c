# SPDX-License-Identifier: BSD-3-Clause
"""Memory that the ranks of a node share, in which they leave messages for one another.

The memory has no name in a file system: the first rank of a node makes it, the others open it by
that process's number. It is gone when the last of them is.
"""

import os
import secrets
import socket
import stat
from collections.abc import Mapping
from contextlib import ExitStack

from ...._loader import load
from ...notes import Gather, Note, attempt, first_reason
from ..deadlines import is_watched
from ..messages import DirectTransport
from ..topology import Topology

_KEY_BYTES = 16


def connect(rank: int, topology: Topology, gather: Gather) -> DirectTransport | str:
    """The memory that this rank shares with its node, or why ranks share none.

    Collective. Either all nodes have such memory or none.
    """
    if topology.num_nodes == topology.world_size:
        return "every rank is alone on its node"
    ranks = [r for r in range(topology.world_size) if topology.nodes[r] == topology.nodes[rank]]
    with ExitStack() as files:  # which are open until all ranks have opened theirs
        note = attempt(lambda: _make(rank == ranks[0], len(ranks), files))
        notes = gather("shared memory, made", note)
        if reason := first_reason(notes):
            return reason
        opened: list[DirectTransport] = []
        note = attempt(lambda: _open(rank, {r: notes[r] for r in ranks}, files, opened))
        return first_reason(gather("shared memory, opened", note)) or opened[0]


def _make(is_maker: bool, num_ranks: int, files: ExitStack) -> Note:
    if is_watched():
        raise RuntimeError("TORCH_DISTRIBUTED_DEBUG=DETAIL watches the messages of the group")
    note: Note = {"host": socket.gethostname(), "process": os.getpid()}
    if is_maker:
        file = os.memfd_create("tree_attention", os.MFD_CLOEXEC)
        files.callback(os.close, file)
        os.ftruncate(file, load().SharedMemory.num_bytes(num_ranks))
        key = secrets.token_bytes(_KEY_BYTES)
        os.pwrite(file, key, 0)
        note |= {"file": file, "key": key.hex()}
    return note


def _open(
    rank: int, notes: Mapping[int, Note], files: ExitStack, opened: list[DirectTransport]
) -> Note:
    maker = next(iter(notes.values()))
    # Between hosts of a node that are emulated on one, messages are to take the network.
    if len(hosts := {note["host"] for note in notes.values()}) > 1:
        raise RuntimeError(f"ranks of a node are on {len(hosts)} hosts")
    path = f"/proc/{maker['process']:d}/fd/{maker['file']:d}"
    # Processes of another host, or of a container, have the same numbers, and this may be a
    # stranger's file: it is not opened for writing before its key is known.
    for access in (os.O_RDONLY | os.O_NONBLOCK, os.O_RDWR):
        file = os.open(path, access | os.O_CLOEXEC)
        files.callback(os.close, file)
        is_regular = stat.S_ISREG(os.fstat(file).st_mode)
        if not is_regular or os.pread(file, _KEY_BYTES, 0).hex() != maker["key"]:
            raise RuntimeError("what the first rank of the node has made is not seen here")
    members = []
    with ExitStack() as processes:  # which the memory closes, if it comes into being
        for r, note in notes.items():
            process = -1
            if r != rank:
                process = os.pidfd_open(note["process"])
                processes.callback(os.close, process)
            members.append((r, process))
        memory = load().SharedMemory(file, list(notes).index(rank), members)
        processes.pop_all()
    opened.append(DirectTransport(memory, {r: member for member, r in enumerate(notes)}))
    return {}
