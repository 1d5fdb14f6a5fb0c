# SPDX-License-Identifier: BSD-3-Clause
"""Memory, traffic and time of a model on several ranks, by arithmetic."""
