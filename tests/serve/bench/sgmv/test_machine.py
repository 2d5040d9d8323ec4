from __future__ import annotations

import pytest
import torch

from serve.bench.sgmv import machine as machines
from serve.bench.sgmv.machine import Machine, measured_machine


def test_the_lower_bound_is_the_longer_of_reading_and_multiplying() -> None:
    machine = Machine(bytes_per_second=10, flop_per_second=100)
    assert machine.lower_bound_s(bytes_read=20, flop=100) == 2
    assert machine.lower_bound_s(bytes_read=20, flop=300) == 3


@pytest.mark.parametrize("has_product", [True, False])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_machine_reaches_is_measured_with_or_without_onednn_s_product(
    dtype: str, has_product: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: object) -> None:
        raise RuntimeError("mkldnn_linear: bf16 path needs the cpu support avx_ne_convert")

    monkeypatch.setattr(machines, "BANDWIDTH_NUMBERS", 2**20)
    monkeypatch.setattr(machines, "GEMM_SIZE", 64)
    if not has_product:
        monkeypatch.setattr(torch.nn.functional, "linear", refused)
    machine = measured_machine(dtype)
    assert machine.bytes_per_second > 1e6 and machine.flop_per_second > 1e6
