# SPDX-License-Identifier: BSD-3-Clause
"""A GPU that is not there: tensors that say they are on cuda:0 and live in host memory.

    with fake_cuda():
        model.to("cuda").generate(prompt.to("cuda"))

Operations run on the CPU, those of this library as well, and raise where tensors of the device meet
tensors of the host, as they would on a GPU. Not imitated: streams, and what they leave unordered.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

CUDA, CPU = torch.device("cuda", 0), torch.device("cpu")
aten = torch.ops.aten
# Indices, unlike every other argument, may be on the host.
INDEXING = {aten.index.Tensor, aten.index_put_.default, aten._index_put_impl_.default}
new_tensor = torch.tensor


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

    # What torch does without an operation.

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> list[Any]:
        return self.host.tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> DeviceTensor:
        return DeviceTensor(self.host.clone())


class Factories(TorchDispatchMode):
    """Operations that are asked for tensors of the device and given none."""

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        return run(function, args, kwargs or {})


def run(function: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    tensors = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
    ours = {id(x.host): x for x in tensors if isinstance(x, DeviceTensor)}
    check_devices(function, args, tensors, bool(ours))
    device = kwargs.get("device")
    if device is not None:
        on_device = is_cuda(device)
        kwargs = kwargs | {"device": CPU if on_device else device}
    elif function is aten.copy_.default:
        on_device = isinstance(args[0], DeviceTensor)
    else:
        on_device = bool(ours)
    args, kwargs = tree_map_only(DeviceTensor, lambda x: x.host, (args, kwargs))
    if function is aten._to_copy.default and device is not None:
        kwargs.pop("device")  # or nothing would be copied
        result = args[0].clone().to(**{k: v for k, v in kwargs.items() if k == "dtype"})
    else:
        result = function(*args, **kwargs)
    if not on_device:
        return result
    return tree_map_only(
        Tensor, lambda x: ours[id(x)] if id(x) in ours else DeviceTensor(x), result
    )


def check_devices(function: Any, args: Any, tensors: list[Tensor], has_ours: bool) -> None:
    of_host = [x for x in tensors if not isinstance(x, DeviceTensor) and x.dim() > 0]
    if function in INDEXING and isinstance(args[0], DeviceTensor):
        return
    if has_ours and of_host and function is not aten.copy_.default:
        raise RuntimeError(f"{function}: tensors of cuda:0 and of the host")


def is_cuda(device: Any) -> bool:
    return device is not None and torch.device(device).type == "cuda"


def tensor(*args: Any, device: Any = None, **kwargs: Any) -> Tensor:
    """torch.tensor starts CUDA without asking torch.cuda."""
    if is_cuda(device):
        return DeviceTensor(new_tensor(*args, **kwargs))
    return new_tensor(*args, device=device, **kwargs)


@contextmanager
def fake_cuda() -> Iterator[None]:
    torch._C._ensureCUDADeviceGuardSet()  # of no device
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    try:
        with (
            mock.patch.object(torch.cuda, "_lazy_init"),
            mock.patch.object(torch, "tensor", tensor),
            mock.patch.object(torch.cuda, "get_rng_state", lambda _: torch.get_rng_state()),
            torch.no_grad(),
            Factories(),
        ):
            yield
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
