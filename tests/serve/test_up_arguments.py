"""Options of the server that contradict each other are refused before anything is read."""

from __future__ import annotations

from typing import Any

import pytest

from serve.up_arguments import parse_arguments


def test_a_merged_base_has_its_method_already(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    for option in (["--method", "alora"], ["--watch"]):
        monkeypatch.setattr("sys.argv", ["up", "--merged", *option])
        with pytest.raises(SystemExit):
            parse_arguments()
        assert f"leave out {option[0]}" in capsys.readouterr().err


@pytest.mark.parametrize("replicas", [[], ["--replicas", "2"]])
def test_a_time_to_scale_down_needs_a_number_of_replicas_that_the_load_decides(
    replicas: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("sys.argv", ["up", "--scale-down", "60", *replicas])
    with pytest.raises(SystemExit):
        parse_arguments()
    assert "--replicas 1-4" in capsys.readouterr().err
