# SPDX-License-Identifier: BSD-3-Clause
"""Ranks agree on every call before they exchange, and end together when one fails."""
