"""Which versions are asked, which decides, and what a caller learns of the others: nothing."""

from __future__ import annotations

from pathlib import Path

from guard.conversation.example import Message
from guard.verdict import Verdict
from serve.api.rollouts import Assignment
from serve.api.session import conversation_key
from serve.engine import Check, Refusal
from serve.registry.rollout import OFF, Mode, Rollout, TrialVersion
from tests.serve.keys import key_at

CHAMPION, CANDIDATE = "a" * 64, "b" * 64
TRIAL = "mild@" + CANDIDATE[:12]


def rollout(champion: str = "enforce", trial: str | None = None) -> Rollout:
    on_trial = None
    if trial is not None:
        mode = Mode.parse(trial)
        on_trial = TrialVersion(version=CANDIDATE, folder=Path("b"), mode=mode)
    return Rollout(folder=Path("a"), mode=Mode.parse(champion), trial=on_trial)


def answered(*names: str, refused: str = "") -> Check:
    """The champion allows, the candidate flags, "other" allows."""
    verdicts, versions = [], {}
    for name in names:
        if name != refused:
            verdicts.append(Verdict(name, 0.0, 0.9 if name == TRIAL else 0.1, 0.5))
            versions[name] = CANDIDATE if name == TRIAL else CHAMPION
    refusals = {refused: Refusal(refused, "why", "nan")} if refused else {}
    return Check(tuple(verdicts), refusals, 1, 2, 3.0, versions)


def decided(rolled_out: Rollout, point: float, refused: str = "") -> tuple[list[str], str, bool]:
    """What is asked of two rules; the version whose verdict of "mild" a caller gets, "unjudged" or
    "nothing"; and whether that is noted as undecided.
    """
    rules = ("mild", "other")
    assignment = Assignment({"mild": rolled_out}, rules, key_at(point), is_answer=True)
    names = assignment.names
    settled = assignment.settled(answered(*names, refused=refused))
    assert [verdict.rule for verdict in settled.check.verdicts][-1:] == ["other"]
    assert set(settled.check.versions) <= set(rules)
    assert sum(said.decides for said in settled.said) <= 1
    for verdict in settled.check.verdicts:
        assert verdict.rule in rules
    said = settled.check.versions.get("mild", "nothing")
    if "mild" in settled.check.refused:
        said = "unjudged"
    return names, said, "mild" in settled.check.undecided


def test_what_is_enforced_is_asked_and_answered_as_it_is() -> None:
    assignment = Assignment({"mild": rollout()}, ("mild", "other"), key_at(0.5), is_answer=True)
    assert assignment.names == ["mild", "other"]
    check = answered("mild", "other")
    assert assignment.settled(check).check is check and not assignment.settled(check).said


def test_a_shadow_is_judged_and_never_decides() -> None:
    for point in (0.0, 0.5, 0.999):
        asked, said, _ = decided(rollout(trial="shadow"), point)
        assert (asked, said) == ([TRIAL, "mild", "other"], CHAMPION)
        asked, said, is_undecided = decided(rollout("shadow"), point)
        assert (asked, said, is_undecided) == (["mild", "other"], "nothing", True)
    # Nor does what it could not judge.
    assert decided(rollout("shadow"), 0.5, refused="mild")[1] == "nothing"
    assert decided(rollout(trial="shadow"), 0.5, refused=TRIAL)[1] == CHAMPION
    assert decided(rollout(trial="shadow"), 0.5, refused="mild")[1] == "unjudged"


def test_a_canary_decides_for_its_share_and_where_it_has_a_verdict() -> None:
    assert decided(rollout(trial="canary:10%"), 0.0999)[1] == CANDIDATE
    assert decided(rollout(trial="canary:10%"), 0.1001)[1] == CHAMPION
    assert decided(rollout(trial="canary:10%"), 0.05, refused=TRIAL)[1] == CHAMPION
    assert decided(rollout("canary:10%"), 0.05)[1] == CHAMPION
    assert decided(rollout("canary:10%"), 0.5)[1:] == ("nothing", True)


def test_a_canary_s_share_is_of_conversations_and_stays_with_each() -> None:
    canary = rollout(trial="canary:10%")
    decides = 0
    for number in range(10_000):
        messages = [Message("user", f"My order {number} is late."), Message("assistant", "Oh.")]
        said = set()
        for turns in (1, 2):
            key = conversation_key(messages[:turns], None, "")
            assignment = Assignment({"mild": canary}, ["mild"], key, is_answer=True)
            said.add(assignment.settled(answered(TRIAL, "mild")).check.versions["mild"])
        assert len(said) == 1
        decides += said == {CANDIDATE}
    assert 900 <= decides <= 1_100


def test_a_rule_that_is_off_is_not_asked() -> None:
    off = rollout(trial="shadow").model_copy(update={"mode": OFF})
    assert decided(off, 0.5) == (["other"], "nothing", True)


def test_what_every_version_said_is_noted() -> None:
    assignment = Assignment({"mild": rollout(trial="shadow")}, ["mild"], "0" * 64, is_answer=True)
    trial, champion = assignment.settled(answered(TRIAL, "mild")).said
    assert (trial.version, trial.mode, trial.word) == (CANDIDATE, "shadow", "violation")
    assert (champion.version, champion.mode, champion.word) == (CHAMPION, "enforce", "allow")
    assert champion.decides and not trial.decides and trial.disagrees(champion)
    unjudged, _ = assignment.settled(answered(TRIAL, "mild", refused=TRIAL)).said
    assert (unjudged.word, unjudged.code) == ("unjudged", "nan")
    assert unjudged.version == CANDIDATE and not unjudged.disagrees(champion)


def test_for_what_is_no_answer_only_what_may_decide_is_asked() -> None:
    for point, names in ((0.05, [TRIAL, "mild"]), (0.5, ["mild"])):
        canary = {"mild": rollout(trial="canary:10%")}
        assert Assignment(canary, ["mild"], key_at(point), is_answer=False).names == names
    assert Assignment({"mild": rollout("shadow")}, ["mild"], "0" * 64, is_answer=False).names == []
