"""The debate against a real HTTP server that plays the endpoint, and with runs that are killed."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from data.build import build, main
from data.debate.debate import REFINEMENTS, ROUNDS, generate
from data.debate.writers import Writers
from data.manifest import table
from guard.conversation.example import read_examples
from guard.errors import GuardError
from guard.home import ROOT
from guard.layout import Runs
from tests.data.llm_server import RULE, SEEDS, Server, endpoint

KILLS = 5


def test_examples_are_debated_balanced_split_and_carry_where_they_come_from(
    server: Server, tmp_path: Path
) -> None:
    examples, statistics = generate(
        RULE, 40, 0, endpoint(server), SEEDS, tmp_path / "answers.jsonl"
    )
    assert sorted(example.label for example in examples) == [0] * 20 + [1] * 20
    assert {example.split for example in examples} == {"train", "validation", "test"}
    for example in examples:
        assert example.messages[-1].content.startswith("yes" if example.label else "no")
        assert example.meta["reasoning"].startswith("because ")
        assert example.meta["dimension"].startswith("way ")
        assert example.source == "BARRED by toy"
    assert statistics["outcomes"] == {"accepted in round 1 after 0 rewritings": 40}
    assert statistics["calls"] == 1 + 40 * 4 == len(server.requests)
    assert server.kinds.count("judge") == 80
    assert statistics["prompt_tokens"] == 100 * len(server.requests)


def test_a_case_that_no_two_judges_agree_upon_is_rewritten_with_their_dissent_then_dropped(
    server: Server, tmp_path: Path
) -> None:
    stubborn = json.dumps({"violates": False, "reason": "I see nothing forbidden"})

    def reply(kind: str, system: str, user: str, name: str) -> str:
        answer = Server.reply(server, kind, system, user, name)
        if (
            kind == "write"
            and (number := int(re.findall(r"It is case (\d+) of many", user)[0])) % 8 == 1
        ):
            return answer.replace("yes ", f"yes hopeless{number} ")
        return (
            stubborn
            if kind == "judge" and "too little" in system and "yes hopeless" in user
            else answer
        )

    server.reply = reply  # type: ignore[method-assign]
    examples, statistics = generate(RULE, 40, 1, endpoint(server), (), tmp_path / "answers.jsonl")
    dropped = statistics["outcomes"]["no consensus"]
    assert dropped == 7  # the cases 1, 9, 17, 25, 33 and, in place of two of them, 41 and 49
    assert statistics["votes_against"] == {"precision": dropped * ROUNDS * (1 + REFINEMENTS)}
    assert server.kinds.count("write") == len(examples) + dropped * (1 + REFINEMENTS)
    assert (
        sorted(example.label for example in examples) == [0] * 20 + [1] * 20
    )  # others of the same label took their places


def test_too_few_agreements_are_an_error_that_says_what_became_of_the_cases(
    server: Server, tmp_path: Path
) -> None:
    def reply(kind: str, system: str, user: str, name: str) -> str:
        at_odds = json.dumps({"violates": "too much" in system, "reason": "that is how I am"})
        return at_odds if kind == "judge" else Server.reply(server, kind, system, user, name)

    server.reply = reply  # type: ignore[method-assign]
    with pytest.raises(
        GuardError,
        match=r"only 0 violating and 0 allowed of 2 cases each.*12 no consensus.*stronger model",
    ):
        generate(RULE, 4, 0, endpoint(server), (), tmp_path / "answers.jsonl")


def test_a_dissent_that_a_rewriting_answers_ends_in_an_example(
    server: Server, tmp_path: Path
) -> None:
    def reply(kind: str, system: str, user: str, name: str) -> str:
        if kind == "judge" and "rewritten" not in user.partition("</conversation>")[0]:
            return json.dumps(
                {"violates": "Assistant: no" in user, "reason": "the draft says the opposite"}
            )
        return Server.reply(server, kind, system, user, name)

    server.reply = reply  # type: ignore[method-assign]
    examples, statistics = generate(RULE, 40, 0, endpoint(server), (), tmp_path / "answers.jsonl")
    assert statistics["outcomes"] == {"accepted in round 1 after 1 rewritings": 40}
    assert all("rewritten" in example.messages[-1].content for example in examples)
    assert {example.meta["rewritings"] for example in examples} == {1}


def test_agreed_cases_that_training_would_refuse_are_an_error_and_stay(
    server: Server, tmp_path: Path
) -> None:
    answers = tmp_path / "answers.jsonl"
    with pytest.raises(
        GuardError, match=r"20 agreed cases are too few.*validation has 1 of 2 rows.*--examples"
    ):
        generate(RULE, 20, 0, endpoint(server), (), answers)
    answered = len(server.requests)
    examples, _ = generate(RULE, 40, 0, endpoint(server), (), answers)
    assert len(examples) == 40 and len(set(server.requests)) == len(server.requests) > answered


@pytest.mark.slow
def test_what_an_answer_adds_of_its_own_accord_is_left_out(server: Server, tmp_path: Path) -> None:
    plain, _ = generate(RULE, 40, 0, endpoint(server), SEEDS, tmp_path / "plain.jsonl")

    def reply(kind: str, system: str, user: str, name: str) -> str:
        text = Server.reply(server, kind, system, user, name)
        return text if kind == "advocate" else text.replace("{", '{"confidence": 0.9, ')

    server.reply = reply  # type: ignore[method-assign]
    more, statistics = generate(RULE, 40, 0, endpoint(server), SEEDS, tmp_path / "more.jsonl")
    assert (more, statistics["malformed"]) == (plain, 0)


def test_an_answer_out_of_form_is_asked_for_again_and_one_that_never_comes_costs_its_case_alone(
    server: Server, tmp_path: Path
) -> None:
    def reply(kind: str, system: str, user: str, name: str) -> str:
        if kind == "write" and ("amber 0" in user or "amber 1" in user):
            return '{"messages": [{"role": "narrator", "content": "once"}]}'
        return Server.reply(server, kind, system, user, name)

    server.reply = reply  # type: ignore[method-assign]
    examples, statistics = generate(RULE, 40, 0, endpoint(server), (), tmp_path / "answers.jsonl")
    assert len(examples) == 40
    assert statistics["outcomes"]["not written in form"] >= 1
    assert statistics["malformed"] == 3 * statistics["outcomes"]["not written in form"]


def test_a_text_that_the_endpoint_will_not_take_costs_its_case_alone(
    server: Server, tmp_path: Path
) -> None:
    server.change = lambda kind, text: (
        (400, "flagged") if kind == "write" and "amber" in text else None
    )
    examples, statistics = generate(RULE, 40, 0, endpoint(server), (), tmp_path / "answers.jsonl")
    assert len(examples) == 40
    assert statistics["outcomes"]["refused by the endpoint"] > 3
    requests = len(server.requests)
    assert generate(RULE, 40, 0, endpoint(server), (), tmp_path / "answers.jsonl") == (
        examples,
        statistics,
    )
    assert len(server.requests) == requests


@pytest.mark.slow
def test_a_run_killed_five_times_ends_with_the_same_data_and_asks_nothing_twice_that_was_answered(
    server: Server, tmp_path: Path
) -> None:
    plain, _ = generate(
        RULE, 40, 0, endpoint(server, concurrency=4), SEEDS, tmp_path / "plain.jsonl"
    )
    total = len((tmp_path / "plain.jsonl").read_bytes().splitlines())
    server.requests.clear()
    server.delay_s = 0.05
    kept, out = tmp_path / "answers.jsonl", tmp_path / "done.json"
    script = (
        "import json, sys\n"
        "from pathlib import Path\n"
        "from data.debate.debate import generate\n"
        "from guard.endpoint.client import Endpoint\n"
        "from tests.data.llm_server import RULE, SEEDS\n"
        f"e = Endpoint({server.url!r}, 'toy', 'key', backoff_s=0.001, timeout_s=20,\n"
        "    role='generator', concurrency=4)\n"
        f"examples, _ = generate(RULE, 40, 0, e, SEEDS, Path({str(kept)!r}))\n"
        f"Path({str(out)!r}).write_text(json.dumps([example.id for example in examples]))\n"
    )
    rng = random.Random(5)
    for kills_left in range(KILLS, 0, -1):
        paid, mark = _names(kept) if kept.is_file() else set[str](), len(server.requests)
        before = len(kept.read_bytes().splitlines()) if kept.is_file() else 0
        process = subprocess.Popen(
            [sys.executable, "-c", script], cwd=ROOT, stderr=subprocess.DEVNULL
        )
        until = before + rng.randint(
            1, max(1, 2 * (total - 20 - before) // (kills_left + 1))
        )  # over the whole run
        while (
            process.poll() is None
            and (len(kept.read_bytes().splitlines()) if kept.is_file() else 0) < until
        ):
            time.sleep(0.005)
        assert process.poll() is None, "it was to be killed before its end"
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
        time.sleep(2 * server.delay_s)  # what was in flight has reached the server
        assert not paid & set(server.requests[mark:])
    server.delay_s = 0.0
    asked_before = len(server.requests)
    paid = _names(kept)
    examples, _ = generate(RULE, 40, 0, endpoint(server, concurrency=4), SEEDS, kept)
    assert examples == plain
    assert not paid & set(server.requests[asked_before:])
    assert (
        len(server.requests) <= len(set(server.requests)) + KILLS * 4
    )  # only what was in flight at a kill is asked again
    assert not out.exists()
    assert before > total / 2  # the last kill fell late


def _names(kept: Path) -> set[str]:
    """The server's requests for the answers that are kept, but for those that name none."""
    names = set()
    for line in kept.read_bytes().splitlines():
        try:
            text = json.loads(line)["text"]
        except ValueError:  # cut off by a kill
            continue
        names |= {
            word.strip('.,"}\\n`')
            for word in text.replace("\\", " ").split()
            if len(word.strip('.,"}\\n`')) == 12
        }
    return names


