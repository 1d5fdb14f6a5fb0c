# SPDX-License-Identifier: BSD-3-Clause
"""`TreeCache`: a cache for transformers that is spread over ranks."""
