"""What is broken is called a problem and comes with a remedy; what is not, is not."""

from __future__ import annotations

import pytest

from serve.doctor.finding import Finding, report


def test_the_report_prints_all_and_returns_problems(capsys: pytest.CaptureFixture[str]) -> None:
    fine, broken = Finding("one", "all is well"), Finding("two", "it broke", "Mend it")
    assert report({"a": lambda: iter([fine]), "b": lambda: iter([broken])}) == [broken]
    lines = capsys.readouterr().out.splitlines()
    assert [line.split() for line in lines] == [
        ["ok", "one", "all", "is", "well"],
        ["PROBLEM", "two", "it", "broke"],
        ["->", "Mend", "it"],
    ]
