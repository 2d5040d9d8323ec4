"""Counts the operators that would launch a kernel on a GPU, on any device. Tests only."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

# These make a tensor without a kernel: uninitialised memory, or another tensor's.
WITHOUT_A_KERNEL = ("empty", "new_empty", "empty_like", "empty_strided", "new_empty_strided")
AS_VIEWS = ("_unsafe_view", "detach", "alias", "lift_fresh")
# Tensors of a list that one launch takes: as many as PyTorch concatenates, and the fewest that its
# fused and foreach kernels take.
CONCATENATED = 128
OF_A_LIST = 30


class LaunchCount(TorchDispatchMode):
    """Within it, `launches` by operator; one of a list of tensors counts as often as the list is
    long enough for.

    A few operators launch two kernels and count once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Count the operator, and compute it."""
        name: str = func.overloadpacket.__name__
        without = func.is_view or name in WITHOUT_A_KERNEL or name in AS_VIEWS
        if func.namespace == "aten" and not without:
            self.launches[name] += _launches(name, args)
        return func(*args, **(kwargs or {}))


def _launches(name: str, arguments: tuple[Any, ...]) -> int:
    if not arguments or not isinstance(arguments[0], list | tuple):
        return 1
    tensors = [argument for argument in arguments[0] if isinstance(argument, Tensor)]
    together = OF_A_LIST
    if name in ("cat", "stack"):
        together = CONCATENATED
    return max(1, math.ceil(len(tensors) / together))
