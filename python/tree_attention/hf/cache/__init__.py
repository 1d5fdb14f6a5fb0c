# SPDX-License-Identifier: BSD-3-Clause
"""`TreeCache`: a transformers cache of which each rank holds a part."""
