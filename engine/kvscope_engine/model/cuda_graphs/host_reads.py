"""Detects operations that make the host wait for a result of the device, and the module that runs them.

CUDA graphs cannot contain such operations. A capture that contains one fails, and may leave the device in a state in
which later captures fail too.
"""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.utils._python_dispatch import TorchDispatchMode

_READ_OPERATIONS: Final = frozenset(
    {
        "aten::_local_scalar_dense",
        "aten::_unique2",
        "aten::bincount",
        "aten::equal",
        "aten::is_nonzero",
        "aten::masked_select",
        "aten::nonzero",
        "aten::unique_consecutive",
        "aten::unique_dim",
        "transformers::grouped_mm_fallback",
    }
)
"""Operations whose output shape or value is known only on the device, so that the host waits for it."""
_COPY_OPERATIONS: Final = frozenset({"aten::_to_copy", "aten::copy_"})
_INDEX_OPERATIONS: Final = frozenset({"aten::index", "aten::index_put", "aten::index_put_", "aten::_index_put_impl_"})
_GROUPED_MM: Final = "aten::_grouped_mm"
_GROUPED_GENERATIONS: Final = (9, 10)
"""Major compute capabilities on which torch has a kernel for `_grouped_mm` in bfloat16. On others, it multiplies group
by group and reads the ends of the groups on the host."""


class HostReads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Dispatch mode that records the first operation of `module` that makes the host read from `device`."""

    def __init__(self, module: nn.Module, device: torch.device) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._names = {module: name for name, module in module.named_modules()}
        self._device = device
        self._inside: list[nn.Module] = []
        self._handles: list[Any] = []
        self._first: tuple[str, nn.Module] | None = None

    @property
    def description(self) -> str:
        """Description of the recorded operation and its module; empty if there was none."""
        if self._first is None:
            return ""
        operation, module = self._first
        return f"{type(module).__name__} ({self._names.get(module) or 'model'}) waits for the GPU ({operation})"

    def __enter__(self) -> HostReads:
        enter, leave = register_module_forward_pre_hook, register_module_forward_hook
        self._handles = [enter(self._enter_module), leave(self._leave_module, always_call=True)]
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *failure: Any) -> None:
        super().__exit__(*failure)  # type: ignore[no-untyped-call]
        for handle in self._handles:
            handle.remove()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._first is None and self._inside and self._is_host_read(func, args, kwargs or {}):
            self._first = func.overloadpacket._qualified_op_name, self._inside[-1]
        return func(*args, **(kwargs or {}))

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        self._inside.append(module)

    def _leave_module(self, *_: Any) -> None:
        self._inside.pop()

    def _is_host_read(self, func: Any, args: Any, kwargs: dict[str, Any]) -> bool:
        name: str = func.overloadpacket._qualified_op_name
        tensor = args[1] if name == "aten::copy_" else args[0] if args else None
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != self._device.type:
            return False
        if name in _COPY_OPERATIONS:
            target = args[0].device if name == "aten::copy_" else kwargs.get("device") or tensor.device
            return torch.device(target).type != tensor.device.type
        if name in _INDEX_OPERATIONS:
            return any(each is not None and each.dtype in (torch.bool, torch.uint8) for each in args[1])
        if name == _GROUPED_MM and tensor.is_cuda:
            major, _ = torch.cuda.get_device_capability(tensor.device)
            return major not in _GROUPED_GENERATIONS or tensor.dtype != torch.bfloat16
        return name in _READ_OPERATIONS
