# SPDX-License-Identifier: BSD-3-Clause
"""The plug-in of pytest: `pytest --merge my.module:function` has a test for each case."""

import functools
import importlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from .cases import DECODE_CASES, MERGE_CASES
from .check import check_merge, check_sharded_decode
from .choice import CHOICE_CASES, check_choice
from .diagnosis import Line, Report

CHECKS: dict[str, tuple[Any, Callable[..., Report], str]] = {
    "merge": (MERGE_CASES, check_merge, "num_parts"),
    "decode": (DECODE_CASES, check_sharded_decode, "world_size"),
    "choice": (CHOICE_CASES, check_choice, "world_size"),
}
# The plug-in that has the cases, which the wheel and tree_attention both bring.
NAME = "tree_attention_conformance.cases"


def pytest_addoption(parser: pytest.Parser, pluginmanager: pytest.PytestPluginManager) -> None:
    if pluginmanager.has_plugin(NAME):
        return
    pluginmanager.register(Cases(), NAME)
    group = parser.getgroup("conformance", "conformance of merges and of sharded decoding")
    for name, (_, check, _) in CHECKS.items():
        text = f"function that `{check.__name__}` of tree_attention_conformance checks"
        group.addoption(f"--{name}", metavar="MODULE:FUNCTION", help=text)
    text = "number of parts of a merge, and of ranks of a decode or choice (default: 3)"
    group.addoption("--conformance-parts", type=int, default=3, metavar="N", help=text)
    text = 'where the inputs are: a device of torch, or "numpy"'
    group.addoption("--conformance-device", metavar="DEVICE", help=text)


class Cases:
    """The hooks that act on the options."""

    def pytest_configure(self, config: pytest.Config) -> None:
        """Without paths in the command only the cases are run."""
        asked = any(config.getoption(name) for name in CHECKS)
        if asked and config.args_source is not pytest.Config.ArgsSource.ARGS:
            config.args = []

    def pytest_collection_modifyitems(
        self, session: pytest.Session, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        for name in CHECKS:
            target = config.getoption(name)
            if target:
                items += _cases(name, target, session)


def _cases(name: str, target: str, session: pytest.Session) -> Iterator[pytest.Item]:
    cases, check, size = CHECKS[name]
    options = {size: session.config.getoption("conformance_parts")}
    options |= {"device": session.config.getoption("conformance_device")}
    function = _imported(name, target, str(session.config.invocation_params.dir))
    # All cases run at the first, as the diagnosis of one rests on the others.
    report = functools.cache(lambda: check(function, **options))
    for index, case in enumerate(cases):
        made = Case.from_parent(session, name=case.name, nodeid=f"{target}::{case.name}")
        made.index, made.report = index, report
        yield made


def _imported(option: str, target: str, folder: str) -> Any:
    """The function, also of a module in the folder where pytest was started."""
    module, colon, attribute = target.partition(":")
    if not (module and colon and attribute):
        raise pytest.UsageError(f"--{option}: must be MODULE:FUNCTION, got {target!r}")
    if "/" in module or module.endswith(".py"):
        path = Path(module).with_suffix("")
        where = f" with pytest started in {path.parent}" if path.is_absolute() else ""
        name = path.name if path.is_absolute() else ".".join(path.parts)
        raise pytest.UsageError(
            f"--{option}: MODULE is a name as `import` takes it, no path, got {module!r}: "
            f"--{option} {name}:{attribute}{where}"
        )
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        found = importlib.import_module(module)
        for part in attribute.split("."):
            found = getattr(found, part)
    except Exception as error:  # the module is the user's, and raises what it likes
        kind = (
            "" if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: "
        )
        raise pytest.UsageError(f"--{option} {target}: {kind}{error}") from error
    return found


class Case(pytest.Item):
    """A case of the kit."""

    index: int
    report: Callable[[], Report]

    def runtest(self) -> None:
        line = self.report().lines[self.index]
        if line.passed is None:
            pytest.skip(line.measured)
        if not line.passed:
            raise NotPassed(line)

    def repr_failure(self, excinfo: Any, style: Any = None) -> Any:
        error = excinfo.value
        if not isinstance(error, NotPassed):
            return super().repr_failure(excinfo)
        line: Line = error.args[0]
        if line.meaning.startswith("as in "):  # told in full where it says
            return line.meaning
        figures = f"{line.case}: {line.measured}"
        # pytest's summary has the first line, cut at the width of the terminal.
        return f"{line.meaning}\n{figures}" if line.meaning else line.measured

    def reportinfo(self) -> tuple[Any, None, str]:
        return self.path, None, self.nodeid


class NotPassed(Exception):
    """A case that failed, with its line of the report."""
