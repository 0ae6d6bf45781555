"""Operations that a trial on a few tokens may leave without effect: bounds, rounding down, counting.

Owns their list, and the watch for them. Whoever replaces a part of a model must do them as well.
"""

from __future__ import annotations

from typing import Any, Final

from torch.utils._python_dispatch import TorchDispatchMode

UNSEEN: Final = frozenset(
    {
        "aten::arange",
        "aten::ceil",
        "aten::clamp",
        "aten::clamp_max",
        "aten::clamp_min",
        "aten::floor",
        "aten::floor_divide",
        "aten::hardtanh",
        "aten::maximum",
        "aten::minimum",
        "aten::remainder",
        "aten::round",
        "aten::trunc",
        "aten::where",
    }
)


class UnseenOps(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Which of them run inside; in place or not is the same."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket._qualified_op_name.removesuffix("_")
        if name in UNSEEN:
            self.names.add(name)
        return func(*args, **(kwargs or {}))
