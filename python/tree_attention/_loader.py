# SPDX-License-Identifier: BSD-3-Clause
"""Versions, and the compiled extension: loads it, or says what is wrong and how to repair it."""

import importlib.util
import mmap
import re
import sys
import threading
from importlib.machinery import EXTENSION_SUFFIXES
from pathlib import Path
from types import ModuleType

__version__ = "0.1.0"  # which the build reads without importing the package
# Address of the published repository, for `pip show` and the site; CONTRIBUTING.md says when it is
# filled in. Empty: it is not published.
REPOSITORY = ""
MINIMUM_TRANSFORMERS = "5.5"
INSTALL_TRANSFORMERS = f"pip install 'transformers>={MINIMUM_TRANSFORMERS}'"
TESTED_TRANSFORMERS = "5.24.0"  # the newest with which the tests have passed
PACKAGE = Path(__file__).parent
NAME = "tree_attention._C"
_ANY = "_C*.so"  # of any Python
_LOCK = threading.Lock()  # one thread loads it, which registers the operators


class ExtensionError(ImportError):
    """The extension is not built, or not for this Python and torch; the message has the command."""


def beyond_tested_transformers(version: str) -> str:
    """A clause to append to a version of transformers that is newer than the tested ones, or ""."""
    from packaging.version import Version  # comes with transformers

    if Version(version) <= Version(TESTED_TRANSFORMERS):
        return ""
    return f", newer than the newest tested ({TESTED_TRANSFORMERS})"


def why_no_transformers() -> str | None:
    """The text of an ImportError where transformers is not installed, or too old for `hf`."""
    needed = f"tree_attention.hf needs transformers >= {MINIMUM_TRANSFORMERS}"
    try:
        import transformers
    except ImportError:
        return f"{needed}: {INSTALL_TRANSFORMERS}"
    from packaging.version import Version  # comes with transformers

    if Version(transformers.__version__) >= Version(MINIMUM_TRANSFORMERS):
        return None
    return f"{needed}, got {transformers.__version__}: {INSTALL_TRANSFORMERS}"


def load() -> ModuleType:
    """The module `tree_attention._C`; loading it registers `torch.ops.tree_attention`."""
    if NAME not in sys.modules:
        with _LOCK:
            if NAME not in sys.modules:
                sys.modules[NAME] = load_from(PACKAGE)
    return sys.modules[NAME]


def load_from(directory: Path) -> ModuleType:
    """Loads the extension in `directory`; its error says how to rebuild it."""
    import torch  # not above: a plan needs this file's version and no torch

    path = _find(directory)
    built_for, releases = torch_versions_of(path)
    # A torch release keeps its C++ interface over patch releases and CUDA flavours, which therefore
    # get their chance to load.
    if ".".join(torch.__version__.split(".")[:2]) not in releases.split(", "):
        raise ExtensionError(_other_torch(built_for, releases))
    spec = importlib.util.spec_from_file_location(NAME, path)
    assert spec is not None and spec.loader is not None
    try:
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    except ImportError as error:
        if built_for != torch.__version__:
            raise ExtensionError(f"{_other_torch(built_for, releases)} ({error})") from error
        raise ExtensionError(
            f"tree_attention: the extension does not load: {error}. Rebuild it: {rebuild_command()}"
        ) from error
    return module


def torch_versions_of(path: Path) -> tuple[str, str]:
    """The torch that the extension was compiled against, and the releases that setup.py lets it run
    with, as "2.13, 2.14": read from the file without loading it."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
        match = re.search(
            rb"tree_attention is built for torch (\S+) and runs with ([^\0]+)\0", data
        )
        return (match[1].decode(), match[2].decode()) if match else ("unknown", "unknown releases")


def rebuild_command() -> str:
    checkout = PACKAGE.parent.parent
    if (checkout / "setup.py").exists():
        return f"cd {checkout} && {sys.executable} setup.py build_ext --inplace"
    return (
        f"{sys.executable} -m pip install --no-build-isolation --no-deps --force-reinstall DIR, "
        "with DIR the source tree of tree_attention"
    )


def has_extension() -> bool:
    """True where the extension was built, whether or not it can be loaded."""
    return any(PACKAGE.glob(_ANY))


def _find(directory: Path) -> Path:
    for suffix in EXTENSION_SUFFIXES:
        path = directory / f"_C{suffix}"
        if path.exists():
            return path
    wanted = f"_C{EXTENSION_SUFFIXES[0]}"
    others = ", ".join(sorted(path.name for path in directory.glob(_ANY)))
    if others:
        reason = f"is built for another Python: {wanted} is needed, {others} is there"
    else:
        reason = f"is missing: no {wanted} in {directory}"
    raise ExtensionError(f"tree_attention: the extension {reason}. Build it: {rebuild_command()}")


def _other_torch(built_for: str, releases: str) -> str:
    import torch

    return (
        f"tree_attention: the extension is built for torch {built_for} and runs with {releases}, "
        f"but torch {torch.__version__} is installed. Rebuild it: {rebuild_command()}"
    )
