# SPDX-License-Identifier: BSD-3-Clause
"""`decode.py` on the CPU."""
