# SPDX-License-Identifier: BSD-3-Clause
"""A seeded fuzzer of the public surface: calls, right and wrong, against a slow obvious model.

    python -m lab.adversary --seconds 3600 --seed 1      # an hour of all parts
    python -m lab.adversary --only ranks --seed 1 --case 17
    python -m lab.adversary --only ranks --kind skip --seconds 60

A *part* is a module with two functions: `world_size(case)` and `play(case, rank)`. A case is drawn
from its part, seed and number alone, on every rank alike. `play` raises where a rule is broken, and
returns a text in which all ranks must agree: the bits of the result, or that there was an error. A
part may have a third, `hash_seed(case)`: then its ranks are interpreters of their own, in which
sets of strings have other orders. With `OWN_PROCESSES = True` they are processes of their own,
whose default group may end.

    ops, layouts  operators and layouts in one process, arguments wrong in one way, memory shared
    ranks         exchanges, and one rank whose call, arguments, number of calls, token in a prompt
                  or warnings differ; an engine's own messages; numbers of numpy and torch
    threads       several threads on one communicator
    sessions      an enabled model and its cache in random order, against no cache at all
    differing     one rank whose model, assistant, settings or processors differ
    snapshots     saved caches that are damaged, mixed, or read beside a save
    callers       methods that callers put on a model, keys that they write into a cache, masks with
                  holes, prompts of embeddings, cut models, tensors that somebody else has split
    late          groups that come after what uses them, and groups that are gone
    environments  variables of launchers and clusters, in which a command ends with a sentence

The rules: a call returns what the model says, with the same bits on every rank, or raises one of
the documented exceptions with a sentence, in time, on every rank; after an error that is not final
the next right call works. Nothing hangs and no process dies.

A finding names the case that breaks a rule by itself, and says what it did when it was played again
alone: the same fault, another one, or none. Then other cases, or chance, are a part of it: what
depends on time shows the same fault in some runs only.
"""

import sys
from pathlib import Path

TESTS = str(Path(__file__).parents[2] / "tests")  # whose helpers all parts use
if TESTS not in sys.path:
    sys.path.insert(0, TESTS)
