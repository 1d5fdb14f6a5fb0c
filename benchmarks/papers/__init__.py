# SPDX-License-Identifier: BSD-3-Clause
"""What the papers claim, counted or measured with the algorithms of `tree_attention.reference`."""
