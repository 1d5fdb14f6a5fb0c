# SPDX-License-Identifier: BSD-3-Clause
"""Versions, in a file of their own so that the build reads them without importing the package."""

__version__ = "0.1.0"
MINIMUM_TRANSFORMERS = "5.5"
