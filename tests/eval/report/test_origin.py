from __future__ import annotations

from eval.report.origin import distinct, distinct_versions


def test_what_is_the_same_everywhere_is_said_once() -> None:
    assert distinct(["abc", "def", "abc"]) == "abc / def"
    evaluated_with = [{"torch": "2", "peft": "1"}, {"torch": "3", "peft": "1"}, {"torch": "2"}]
    assert distinct_versions(evaluated_with) == {"torch": "2 / 3", "peft": "1"}
