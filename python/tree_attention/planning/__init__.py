# SPDX-License-Identifier: BSD-3-Clause
"""Memory, traffic and time of a model on several ranks, by arithmetic.

`machines` and `models` hold data sheets and shapes; `reading` makes shapes of configurations, with
transformers; `arithmetic` has the formulas of docs/parallelism.md and compares the forms.
"""
