# SPDX-License-Identifier: BSD-3-Clause
"""Memory that the process of a command keeps."""

import ctypes
from contextlib import suppress

# Parameters of mallopt (malloc.h of glibc).
_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3
_LARGE = (1 << 31) - 1


def keep_freed_memory() -> None:
    """Makes malloc keep what is freed, where it is glibc's.

    Otherwise large tensors go back to the system, which clears pages for the next ones. A prompt
    took an eighth longer.
    """
    with suppress(AttributeError, OSError):
        library = ctypes.CDLL(None)
        library.mallopt(_MMAP_THRESHOLD, _LARGE)
        library.mallopt(_TRIM_THRESHOLD, _LARGE)
