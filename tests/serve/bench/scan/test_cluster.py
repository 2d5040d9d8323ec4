"""How long actors are idle between parts."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(find_spec("ray") is None, reason="Ray is not installed"),
]


def test_an_actor_is_idle_between_two_of_its_own_parts() -> None:
    from serve.bench.scan.cluster import idle_s
    from serve.scan.cluster import JudgedPart

    times = [(1, 10.0, 12.0), (2, 10.5, 15.0), (1, 12.5, 14.0), (2, 15.25, 16.0)]
    judged = [
        JudgedPart(number, actor, 8, 100, began_s, ended_s, {})
        for number, (actor, began_s, ended_s) in enumerate(times)
    ]
    assert idle_s(judged) == pytest.approx(0.75)
    assert idle_s([]) == 0
