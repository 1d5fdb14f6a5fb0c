# SPDX-License-Identifier: BSD-3-Clause
"""A cache in a directory, and a cache moved to another layout."""