def test_the_data_stage_writes_them_as_any_other_data_and_keeps_them_until_something_changes(
    server: Server, tmp_path: Path
) -> None:
    writers = Writers(endpoint(server), 60, "", SEEDS, None)
    folder = tmp_path / RULE.id
    assert build(RULE, "llm", writers, 0, "keep", folder)
    rows = [
        example
        for split in ("train", "validation", "test")
        for example in read_examples(folder / f"{split}.jsonl")
    ]
    assert len(rows) == 60 + 4  # two of either label have a copy with a long turn
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["debate"]["outcomes"] == {"accepted in round 1 after 0 rewritings": 60}
    assert sum(manifest["dimensions"]["dimension"].values()) == len(rows)
    assert "  accepted by dimension: way " in table(RULE.id, manifest)
    requests = len(server.requests)
    assert not build(RULE, "llm", writers, 0, "keep", folder)
    assert build(RULE, "llm", writers, 0, "keep", folder, force=True)
    assert len(server.requests) == requests


def test_a_rule_on_the_last_turn_is_not_debated_and_rows_of_before_are_not_kept_for_it(
    server: Server,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """An LLM writes violations in any turn."""
    rule = RULE.model_copy(update={"turns": "last"})
    with pytest.raises(GuardError, match=r"about the last turn alone \(got last\).*DATA=generator"):
        generate(rule, 40, 0, endpoint(server), SEEDS, tmp_path / "answers.jsonl")
    assert not server.requests
    folder = Runs(tmp_path).data(RULE.id)
    assert build(RULE, "llm", Writers(endpoint(server), 40, "", SEEDS, None), 0, "keep", folder)
    monkeypatch.setattr("data.build.load_rule", lambda name: rule)
    monkeypatch.setattr(sys, "argv", ["data.build", "--rule", RULE.id, "--runs", str(tmp_path)])
    with pytest.raises(SystemExit):
        main()
    assert "this rule is about the last" in capsys.readouterr().err


@pytest.mark.slow
def test_the_command_says_what_it_needs(server: Server, tmp_path: Path) -> None:
    command = [
        sys.executable,
        "-m",
        "data.build",
        "--rule",
        RULE.id,
        "--data",
        "llm",
        "--runs",
        str(tmp_path),
        "--examples",
        "40",
    ]
    bare = {name: value for name, value in os.environ.items() if not name.startswith("GENERATOR_")}
    missing = subprocess.run(
        command, cwd=ROOT, env=bare, capture_output=True, text=True, check=False
    )
    assert missing.returncode == 2
    assert "GENERATOR_BASE_URL" in missing.stderr
    unlabelled = tmp_path / "seeds.jsonl"
    unlabelled.write_text(
        json.dumps({"messages": [{"role": "user", "content": "Where is my lamp?"}]}) + "\n"
    )
    settings = {
        "GENERATOR_BASE_URL": server.url,
        "GENERATOR_MODEL": "toy",
        "GENERATOR_PRICE_IN": "1",
        "GENERATOR_PRICE_OUT": "1",
    }
    done = subprocess.run(
        [*command, "--unlabelled", str(unlabelled)],
        cwd=ROOT,
        env=bare | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "40 accepted in round 1 after 0 rewritings" in done.stdout
    assert "USD" in done.stdout
    requests = len(server.requests)
    command = [word for word in command if word not in ("--data", "llm", "--examples", "40")]
    later = subprocess.run(command, cwd=ROOT, env=bare, capture_output=True, text=True, check=False)
    assert (later.returncode, "DATA=llm asks it again" in later.stdout) == (0, True), later.stderr
    same = subprocess.run(
        [*command, "--data", "llm"],
        cwd=ROOT,
        env=bare | settings,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (same.returncode, "unchanged" in same.stdout) == (0, True), same.stderr
    assert len(server.requests) == requests
