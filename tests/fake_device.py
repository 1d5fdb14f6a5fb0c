# SPDX-License-Identifier: BSD-3-Clause
"""A GPU that is not there: tensors that say they are on cuda:0 and live in host memory.

    with fake_cuda():
        model.to("cuda").generate(prompt.to("cuda"))

Operations run on the CPU, those of this library as well, and raise where tensors of the device meet
tensors of the host, as they would on a GPU. What is copied to the host without a wait is there when
the host has waited for an event after the copy. Not imitated: what else streams leave unordered.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._device import _device_constructors
from torch.utils._python_dispatch import TorchDispatchMode

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
# Indices, unlike every other argument, may be on the host.
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
# Takes tensors of the host as well: words in page-locked memory.
ONE_SHOT = "tree_attention::one_shot"
new_tensor = torch.tensor


host_may_wait = True  # or no value of the device may come to the host
on_their_way: list[tuple[Tensor, Tensor]] = []  # to tensors of the host, and what will be in them
copied: list[tuple[str, int]] | None = None  # "to host" or "to device" and bytes, where counted


class Event:
    """An event after all calls before it."""

    def __init__(self) -> None:
        self.before = list(on_their_way)

    def synchronize(self) -> None:
        for pair in self.before:
            if any(pair is other for other in on_their_way):
                on_their_way[:] = [other for other in on_their_way if other is not pair]
                pair[0].copy_(pair[1])


class Stream:
    def __init__(self, *_: Any) -> None:
        pass

    def wait_stream(self, _: Stream) -> None:
        pass

    def record_event(self) -> Event:
        return Event()


@contextmanager
def counted_copies() -> Iterator[list[tuple[str, int]]]:
    """The copies between host and device."""
    found: list[tuple[str, int]] = []
    with mock.patch.object(sys.modules[__name__], "copied", found):
        yield found


def call(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    """Call an operation on host tensors. Tests of graphs replace this to note the calls."""
    return function(*args, **kwargs)


class DeviceTensor(Tensor):
    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> DeviceTensor:
        return Tensor._make_wrapper_subclass(
            cls,
            host.size(),
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=CUDA,
        )

    def __init__(self, host: Tensor) -> None:
        self.host = host

    @classmethod
    def __torch_dispatch__(
        cls, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(function, args, kwargs or {})

    def __getitem__(self, index: Any) -> Any:
        """Make index lists tensors of the host: torch would make them tensors of the device."""
        parts = index if isinstance(index, tuple) else (index,)
        return super().__getitem__(
            tuple(new_tensor(x) if isinstance(x, list) else x for x in parts)
        )

    # Methods that torch does not pass to __torch_dispatch__.

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> list[Any]:
        check_wait("tolist")
        return self.host.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        return DeviceTensor(self.host.clone())


class Factories(TorchDispatchMode):
    """Takes operations that get no tensor and make one on the device, such as torch.zeros."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(function, args, kwargs or {})


