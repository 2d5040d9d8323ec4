"""An encoder's rules are measured by method, length and number; a decoder is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from guard.errors import GuardError
from guard.layout import Runs
from serve.bench.encoder import EncoderReport, run, table
from tests.serve.encoder_rules import recipe, save_encoder_head, save_encoder_rule
from tests.serve.guarded import recipe as decoder_recipe


@pytest.mark.slow
def test_frozen_heads_read_a_conversation_once_and_adapters_once_each(tmp_path: Path) -> None:
    runs = Runs(tmp_path)
    save_encoder_rule(runs.adapter("minilm", "toy", "lora"), seed=1)
    save_encoder_head(runs.adapter("minilm", "toy", "head"), seed=1)
    eager = recipe().model_copy(update={"engine": recipe().engine | {"enforce_eager": True}})
    report = run(eager, runs, rules=(1, 3), tokens=(80,), repeats=2)
    computed = {(cell.method, cell.rules): cell.computed_tokens for cell in report.cells}
    assert computed["lora", 3] == 3 * computed["lora", 1]
    assert computed["head", 3] == computed["head", 1] == computed["lora", 1] > 0
    assert all(0 < cell.wall_ms.min <= cell.wall_ms.max for cell in report.cells)
    report.save(tmp_path / "encoder_bench.json")
    assert EncoderReport.load(tmp_path / "encoder_bench.json") == report
    assert len(table(report).splitlines()) == 2 + len(report.cells)


def test_a_decoder_is_refused(tmp_path: Path) -> None:
    with pytest.raises(GuardError, match="not an encoder"):
        run(decoder_recipe(), Runs(tmp_path))
