"""Two versions on recorded traffic: what each says over one prefill, and the page on it."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from guard.conversation.example import Message
from guard.errors import GuardError
from serve.engine.engines import GuardEngines
from serve.scan.parts import PartFolder, ScanRow, manifest_of
from serve.scan.replay import (
    ELLIPSIS,
    LAST_CHARACTERS,
    excerpts,
    main,
    page,
    report_replay,
    rule_section,
)
from serve.scan.versions import Versions, find_versions, replayed_parts
from serve.selection import ServedPart, open_engines
from tests.serve.cards import prompts, save_card, text_of
from tests.serve.guarded import CONVERSATION, peft_logit, save_adapter
from tests.serve.scan.test_versions import tallied, weights

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


def replay(
    monkeypatch: pytest.MonkeyPatch, versions: list[Path], traffic: Path, *more: str
) -> None:
    named = [*map(str, versions), "--files", str(traffic), "--runs", str(traffic.parent)]
    monkeypatch.setattr("sys.argv", ["replay", *named, "--rows-a-part", "8", *more])
    main()


@pytest.mark.slow
@pytest.mark.usefixtures("uncompiled")
def test_a_replay_prefills_once_for_both_and_reports_what_peft_says(
    versions: list[Path],
    traffic: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
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
    replay(monkeypatch, versions, traffic)
    assert computed[2] == computed[1] + len(prompts().suffix_ids(text_of("mild")))
    done, out = capsys.readouterr().out, traffic.parent / "replay"
    assert f"{ROWS} conversations" in done and "verdicts that flip" in done
    facts = json.loads((out / "replay.json").read_text())["rules"]["mild"]
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


def finished_replay(versions: list[Path], traffic: Path) -> tuple[PartFolder, Versions]:
    """A replay whose verdicts no engine gave: all flip."""
    found = find_versions(*versions)
    manifest = manifest_of(replayed_parts(found), [str(traffic)], 8, "jsonl")
    folder = PartFolder(traffic.parent / "replay", manifest)
    for number in range(ROWS // 8):
        rows: list[ScanRow] = []
        for row in range(8 * number, 8 * number + 8):
            for name, verdict in (("mild@A", "violation"), ("mild@B", "allow")):
                rows.append(ScanRow(str(traffic), row, "", name, verdict, 0.5, 0.5, True, ""))
        folder.write(number, rows)
    folder.finish(replace(manifest, is_finished=True, conversations=ROWS))
    return folder, found


def test_of_a_source_that_has_changed_or_a_part_that_lost_rows_there_is_no_report(
    versions: list[Path], traffic: Path
) -> None:
    folder, found = finished_replay(versions, traffic)
    report = report_replay(folder, found, 50)
    report.save(folder.folder)
    facts = json.loads((folder.folder / "replay.json").read_text())
    assert facts["conversations"] == ROWS and list(facts["sources"]) == [str(traffic)]
    mild = facts["rules"]["mild"]
    assert mild["a"]["version"] != mild["b"]["version"] and mild["shares_prefill"]
    assert (mild["flips"]["count"], len(mild["flipped"])) == (ROWS, ROWS)
    assert f"{ROWS} conversations, 1 rules" in report.as_text()
    first, rest = traffic.read_text().split("\n", 1)
    traffic.write_text(f"{rest}{first}\n")
    with pytest.raises(GuardError, match=r"traffic\.jsonl: it has changed since"):
        report.save(folder.folder)
    part = folder.folder / "part-000004.jsonl"
    part.write_text("".join(part.read_text().splitlines(keepends=True)[:-2]))
    with pytest.raises(GuardError, match=r"part-000004\.jsonl: .*14 rows, and not 16"):
        report_replay(folder, found, 50)


def test_what_cannot_be_replayed_is_found_before_an_engine_starts(
    versions: list[Path],
    traffic: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("serve.scan.command.open_engines", lambda _: pytest.fail("it starts"))
    nowhere = traffic.parent / "nowhere"

    def refused(versions: list[Path], files: Path = traffic, *more: str) -> str:
        with pytest.raises(SystemExit) as ended:
            replay(monkeypatch, versions, files, *more)
        assert ended.value.code == 2
        return capsys.readouterr().err

    assert "no such folder" in refused([versions[0], nowhere])
    assert "no file of stored conversations" in refused(versions, nowhere)
    by_method = refused(versions, traffic, "--method", "alora")
    assert "folders of weights say their method themselves" in by_method
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
    (pair,) = find_versions(a, weights(tmp_path / "b", "mild", "after", threshold=0.5)).pairs
    texts = {("a.jsonl", 1): (Message("user", "</pre><script>alert(1)</script>"),)}
    tally = tallied([(0.1, 0.2), (0.1, 0.9), (0.7, 0.3), (None, 0.9)])
    html = page("Replay", ["only in B: <new>"], [rule_section(pair, tally, texts)])
    assert "&lt;script&gt;" in html and "<script" not in html
    assert "default-src 'none'" in html
    assert html.index("allow 0.100 → violation 0.900") < html.index("violation 0.700 → allow 0.300")
    assert "a.jsonl, row 1, id c1" in html and "2 of 2 flips, largest change first" in html
    assert "The conversation is no longer there." in html  # of row 2
    for text in ("it does not fit", "only in B: &lt;new&gt;", "The threshold differs"):
        assert text in html
