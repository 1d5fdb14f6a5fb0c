# SPDX-License-Identifier: BSD-3-Clause
"""`python -m tree_attention verify`."""

from .command import main

__all__ = ["main"]
