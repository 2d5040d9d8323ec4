"""How many actors a scan has, and when it has none."""

from __future__ import annotations

import argparse

import pytest

from serve.scan.options import add_scan_options, check_actors, cluster_actors


def parsed(*options: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_scan_options(parser, out="the folder for the verdicts")
    arguments = parser.parse_args(["--files", "a.jsonl", *options])
    check_actors(parser, arguments)
    return arguments


def test_actors_need_a_cluster(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        parsed("--actors", "2")
    assert "--actors needs --cluster" in capsys.readouterr().err


def test_a_cluster_has_one_actor_by_default_and_a_scan_without_one_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("serve.scan.options.check_ray", lambda: None)
    assert cluster_actors(parsed()) is None
    assert cluster_actors(parsed("--cluster")) == 1
    assert cluster_actors(parsed("--cluster", "--actors", "3")) == 3