def mapped(values: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """What an operator takes or returns, with its tensors changed. torch's tree_map_only, which
    knows every kind of container, takes longer than most of the operators here."""
    if isinstance(values, Tensor):
        return change(values)
    if isinstance(values, (list, tuple)):
        return type(values)([mapped(x, change) for x in values])
    return values


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors: list[Tensor] = []

    def on_host(x: Tensor) -> Tensor:
        tensors.append(x)
        return x.host if isinstance(x, DeviceTensor) else x

    host_args, host_kwargs = (
        mapped(args, on_host),
        {k: mapped(x, on_host) for k, x in kwargs.items()},
    )
    ours = {id(x.host): x for x in tensors if isinstance(x, DeviceTensor)}
    check_devices(function, args, tensors, bool(ours))
    host_kwargs.pop("pin_memory", None)
    device = kwargs.get("device")
    is_late = is_asynchronous(function, args, kwargs) and comes_to_host(function, args, device)
    if comes_to_host(function, args, device) and not is_late:
        check_wait(function)
    if copied is not None and (found := crossing(function, args, device)) is not None:
        copied.append((found[0], found[1].nbytes))
    if device is not None:
        on_device = is_cuda(device)
        host_kwargs["device"] = CPU if on_device else device
    elif function is aten.copy_.default:
        on_device = isinstance(args[0], DeviceTensor)
    else:
        on_device = bool(ours)
    if is_late:
        return copy_later(function, host_args, host_kwargs)
    if function is aten._to_copy.default and device is not None:
        # `to` with the device would copy nothing: both are the host.
        dtype = {name: x for name, x in host_kwargs.items() if name == "dtype"}
        result = host_args[0].clone().to(**dtype)
    else:
        result = call(function, host_args, host_kwargs)
    if not on_device:
        return result
    return mapped(result, lambda x: ours[id(x)] if id(x) in ours else DeviceTensor(x))


def comes_to_host(function: Any, args: Any, device: Any) -> bool:
    """Whether a value comes from the device to the host, which waits for it."""
    if function is aten.copy_.default:
        return not isinstance(args[0], DeviceTensor) and isinstance(args[1], DeviceTensor)
    comes = function in (aten._local_scalar_dense.default, aten.nonzero.default)
    if function is aten._to_copy.default:
        comes = device is not None and not is_cuda(device)
    return comes and isinstance(args[0], DeviceTensor)


def is_asynchronous(function: Any, args: Any, kwargs: dict[str, Any]) -> bool:
    if function is aten.copy_.default:
        return bool(args[2] if len(args) > 2 else kwargs.get("non_blocking"))
    return function is aten._to_copy.default and bool(kwargs.get("non_blocking"))


def copy_later(function: Any, args: Any, kwargs: dict[str, Any]) -> Tensor:
    """A copy to the host that has not come yet: the target has bytes that mean nothing."""
    if function is aten.copy_.default:
        target, value = args[0], args[1].clone()
    else:
        value = args[0].clone().to(kwargs.get("dtype") or args[0].dtype)
        target = torch.empty_like(value)
    if target.is_contiguous():
        target.view(-1).view(torch.uint8).fill_(255)
    on_their_way.append((target, value))
    return target


def crossing(function: Any, args: Any, device: Any) -> tuple[str, Tensor] | None:
    """Return the direction ("to host" or "to device") and the tensor of a copy between both."""
    if function is aten.copy_.default:
        value, from_, to = args[1], *(isinstance(x, DeviceTensor) for x in (args[1], args[0]))
    elif function is aten._to_copy.default and device is not None:
        value, from_, to = args[0], isinstance(args[0], DeviceTensor), is_cuda(device)
    else:
        return None
    return None if from_ == to else ("to device" if to else "to host", value)


def check_wait(what: Any) -> None:
    if not host_may_wait:
        raise RuntimeError(f"called a synchronizing CUDA operation: {what}: the host waits")


@contextmanager
def host_that_does_not_wait() -> Iterator[None]:
    with mock.patch.object(sys.modules[__name__], "host_may_wait", False):
        yield


def check_devices(function: Any, args: Any, tensors: list[Tensor], has_ours: bool) -> None:
    of_host = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim() > 0]
    if function in INDEXING and isinstance(args[0], DeviceTensor):
        return
    takes_host = function is aten.copy_.default or function.name() == ONE_SHOT
    if has_ours and of_host and not takes_host:
        raise RuntimeError(f"{function}: tensors of cuda:0 and of the host")


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


class Generator(torch.Generator):
    """A generator of any device that draws the numbers of the host's."""

    def __new__(cls, device: Any = None) -> Generator:
        return super().__new__(cls)


def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """torch.tensor starts CUDA without asking torch.cuda."""
    if is_cuda(device):
        return DeviceTensor(new_tensor(*args, **kwargs))
    return new_tensor(*args, device=device, **kwargs)


@contextmanager
def fake_cuda() -> Iterator[None]:
    torch._C._ensureCUDADeviceGuardSet()  # with a guard that does nothing
    # `with torch.device(...)` keeps the constructors that it finds at its first use. It must
    # find the real torch.tensor: else transformers would not see that a model is made on the meta
    # device.
    _device_constructors()
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            mock.patch.object(torch.cuda, "_lazy_init"),
            mock.patch.object(torch.cuda, "is_current_stream_capturing", lambda: False),
            mock.patch.object(torch, "tensor", tensor),
            mock.patch.object(torch, "Generator", Generator),
            mock.patch.object(torch.cuda, "get_rng_state", lambda _: torch.get_rng_state()),
            mock.patch.object(torch.cuda, "Stream", Stream),
            mock.patch.object(torch.cuda, "current_stream", Stream),
            mock.patch.object(torch.cuda, "stream", lambda _: nullcontext()),
            torch.no_grad(),
            Factories(),
        ):
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
