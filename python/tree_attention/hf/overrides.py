# SPDX-License-Identifier: BSD-3-Clause
"""Methods of a module that are replaced for a while, whoever had put them there."""

import functools
import inspect
from collections.abc import Callable
from itertools import count
from types import MethodType
from typing import Any, NamedTuple

from torch import nn

# An attribute of the module: by a number, what each of our methods took the place of. There, and
# not in our functions, because a deep copy of the module then gets copies bound to itself.
_KEPT = "_tree_attention_kept_methods"
_numbers = count()


class _Kept(NamedTuple):
    name: str
    function: Callable[..., Any]  # what `override` has put on the module
    before: Any  # what somebody had put on the module; None: the method was its class's
    is_in_force: bool


def override(module: nn.Module, name: str, replacement: Callable[..., Any]) -> None:
    """Makes `module.name(...)` call `replacement(original, module, ...)`.

    `original` is what `module.name` was, bound: the method of the class, or what somebody had put
    on the module. What others put there later may call this one, also after `restore`.
    """
    original, number = getattr(module, name), next(_numbers)
    before = _unless_restored(module, vars(module).get(name))

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        kept: _Kept | None = self.__dict__.get(_KEPT, {}).get(number)
        its_original = None if kept is None else kept.before
        if its_original is None:
            its_original = functools.partial(getattr(type(self), name), self)
        if kept is not None and kept.is_in_force:
            return replacement(its_original, self, *args, **kwargs)
        return its_original(*args, **kwargs)

    functools.update_wrapper(method, original)
    # What tells the signature must not be bound to the module, which a deep copy would then hold.
    method.__wrapped__ = getattr(type(module), name)  # type: ignore[attr-defined]
    if before is not None:
        method.__wrapped__ = _with_signature_of(original)  # type: ignore[attr-defined]
    vars(module).setdefault(_KEPT, {})[number] = _Kept(name, method, before, is_in_force=True)
    vars(module)[name] = MethodType(method, module)


def is_overridden(module: nn.Module, name: str) -> bool:
    """True where `module.name` is what `override` has put there, and nobody has replaced it."""
    kept = _kept_of(module, vars(module).get(name))
    return kept is not None and kept[1].is_in_force


def restore(module: nn.Module, name: str) -> None:
    """Undoes `override`, if it was called. A method that a caller put over the replacement
    stays; if it calls the replacement, that calls the original."""
    attributes = vars(module)
    all_kept: dict[int, _Kept] = attributes.get(_KEPT, {})
    for number, kept in all_kept.items():
        if kept.name == name:
            all_kept[number] = kept._replace(is_in_force=False)
    method = attributes.get(name)
    before = _unless_restored(module, method)
    if before is None:
        attributes.pop(name, None)
    elif before is not method:
        attributes[name] = before
    if not all_kept:
        attributes.pop(_KEPT, None)


def _with_signature_of(bound: Callable[..., Any]) -> Callable[..., Any]:
    def unbound(self: Any, /) -> None: ...

    signature, own = inspect.signature(bound), inspect.signature(unbound)
    parameters = [*own.parameters.values(), *signature.parameters.values()]
    unbound.__signature__ = signature.replace(parameters=parameters)  # type: ignore[attr-defined]
    return unbound


def _unless_restored(module: nn.Module, method: Any) -> Any:
    """`method`, or the method before it if `method` is a replacement that was undone."""
    while (found := _kept_of(module, method)) is not None and not found[1].is_in_force:
        number, kept = found
        method = kept.before
        if method is None:  # else one that somebody has kept still calls it
            del vars(module)[_KEPT][number]
    return method


def _kept_of(module: nn.Module, method: Any) -> tuple[int, _Kept] | None:
    function = getattr(method, "__func__", None)
    all_kept: dict[int, _Kept] = vars(module).get(_KEPT, {})
    for number, kept in all_kept.items():
        if kept.function is function:
            return number, kept
    return None
