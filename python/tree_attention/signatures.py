# SPDX-License-Identifier: BSD-3-Clause
"""Keyword arguments that several functions have in common, from one typed dictionary."""

import inspect
from collections.abc import Callable, Container, Mapping
from typing import Any, TypeVar, get_type_hints

_Function = TypeVar("_Function", bound=Callable[..., object])


def lists_options(kind: type, defaults: Mapping[str, object]) -> Callable[[_Function], _Function]:
    """Lists a typed dictionary's keys in the signature that `help` and `inspect` show."""
    shared = [
        inspect.Parameter(
            name, inspect.Parameter.KEYWORD_ONLY, annotation=hint, default=defaults[name]
        )
        for name, hint in get_type_hints(kind).items()
    ]

    def decorate(function: _Function) -> _Function:
        signature = inspect.signature(function)
        own = [
            parameter
            for parameter in signature.parameters.values()
            if parameter.kind != inspect.Parameter.VAR_KEYWORD
        ]
        shown: Any = function
        shown.__signature__ = signature.replace(parameters=[*own, *shared])
        return function

    return decorate


def split_options(options: Mapping[str, object], names: Container[str]) -> tuple[Any, Any]:
    """Two dictionaries: the options that have one of the names, and the others."""
    named: dict[str, object] = {}
    others: dict[str, object] = {}
    for name, value in options.items():
        (named if name in names else others)[name] = value
    return named, others
