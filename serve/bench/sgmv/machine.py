"""The machine's limits, which give the lower bound of the operators' times.

Knows nothing of adapters.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

BANDWIDTH_NUMBERS = 2**27  # 512 MiB: beyond any cache
GEMM_SIZE = 2048


@dataclass(frozen=True)
class Machine:
    """The bytes read and the floating-point operations that the machine reaches a second, with all
    its threads.
    """

    bytes_per_second: float
    flop_per_second: float

    def lower_bound_s(self, bytes_read: float, flop: float) -> float:
        """The roofline: the longer of the times to read the bytes and to compute the products."""
        return max(bytes_read / self.bytes_per_second, flop / self.flop_per_second)


def measured_machine(dtype: str) -> Machine:
    """Measure what this machine reaches now, for products of this dtype."""
    return Machine(_bytes_per_second(), _flop_per_second(dtype))


def _bytes_per_second() -> float:
    """Measure the bytes that the machine reads a second, with all its threads."""
    import torch

    numbers = torch.ones(BANDWIDTH_NUMBERS)
    return 4 * len(numbers) / _median_seconds(lambda: numbers.sum(), 5)


def _flop_per_second(dtype: str) -> float:
    """Measure a large matrix product, by MKL or oneDNN, whichever is faster here."""
    import torch

    matrix = torch.ones(GEMM_SIZE, GEMM_SIZE, dtype=getattr(torch, dtype))
    packed = matrix.to_mkldnn()
    medians = [_median_seconds(lambda: matrix @ matrix, 5)]
    # oneDNN has half types only where the CPU has instructions for them.
    with contextlib.suppress(RuntimeError):
        medians.append(_median_seconds(lambda: torch.nn.functional.linear(packed, packed), 5))
    return 2 * GEMM_SIZE**3 / min(medians)


def _median_seconds(action: Callable[[], object], repeats: int) -> float:
    """The median time of a call, after one that warms up."""
    action()
    seconds = []
    for _ in range(repeats):
        started = time.perf_counter()
        action()
        seconds.append(time.perf_counter() - started)
    return statistics.median(seconds)
