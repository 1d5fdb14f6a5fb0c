# SPDX-License-Identifier: BSD-3-Clause
"""What a model on several ranks keeps, sends and takes, by arithmetic.

`models` and `machines` hold shapes and data sheets; `reading` makes shapes of configurations, with
transformers; `arithmetic` has the formulas of docs/parallelism.md; `plans` compares the forms of a
split, and `tables` puts them into words.
"""
