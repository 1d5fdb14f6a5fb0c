# SPDX-License-Identifier: BSD-3-Clause
"""A seeded fuzzer of the public surface: calls, right and wrong, against a slow obvious model.

    python tests/adversary --seconds 3600 --seed 1      # an hour of all parts
    python tests/adversary --only ranks --seed 1 --case 17

A *part* is a module with two functions: `world_size(case)` and `play(case, rank)`. A case is drawn
from its part, seed and number alone, on every rank alike. `play` raises where a rule is broken, and
returns a text in which all ranks must agree: the bits of the result, or that there was an error.

The rules: a call returns what the model says, with the same bits on every rank, or raises one of
the documented exceptions with a sentence, in time, on every rank; after an error that is not final
the next right call works. Nothing hangs and no process dies.
"""
