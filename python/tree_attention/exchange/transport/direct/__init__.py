# SPDX-License-Identifier: BSD-3-Clause
"""Messages that the calling thread itself moves: through memory on a node, else by connections."""
