# SPDX-License-Identifier: BSD-3-Clause
"""Other inference engines on the same checkpoint, each in an environment of its own."""
