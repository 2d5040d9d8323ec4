"""Two versions on recorded traffic: which folders are such, what each says over one prefill, how
often verdicts flip, and the page on it.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pytest import CaptureFixture, MonkeyPatch

from guard.conversation.example import Message
from guard.errors import GuardError
from guard.rule import text_hash
from serve.engine.engines import GuardEngines
from serve.scan.flips import CountedShare, ReplayTally
from serve.scan.parts import PartFolder, ScanRow, manifest_of
from serve.scan.replay import ELLIPSIS, LAST_CHARACTERS, excerpts, main, page, report_replay
from serve.scan.versions import VersionPair, find_pair, replayed_part
from serve.selection import ServedPart, open_engines
from tests.serve.cards import prompts, save_card, text_of
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter

ROWS = 40


@pytest.fixture
def versions(tmp_path: Path) -> list[Path]:
    """Of which the first flags whatever it reads, and the second nothing: all rows flip."""
    folders: list[Path] = []
    for seed, name, threshold in ((1, "before", 0.0), (2, "after", 1.0)):
        folders.append(save_adapter(tmp_path / name, "mild", seed=seed))
        save_card(folders[-1], "mild", threshold=threshold)
    return folders


@pytest.fixture
def traffic(tmp_path: Path) -> Path:
    messages = [{"role": turn.role, "content": turn.content} for turn in CONVERSATION]
    rows: list[dict[str, Any]] = []
    for number in range(ROWS):
        text = {"role": "user", "content": f"<b>{number}</b> " * (1 + number % 7)}
        rows.append({"id": f"c{number}", "messages": [*messages, text]})
    rows[5] = {"id": "c5"}
    file = tmp_path / "traffic.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def replay(monkeypatch: MonkeyPatch, versions: list[Path], traffic: Path, *more: str) -> Any:
    """The command's exit status; 0 where it ends."""
    named = [*map(str, versions), "--files", str(traffic), "--runs", str(traffic.parent)]
    monkeypatch.setattr("sys.argv", ["replay", *named, "--rows-a-part", "8", *more])
    try:
        main()
    except SystemExit as ended:
        return ended.code
    return 0


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_replay_prefills_once_for_both_and_reports_what_peft_says(
    versions: list[Path], traffic: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    computed: dict[int, int] = {}

    @contextlib.contextmanager
    def opened(parts: Sequence[ServedPart]) -> Iterator[GuardEngines]:
        with open_engines(parts) as engine:
            for names in (["mild@A"], ["mild@A", "mild@B"]):
                engine.forget()
                computed[len(names)] = engine.check(CONVERSATION, names).computed_tokens
            yield engine

    monkeypatch.setattr("serve.scan.command.open_engines", opened)
    assert replay(monkeypatch, versions, traffic) == 0
    assert computed[2] == computed[1] + len(prompts().suffix_ids(text_of("mild")))
    done, out = capsys.readouterr().out, traffic.parent / "replay"
    assert f"{ROWS} conversations" in done and "verdicts that flip" in done
    facts = json.loads((out / "replay.json").read_text())
    assert facts["judged"] == ROWS - 1 and facts["unjudged_a_and_b"] == 1
    row = facts["flipped"][0]
    stored = json.loads(traffic.read_text().splitlines()[row["row"]])["messages"][-1]
    messages = (*CONVERSATION, Message("user", stored["content"]))
    for key, folder in zip(("p_a", "p_b"), versions, strict=True):
        logit = peft_logit(messages, text_of("mild"), folder)
        assert row[key] == pytest.approx(1 / (1 + 2.718281828 ** -(logit / 2)), abs=0.02)
    page = (out / "replay.html").read_text()
    assert page.count("<article>") == facts["flips"]["count"] == ROWS - 1
    assert "&lt;b&gt;0&lt;/b&gt;" in page and "<b>0</b>" not in page
    replay(monkeypatch, versions, traffic)
    again = capsys.readouterr().out
    assert "loading" not in again and "verdicts that flip" in again


def finished_replay(versions: list[Path], traffic: Path) -> tuple[PartFolder, VersionPair]:
    """A replay whose verdicts no engine gave: all flip."""
    pair = find_pair(*versions)
    manifest = manifest_of([replayed_part(pair)], [str(traffic)], 8)
    folder = PartFolder(traffic.parent / "replay", manifest)
    for number in range(ROWS // 8):
        rows: list[ScanRow] = []
        for row in range(8 * number, 8 * number + 8):
            for name, verdict in (("mild@A", "violation"), ("mild@B", "allow")):
                rows.append(ScanRow(str(traffic), row, "", name, verdict, 0.5, 0.5, True, ""))
        folder.write(number, rows)
    folder.finish(replace(manifest, is_finished=True, conversations=ROWS))
    return folder, pair


def test_of_a_source_that_has_changed_or_a_part_that_lost_rows_there_is_no_report(
    versions: list[Path], traffic: Path
) -> None:
    folder, pair = finished_replay(versions, traffic)
    report = report_replay(folder, pair)
    report.save(folder.folder)
    facts = json.loads((folder.folder / "replay.json").read_text())
    assert facts["conversations"] == ROWS and list(facts["sources"]) == [str(traffic)]
    assert facts["rule"] == "mild"
    assert facts["a"]["version"] != facts["b"]["version"] and facts["shares_prefill"]
    assert (facts["flips"]["count"], len(facts["flipped"])) == (ROWS, ROWS)
    assert f"mild: {ROWS} conversations" in report.as_text()
    first, rest = traffic.read_text().split("\n", 1)
    traffic.write_text(f"{rest}{first}\n")
    with pytest.raises(GuardError, match=r"traffic\.jsonl: it has changed since"):
        report.save(folder.folder)
    part = folder.folder / "part-000004.jsonl"
    part.write_text("".join(part.read_text().splitlines(keepends=True)[:-2]))
    with pytest.raises(GuardError, match=r"part-000004\.jsonl: .*14 rows, and not 16"):
        report_replay(folder, pair)


def test_what_cannot_be_replayed_is_found_before_an_engine_starts(
    versions: list[Path], traffic: Path, monkeypatch: MonkeyPatch, capsys: CaptureFixture[str]
) -> None:
    monkeypatch.setattr("serve.scan.command.open_engines", lambda _: pytest.fail("it starts"))
    nowhere = traffic.parent / "nowhere"

    def refused(versions: list[Path], files: Path = traffic) -> str:
        assert replay(monkeypatch, versions, files) == 2
        return capsys.readouterr().err

    assert "no such folder" in refused([versions[0], nowhere])
    assert "no file of stored conversations" in refused(versions, nowhere)
    save_card(versions[1], "mild", prompt_hash="another")
    assert "another wording or layout of the prompt" in refused(versions)
    assert not (traffic.parent / "replay").exists()


def test_of_the_rows_that_are_named_the_last_turns_and_their_ends_are_shown(tmp_path: Path) -> None:
    long = Message("user", "y" * 2 * LAST_CHARACTERS + "its end")
    last = Message("assistant", "the last turn")
    messages = [{"role": turn.role, "content": turn.content} for turn in (long, last)]
    system = {"role": "system", "content": "x"}
    rows: list[dict[str, Any]] = [{"text": f"number {number}"} for number in range(9)]
    rows.append({"messages": [*[system] * 9, *messages]})
    file = tmp_path / "a.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    texts = excerpts([(str(file), 9), (str(file), 2)])
    assert texts[str(file), 2] == (Message("user", "number 2"),)
    turns = texts[str(file), 9]
    assert len(turns) == 4 and turns[-1] == last
    assert turns[2].content.startswith(ELLIPSIS) and turns[2].content.endswith("its end")
    assert len(turns[2].content) == LAST_CHARACTERS + 1


def test_flips_stand_on_the_page_with_their_text_and_nothing_is_loaded(tmp_path: Path) -> None:
    a = weights(tmp_path / "a", "mild", "before")
    pair = find_pair(a, weights(tmp_path / "b", "mild", "after", threshold=0.5))
    texts = {("a.jsonl", 1): (Message("user", "</pre><script>alert(1)</script>"),)}
    tally = tallied([(0.1, 0.2), (0.1, 0.9), (0.7, 0.3), (None, 0.9)])
    html = page("Replay", pair, tally, texts)
    assert "&lt;script&gt;" in html and "<script" not in html
    assert "default-src 'none'" in html
    assert html.index("allow 0.100 → violation 0.900") < html.index("violation 0.700 → allow 0.300")
    assert "a.jsonl, row 1, id c1" in html and "2 of 2 flips, largest change first" in html
    assert "The conversation is no longer there." in html  # of row 2
    for text in ("it does not fit", "The threshold differs"):
        assert text in html


def weights(folder: Path, rule: str, content: str, method: str = "alora", **card: Any) -> Path:
    """A folder with a card whose weights nothing loads."""
    folder.mkdir(parents=True)
    name = "head.safetensors" if method == "head" else "adapter_model.safetensors"
    (folder / name).write_text(content)
    save_card(folder, rule, method, **card)
    return folder


def test_what_differs_beside_the_weights_is_said(tmp_path: Path) -> None:
    text = "The assistant must not be wild."
    a = weights(tmp_path / "a", "mild", "same")
    changed = {"rule_text": text, "rule_hash": text_hash(text), "data_hash": "more"}
    b = weights(tmp_path / "b", "mild", "same", threshold=0.5, reads="user", **changed)
    pair = find_pair(a, b)
    assert pair.shares_prefill
    said = " ".join(pair.differences)
    assert text in said and text_of("mild") in said
    assert "only the card" in said and "A has “0.25”, B has “0.5”" in said
    assert "What counts differs: A has “conversation”, B has “user”." in said
    assert "different data" in said


def test_what_cannot_stand_side_by_side_is_refused(tmp_path: Path) -> None:
    a = weights(tmp_path / "a" / "mild" / "alora", "mild", "before")
    empty = tmp_path / "empty"
    empty.mkdir()
    wrong = {
        "no such folder": tmp_path / "nowhere",
        "card.json": empty,
        "answer different rules": weights(tmp_path / "stern", "stern", "x"),
        "the same weights": a,
    }
    for problem, folder in wrong.items():
        with pytest.raises(GuardError, match=problem):
            find_pair(a, folder)
    for changed in ({"base": "another"}, {"base_revision": "newer"}):
        (key,) = changed
        with pytest.raises(GuardError, match="on different bases"):
            find_pair(a, weights(tmp_path / key, "mild", "after", **changed))


Pair = tuple[float | None, float | None]


def row(number: int, p: float | None, *, confident: bool = True) -> dict[str, Any]:
    place = {"source": "a.jsonl", "row": number, "id": f"c{number}", "p_violation": p}
    if p is None:
        return {**place, "verdict": "unjudged", "confident": None, "reason": "it does not fit"}
    verdict = "violation" if p >= 0.5 else "allow"
    return {**place, "verdict": verdict, "confident": confident, "reason": ""}


def tallied(pairs: list[Pair], shown: int = 50) -> ReplayTally:
    tally = ReplayTally(shown)
    for number, (a, b) in enumerate(pairs):
        tally.add(row(number, a), row(number, b))
    return tally


def test_each_direction_and_each_side_is_counted() -> None:
    pairs: list[Pair] = [(0.1, 0.2), (0.1, 0.9), (0.4, 0.6), (0.7, 0.3), (0.8, 0.9)]
    pairs += [(None, 0.9), (0.1, None), (None, None)]
    tally = tallied(pairs)
    facts = tally.facts()
    assert facts["judged"] == 5
    counts = {name: facts[name]["count"] for name in ("to_violation", "to_allow", "flips")}
    assert counts == {"to_violation": 2, "to_allow": 1, "flips": 3}
    assert (facts["flagged_a"]["count"], facts["flagged_b"]["count"]) == (2, 3)
    assert [facts[f"unjudged_{side}"] for side in ("a", "b", "a_and_b")] == [1, 1, 1]
    assert facts["reasons"] == {"it does not fit": 3}
    assert [flip["row"] for flip in facts["flipped"]] == [1, 3, 2]
    assert tally.largest()[1].change == pytest.approx(-0.4)
    assert list(facts["quantiles"].values())[::2] == pytest.approx([-0.4, 0.1, 0.8])
    assert facts["confident_flips"] == 3
    tally.add(row(9, 0.1), row(9, 0.6, confident=False))
    assert tally.facts()["confident_flips"] == 3, "either is in doubt"
    text = tallied(pairs).as_text()
    assert (text["judged by both"], text["unjudged by A only"]) == ("5", "1")
    assert text["verdicts that flip"].startswith("3 (60.00 %, 95 % interval ")
    assert "least -0.400" in text["p(B) - p(A)"] and "most +0.800" in text["p(B) - p(A)"]
    assert text["unjudged: it does not fit"] == "3"


def test_the_interval_is_exact_and_of_nothing_says_nothing() -> None:
    assert str(CountedShare.of(3, 2000)) == "3 (0.15 %, 95 % interval 0.03 to 0.44)"
    assert CountedShare.of(0, 0).ci95 == (0.0, 1.0)
    nothing = tallied([(None, None)])
    assert nothing.facts()["quantiles"] == {} and "p(B) - p(A)" not in nothing.as_text()


def test_the_list_is_bounded_and_keeps_the_largest() -> None:
    changes = np.random.default_rng(0).uniform(0.1, 0.5, 300)
    tally = tallied([(0.45, 0.45 + change) for change in changes], shown=7)
    expected = np.argsort(-changes)[:7].tolist()
    assert [flip.row for flip in tally.largest()] == expected
    assert tally.counts["flips"] == sum(changes >= 0.05) and len(tally.flips) <= 14
