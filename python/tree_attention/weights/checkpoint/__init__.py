# SPDX-License-Identifier: BSD-3-Clause
"""The weights of a checkpoint, found and mapped into memory (`files`), with their names translated
and their formats understood (`reading`, `formats`) without reading them."""
