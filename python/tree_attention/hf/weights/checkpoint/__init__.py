# SPDX-License-Identifier: BSD-3-Clause
"""Reading from a checkpoint the parts of its weights that this rank keeps.

The files are found and mapped into memory (`files`), their names are translated and their formats
understood without reading them (`reading`, `formats`), and a model is filled (`filling`).
"""
