# SPDX-License-Identifier: BSD-3-Clause
"""Messages between ranks with deadlines, and the memory that travels."""
