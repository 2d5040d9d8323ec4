from __future__ import annotations

from eval.judge.answer import JudgeRecord
from eval.report.notes import notes
from tests.eval.conftest import World
from tests.eval.test_evaluation import evaluated


def test_rules_with_the_same_note_share_it(world: World) -> None:
    medical = evaluated(world)
    legal = medical.model_copy(update={"rule": "legal"})
    lines = notes([legal, medical], ["tax: no data"])
    assert "- legal, medical: judged by base through the served engine." in lines
    assert "- legal, medical: bag of words of last turn, words 1-2, C = 1." in lines
    assert lines[-1] == "- Left out: tax: no data"


def test_a_judge_s_note_says_what_it_took_and_what_it_did_not_answer(world: World) -> None:
    judge = JudgeRecord(
        name="gpt-toy", endpoint="http://x", refused=1, cost_usd=0.5, without_usage=2
    )
    judged = evaluated(world).model_copy(update={"judges": {"judge": judge}})
    (line,) = [line for line in notes([judged], []) if "gpt-toy" in line]
    assert line == (
        "- medical: judged by gpt-toy at http://x; cost 0.5000 USD; tokens and cost unknown for 2 "
        "answers; 1 of 8 conversations refused by the endpoint, counted as wrong."
    )
