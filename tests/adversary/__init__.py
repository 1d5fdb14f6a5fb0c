# SPDX-License-Identifier: BSD-3-Clause
"""A seeded fuzzer of the public surface: calls, right and wrong, against a slow obvious model.

    python tests/adversary --seconds 3600 --seed 1      # an hour of all parts
    python tests/adversary --only ranks --seed 1 --case 17
    python tests/adversary --only ranks --kind skip --seconds 60

A *part* is a module with two functions: `world_size(case)` and `play(case, rank)`. A case is drawn
from its part, seed and number alone, on every rank alike. `play` raises where a rule is broken, and
returns a text in which all ranks must agree: the bits of the result, or that there was an error. A
part may have a third, `hash_seed(case)`: then its ranks are interpreters of their own, in which
sets of strings have other orders.

    ops, layouts  operators and layouts in one process, arguments wrong in one way, memory shared
    ranks         exchanges, and one rank whose call, arguments or number of calls differ
    threads       several threads on one communicator
    sessions      an enabled model and its cache in random order, against no cache at all
    differing     one rank whose model, assistant, settings or processors differ
    snapshots     saved caches that are damaged, mixed, or read beside a save

The rules: a call returns what the model says, with the same bits on every rank, or raises one of
the documented exceptions with a sentence, in time, on every rank; after an error that is not final
the next right call works. Nothing hangs and no process dies.
"""
