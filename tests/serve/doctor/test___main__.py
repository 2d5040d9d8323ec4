"""The environment that the tests run in is in order."""

from __future__ import annotations

import pytest

from serve.doctor.__main__ import FINDERS


@pytest.mark.slow
@pytest.mark.parametrize("check", ["interpreter", "packages", "device", "preload", "recipes"])
def test_this_environment_has_no_problem(check: str) -> None:
    assert [finding for finding in FINDERS[check]() if finding.remedy] == []
