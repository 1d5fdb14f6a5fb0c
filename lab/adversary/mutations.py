# SPDX-License-Identifier: BSD-3-Clause
"""Mendings, each undone in a copy of the package, and the cases of the fuzzer that must notice.

python -m pytest lab/tests/adversary/test_mutations.py
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from package_copy import copy_package

ROOT = Path(__file__).parents[2]


@dataclass(frozen=True)
class Mutation:
    name: str
    file: str  # in the package
    old: str  # occurs exactly once
    new: str
    part: str
    kind: str
    says: str  # a pattern of what the fuzzer finds
    num_cases: int = 12
    first: int = 0  # of these cases
    in_tests: bool = False


MUTATIONS = (
    Mutation(
        "two threads use a group at once", "exchange/agreement/group_lock.py",
        "self._lock = threading.RLock()",
        'self._lock = __import__("unittest.mock").mock.MagicMock()',
        "threads", "at_once", "off by|no answer",
    ),
    Mutation(
        "ranks do not compare threads", "exchange/communicator.py",
        '(CALLER, comm._lock.name),', "",
        "threads", "in_another_order", "off by|not noticed", 4, in_tests=True,
    ),
    Mutation(
        "a fork may use its parent's group", "exchange/agreement/group_lock.py",
        "if self.is_inherited:", "if False:",
        "ranks", "fork", "a forked child", 2,
    ),
    Mutation(
        "an impossible out_dtype is sent first", "exchange/options.py",
        '_check_state_dtype(op, "out_dtype", out_dtype)', "pass",
        "ranks", "wrong_reduction", "out_dtype: torch", 100, in_tests=True,
    ),
    Mutation(
        "a head_dim of 0 is sent", "exchange/options.py",
        "if o.shape[3] == 0:", "if False:",
        "ranks", "wrong_reduction", "o: without head dim", 200,
    ),
    Mutation(
        "any number of seconds", "exchange/options.py",
        "if not 0 < seconds <= MAX_SECONDS:", "if False:",
        "ranks", "timeout", "timeout: ", in_tests=True,
    ),
    Mutation(
        "the store may hold anything", "exchange/agreement/signatures.py",
        "if isinstance(said, dict) and all(isinstance(text, str) for text in said.values()):",
        "if True:",
        "ranks", "garbage", " read by ", in_tests=True,
    ),
    Mutation(
        "the store may hold other bytes than text", "exchange/agreement/signatures.py",
        "with suppress(ValueError, RecursionError):  # also of bytes that are no UTF-8",
        "with suppress():",
        "ranks", "garbage", " read by ",
    ),
    Mutation(
        "slots on the default device", "sharding.py",
        'dtype=torch.int64, device="cpu")', "dtype=torch.int64)",
        "layouts", "right", "device='meta'", 60, in_tests=True,
    ),
    Mutation(
        "a test message on the default device", "exchange/agreement/self_test.py",
        'torch.arange(link.world_size, dtype=torch.int32, device="cpu")',
        "torch.arange(link.world_size, dtype=torch.int32)",
        "ranks", "decode", "meta", 60,
    ),
    Mutation(
        "the exchange is no operator of graphs", "exchange/compile.py",
        "if not torch.compiler.is_compiling():", "if True:",
        "ranks", "compiled", "a right call was refused", 2,
    ),
    Mutation(
        "slopes are not compared", "options.py",
        '(f"digest of {name}", _digest(value))', '(f"digest of {name}", "")',
        "ranks", "differ", "alibi_slopes", 60,
    ),
    Mutation(
        "an owner of slots below 0", "sharding.py",
        "if least < 0:", "if False:",
        "layouts", "call", "owner below 0", 100,
    ),
    Mutation(
        "a saved file is not what the index says", "hf/cache/snapshot/files.py",
        "if found != digest:", "if False:",
        "snapshots", "mix", "never saved was loaded", in_tests=True,
    ),
    Mutation(
        "slots that a window forgot are not counted", "hf/cache/tree_cache.py",
        "layer.hold(moved, dropped)", "layer.hold(moved, layer.dropped)",
        "sessions", "reshard", "logits are off|must match the size", 1, first=2,
    ),
    Mutation(
        "queries are not compared", "exchange/agreement/queries.py",
        "return max(load().digest(queries), SAME_CALL + 1)", "return SAME_CALL",
        "ranks", "skip", "off by|did not notice", in_tests=True,
    ),
    Mutation(
        "a rank whose call changed does not say so", "exchange/agreement/session.py",
        "self.link.replay.run(self.link, deadline)", "pass",
        "ranks", "change", "no answer|no word|off by",
    ),
    Mutation(
        "the tokens of ranks are not compared", "hf/generate.py",
        '_meet(setup, "end of generate", ("digest of the tokens", tokens))', "pass",
        "differing", "criteria", "other tokens|is off|nobody|accepted", 8,
    ),
    Mutation(
        "an index may be damaged", "hf/cache/snapshot/index.py",
        'if entries.get("sha256") != digest_of(entries):', "if False:",
        "snapshots", "damage", "KeyError|never saved was loaded", 24,
    ),
    Mutation(
        "a pipe is waited for", "_json.py",
        "os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC", "os.O_RDONLY | os.O_CLOEXEC",
        "snapshots", "damage", "hangs", 40,
    ),
    Mutation(
        "heads of another rank are loaded", "hf/cache/snapshot/index.py",
        "if column != cache.shard.column:", "if False:",
        "snapshots", "swap_places", "never saved was loaded", 4,
    ),
    Mutation(
        "a cropped cache keeps an interrupted pass", "hf/cache/tree_cache.py",
        "length = min(lengths)", "length = max(lengths)",
        "sessions", "interrupt", "the cache says", 2,
    ),
    Mutation(
        "a second turn is fed twice", "hf/generate.py",
        "is_whole = setup.calls.current.is_assisted and", "is_whole = False and",
        "sessions", "speculate", "must hold", 2,
    ),
    Mutation(
        "a fork counts its parent's sessions", "exchange/communicator.py",
        'self._lock.check_process("Communicator")', "pass",
        "ranks", "fork", "no answer|no word", 12,
    ),
    Mutation(
        "any difference of queries is rounding", "exchange/agreement/queries.py",
        "_ROUNDING_OF_32_BITS = 1e-3", "_ROUNDING_OF_32_BITS = 1e3",
        "ranks", "another_token", "a wrong call was accepted", in_tests=True,
    ),
    Mutation(
        "a warning inside the call", "exchange/communicator.py",
        "            link.call_id = SAME_CALL\n",
        "            link.call_id = SAME_CALL\n            warn_of_rounding()\n",
        "ranks", "warning", "is dead|was refused|it warns", 4,
    ),
    Mutation(
        "tags that engines use", "exchange/transport/process_group.py",
        "FIRST_TAG + NUM_TAGS * (1 + (number - 1) % (FIRST_TAG // NUM_TAGS - 1))",
        "NUM_TAGS * number",
        "ranks", "messages", "beside tags|message \\d|process ended|no answer", 60,
    ),
    Mutation(
        "a communicator keeps all memory", "exchange/transport/buffers.py",
        "MAX_KEPT_BYTES = 64 << 20", "MAX_KEPT_BYTES = 64 << 40",
        "ranks", "memory", "MiB leaves", 20,
    ),
    Mutation(
        "a layout keeps the caller's number", "sharding.py",
        "object.__setattr__(self, name, self._at_least_1(name, getattr(self, name)))",
        "self._at_least_1(name, getattr(self, name))",
        "ranks", "scalars", "BlockCyclic", 60,
    ),
    Mutation(
        "any text is a number", "_environment.py",
        'not re.fullmatch("-?[0-9]{1,18}", text) or not least <= int(text) <= most', "False",
        "environments", "wrong", "Traceback|is named", in_tests=True,
    ),
    Mutation(
        "disable forgets a caller's methods", "hf/overrides.py",
        "attributes[name] = before", "attributes.pop(name)",
        "callers", "patched", "after disable", 24,
    ),
    Mutation(
        "keys may be moved to other memory", "hf/cache/growing.py",
        "if not view.is_set_to(alias):", "if False:",
        "callers", "replaced", "logits are off", 60,
    ),
)  # fmt: skip


def report(mutation: Mutation, folder: Path) -> str:
    """What the fuzzer says of a copy of the package in which the mutation is made."""
    file = copy_package(folder) / mutation.file
    text = file.read_text()
    assert text.count(mutation.old) == 1, f"{mutation.file}: {mutation.old}"
    file.write_text(text.replace(mutation.old, mutation.new))
    cases = ["--only", mutation.part, "--kind", mutation.kind, "--seed", "3"]
    cases += ["--first"]
    cases += ["--case", f"{mutation.first}-{mutation.first + mutation.num_cases - 1}"]
    run = subprocess.run(
        [sys.executable, "-m", "lab.adversary", *cases],
        cwd=ROOT,
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=1200,
    )
    assert run.returncode in (0, 1) and run.stdout, run.stderr
    return run.stdout if run.returncode else ""


def is_found(mutation: Mutation, text: str) -> bool:
    return "python -m lab.adversary --only" in text and bool(re.search(mutation.says, text))


def main() -> int:
    num_missed = 0
    for mutation in MUTATIONS:
        with tempfile.TemporaryDirectory() as folder:
            found = is_found(mutation, report(mutation, Path(folder)))
        num_missed += not found
        print(f"{'found ' if found else 'MISSED'} {mutation.name}", flush=True)
    return 1 if num_missed else 0


if __name__ == "__main__":
    sys.exit(main())
