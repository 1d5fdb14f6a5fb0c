# SPDX-License-Identifier: BSD-3-Clause
"""Docstrings of the reference: signatures as `help` shows them, an entry for each argument."""

import importlib
import inspect
import re
import textwrap
from types import ModuleType
from typing import Any

import griffe

MODULES = ("", ".hf", ".patterns", ".positions", ".reference", ".reference.conformance", ".vllm")
_EXAMPLE = re.compile(r"::\n\n((?: {4,}.*\n|\n)+)")
_SHARED = re.compile(r"^ {4}(\w+(?:,\s+\w+)*): (.*?)(?=^ {0,4}\S|\Z)", re.DOTALL | re.MULTILINE)
_ARGUMENTS = re.compile(r"^Args:\n(.*?)(?=^\S|\Z)", re.DOTALL | re.MULTILINE)
_SEE = re.compile(r"^see `\w*Options`(?:; |\.)?")


def public(module: ModuleType) -> list[str]:
    """Return the public names of a module that have an entry in the reference."""
    return [name for name in module.__all__ if not name.startswith("__")]


def in_order_of_use(module: ModuleType) -> list[str]:
    """Return functions, classes and exceptions, each as the module's docstring names them."""
    text = inspect.getdoc(module) or ""

    def place(name: str) -> tuple[int, int, str]:
        thing = getattr(module, name)
        is_class = inspect.isclass(thing)
        kind = is_class + (is_class and issubclass(thing, Exception)) if callable(thing) else 3
        named = re.search(rf"\b{name}\b", text)
        return kind, named.start() if named else len(text), name

    return sorted(public(module), key=place)


def as_markdown(text: str) -> str:
    """Fence the examples of a docstring, and keep its source a sentence."""

    def fenced(match: re.Match[str]) -> str:
        return f":\n\n```python\n{textwrap.dedent(match[1]).strip()}\n```\n\n"

    return re.sub(r"^Source: ", "*Source:* ", _EXAMPLE.sub(fenced, text + "\n"), flags=re.MULTILINE)


def arguments_of(text: str) -> dict[str, str]:
    """Return the description of each argument; where several share one, of each of them."""
    section = _ARGUMENTS.search(text)
    entries = _SHARED.findall(section[1]) if section else ()
    return {
        name: " ".join(description.split())
        for names, description in entries
        for name in re.split(r",\s+", names)
    }


class Signatures(griffe.Extension):
    """Gives functions the options that they take as a typed dictionary, and their descriptions."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for thing in documented(pkg):
            if thing.is_class and any("TypedDict" in str(base) for base in thing.bases):
                describe_keys(thing)
        for thing in documented(pkg):
            function = thing.members.get("__init__") if thing.is_class else thing
            options = self._options(function, pkg) if function and function.is_function else {}
            self._rewrite(thing, options)
        show_functions_for_modules(pkg)

    def _options(self, function: griffe.Function, package: griffe.Module) -> dict[str, str]:
        """Put the keys of `**options: Unpack[...]` in the signature; return their descriptions."""
        *_, last = (None, *function.parameters)
        if last is None or "Unpack[" not in str(last.annotation):
            return {}
        path = function.path.removeprefix(function.module.path + ".").removesuffix(".__init__")
        shown: Any = importlib.import_module(function.module.path)
        for name in path.split("."):
            shown = getattr(shown, name)
        listed = inspect.signature(shown).parameters
        if last.name.lstrip("*") in listed:
            return {}  # `help` does not list them: the function is no public one
        described: dict[str, str] = {}
        for kind in kinds_of(last.annotation.slice.canonical_path, package):
            for name, attribute in kind.attributes.items():
                if attribute.docstring:
                    described[name] = " ".join(attribute.docstring.value.split())
            for name, attribute in kind.attributes.items():
                if name not in function.parameters:
                    option = griffe.Parameter(
                        name,
                        annotation=attribute.annotation,
                        kind=griffe.ParameterKind.keyword_only,
                        default=repr(listed[name].default),
                    )
                    function.parameters.add(option)
        del function.parameters[last.name]
        return described

    @staticmethod
    def _rewrite(thing: griffe.Class | griffe.Function, options: dict[str, str]) -> None:
        if thing.docstring is None:
            return
        text = thing.docstring.value
        if section := _ARGUMENTS.search(text):
            described = arguments_of(text)
            for name, words in options.items():
                own = described.get(name, "see `Options`")
                rest = _SEE.sub("", own)
                if rest != own:  # what follows is of some of these arguments
                    is_of_it = name.rpartition("_")[2] in rest
                    described[name] = f"{words} Here, {rest}" if is_of_it else words
            listed = "".join(f"    {name}: {words}\n" for name, words in described.items())
            text = f"{text[: section.start()]}Args:\n{listed}\n{text[section.end() :]}"
        thing.docstring.value = as_markdown(text)


def describe_keys(kind: griffe.Class) -> None:
    """Put the arguments that a typed dictionary's docstring describes beside its keys."""
    if kind.docstring is None:
        return
    for name, words in arguments_of(kind.docstring.value).items():
        kind.attributes[name].docstring = griffe.Docstring(words, parent=kind.attributes[name])
    kind.docstring.value = _ARGUMENTS.sub("", kind.docstring.value)


def show_functions_for_modules(package: griffe.Module) -> None:
    """Lead public names to what an import gives, where a module has the same name."""
    found = []
    for name in MODULES:
        module = importlib.import_module(f"{package.path}{name}")
        for entry in public(module):
            thing = getattr(module, entry)
            if hasattr(thing, "__qualname__") and thing.__module__ != module.__name__:
                path = f"{thing.__module__}.{entry}".removeprefix(f"{package.path}.")
                found.append((f"{name}.{entry}".removeprefix("."), package[path]))
    # Looked up before: a function hides its module from further paths.
    for path, target in found:
        parent = package[path.rpartition(".")[0]] if "." in path else package
        parent.set_member(target.name, griffe.Alias(target.name, target, parent=parent))


def documented(thing: griffe.Module | griffe.Class) -> list[griffe.Class | griffe.Function]:
    """Return the classes of a package, each before its methods, and the functions."""
    found = []
    for member in thing.members.values():
        if not member.is_alias and not member.is_attribute:
            found += [] if member.is_module else [member]
            found += [] if member.is_function else documented(member)
    return found


def kinds_of(path: str, package: griffe.Module) -> list[griffe.Class]:
    """Return a typed dictionary and those it inherits from, in the order of their keys."""
    kind = package[path.removeprefix(f"{package.path}.")]
    kind = kind.final_target if kind.is_alias else kind
    bases = [x.canonical_path for x in kind.bases if "TypedDict" not in str(x)]
    return [y for x in bases for y in kinds_of(x, package)] + [kind]
