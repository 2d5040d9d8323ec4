"""The microbenchmark's report with made-up times. Tests only."""

from __future__ import annotations

from serve.bench.report import Spread
from serve.bench.sgmv.report import LOOP, OURS, VLLMS, SgmvReport, SgmvRow


def toy_report() -> SgmvReport:
    """Two batches with a lower bound of 2 ms: ours takes 3 ms, a loop 6 ms, vLLM's operator 9."""
    rows: list[SgmvRow] = []
    for batch in ("few", "one"):
        for operator, ms in ((OURS, 3.0), (LOOP, 6.0), (VLLMS, 9.0)):
            row = SgmvRow(
                batch=batch,
                operator=operator,
                ms=Spread.of([ms]),
                lower_bound_ms=2.0,
                weights_mib=0.5,
            )
            rows.append(row)
    return SgmvReport(
        commit="abc1234",
        hardware="two cores",
        versions={},
        model="tiny",
        peak_memory_mib=1.0,
        rank=16,
        layers=4,
        dtype="float32",
        bandwidth_gb_s=20.0,
        gflop_s=100.0,
        repeats=1,
        rows=tuple(rows),
    )
