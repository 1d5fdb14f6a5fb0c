# SPDX-License-Identifier: BSD-3-Clause
"""The strategy that `"auto"` takes, and the measured costs by which it goes."""
