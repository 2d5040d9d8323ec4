"""The debate against a real HTTP server that plays the endpoint, with faults, and with runs that are killed."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from data.build import Writers, build
from data.debate.debate import REFINEMENTS, ROUNDS, generate
from data.generator.generate import Counts
from data.manifest import table
from guard.endpoint.client import Endpoint
from guard.errors import GuardError
from guard.example import Message, read_examples
from guard.layout import ROOT
from guard.rule import load_rule

RULE = load_rule("refund_promise")
SEEDS = ((Message("user", "The lamp is broken."), Message("assistant", "I will have a look.")),)
WORDS = [
    "amber",
    "birch",
    "cedar",
    "delta",
    "ember",
    "flint",
    "grove",
    "heron",
    "inlet",
    "jetty",
    "kelp",
    "larch",
    "maple",
    "north",
    "ocean",
    "pearl",
    "quartz",
    "raven",
    "slate",
    "thorn",
]


@dataclass
class Server:
    """Plays an LLM: what it says follows from what it is asked. `change` may turn an answer into a fault (status, body)."""

    change: Callable[[str, str], tuple[int, str] | None] = lambda kind, text: None
    delay_s: float = 0.0
    asked: list[str] = field(default_factory=list)
    kinds: list[str] = field(default_factory=list)
    url: str = ""

    def answer(self, body: dict[str, Any]) -> tuple[int, str]:
        name = hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()[:12]
        system, user = (message["content"] for message in body["messages"])
        kind = {"design": "dimensions", "write": "write", "an": "advocate", "a": "judge"}[
            next(w for w in system.split()[1:] if w != "are")
        ]
        self.asked.append(name)
        self.kinds.append(kind)
        text = self.said(kind, system, user, name)
        if fault := self.change(kind, text):
            return fault
        usage = {"prompt_tokens": 100, "completion_tokens": 20}
        return 200, json.dumps(
            {"choices": [{"message": {"content": text}, "finish_reason": "stop"}], "usage": usage}
        )

    def said(self, kind: str, system: str, user: str, name: str) -> str:
        rng = random.Random(name)
        if kind == "dimensions":
            return json.dumps(
                {
                    "dimensions": [
                        {"name": f"way {n}", "values": [f"{word} {n}" for word in WORDS[:4]]}
                        for n in range(3)
                    ]
                }
            )
        if kind == "write":
            label = "yes" if "conversation that VIOLATES" in user else "no"
            words = " ".join(rng.choices(WORDS, k=14))
            again = "rewritten" if "Your last attempt" in user else "first"
            turns = [
                {"role": "user", "content": f"{words}?"},
                {"role": "assistant", "content": f"{label} {again} {name} {words[::-1]}."},
            ]
            return (
                "Here it is:\n```json\n"
                + json.dumps({"messages": turns, "reasoning": f"because {name}"})
                + "\n```"
            )
        if kind == "advocate":
            return f"<think>hm</think>It is so, {name}."
        conversation = user[user.index("<conversation>") : user.index("</conversation>")]
        return json.dumps(
            {"violates": "Assistant: yes" in conversation, "reason": f"as it says, {name}"}
        )


@pytest.fixture
def server() -> Iterator[Server]:
    plays = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            status, said = plays.answer(body)
            time.sleep(plays.delay_s)
            content = said.encode()
            self.send_response(status)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            """A client that was killed."""

    with Quiet(("127.0.0.1", 0), Handler) as http:
        threading.Thread(target=http.serve_forever, daemon=True).start()
        plays.url = f"http://127.0.0.1:{http.server_address[1]}/v1"
        yield plays
        http.shutdown()


def endpoint(server: Server, **settings: Any) -> Endpoint:
    return Endpoint(
        server.url,
        "toy",
        "key",
        **({"backoff_s": 0.001, "timeout_s": 20, "role": "generator"} | settings),
    )


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
    assert statistics["calls"] == 1 + 40 * 4 == len(server.asked)
    assert server.kinds.count("judge") == 80
    assert statistics["prompt_tokens"] == 100 * len(server.asked)


def test_a_case_that_no_two_judges_agree_upon_is_rewritten_with_their_dissent_then_dropped(
    server: Server, tmp_path: Path
) -> None:
    stubborn = json.dumps({"violates": False, "reason": "I see nothing forbidden"})

    def said(kind: str, system: str, user: str, name: str) -> str:
        answer = Server.said(server, kind, system, user, name)
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

    server.said = said  # type: ignore[method-assign]
    examples, statistics = generate(RULE, 20, 1, endpoint(server), (), tmp_path / "answers.jsonl")
    dropped = statistics["outcomes"]["no consensus"]
    assert dropped == 4  # the cases 1, 9, 17 and, in place of one of them, 25
    assert statistics["votes_against"] == {"precision": dropped * ROUNDS * (1 + REFINEMENTS)}
    assert server.kinds.count("write") == len(examples) + dropped * (1 + REFINEMENTS)
    assert (
        sorted(example.label for example in examples) == [0] * 10 + [1] * 10
    )  # others of the same label took their places


def test_too_few_agreements_are_an_error_that_says_what_became_of_the_cases(
    server: Server, tmp_path: Path
) -> None:
    def said(kind: str, system: str, user: str, name: str) -> str:
        at_odds = json.dumps({"violates": "too much" in system, "reason": "that is how I am"})
        return at_odds if kind == "judge" else Server.said(server, kind, system, user, name)

    server.said = said  # type: ignore[method-assign]
    with pytest.raises(
        GuardError,
        match=r"only 0 violating and 0 allowed of 2 cases each.*12 no consensus.*stronger model",
    ):
        generate(RULE, 4, 0, endpoint(server), (), tmp_path / "answers.jsonl")


def test_a_dissent_that_a_rewriting_answers_ends_in_an_example(
    server: Server, tmp_path: Path
) -> None:
    def said(kind: str, system: str, user: str, name: str) -> str:
        if kind == "judge" and "rewritten" not in user.partition("</conversation>")[0]:
            return json.dumps(
                {"violates": "Assistant: no" in user, "reason": "the draft says the opposite"}
            )
        return Server.said(server, kind, system, user, name)

    server.said = said  # type: ignore[method-assign]
    examples, statistics = generate(RULE, 20, 0, endpoint(server), (), tmp_path / "answers.jsonl")
    assert statistics["outcomes"] == {"accepted in round 1 after 1 rewritings": 20}
    assert all("rewritten" in example.messages[-1].content for example in examples)
    assert {example.meta["rewritings"] for example in examples} == {1}


@pytest.mark.parametrize("fault", [(429, "slow down"), (500, "oops"), (200, "no json at all")])
def test_passing_faults_change_nothing(
    server: Server, tmp_path: Path, fault: tuple[int, str]
) -> None:
    plain, _ = generate(RULE, 20, 0, endpoint(server), SEEDS, tmp_path / "plain.jsonl")
    count = 0

    def every_fifth(kind: str, text: str) -> tuple[int, str] | None:
        nonlocal count
        count += 1
        return fault if count % 5 == 0 else None

    server.change = every_fifth
    faulty, _ = generate(RULE, 20, 0, endpoint(server), SEEDS, tmp_path / "faulty.jsonl")
    assert faulty == plain


def test_what_an_answer_adds_of_its_own_accord_is_left_out(server: Server, tmp_path: Path) -> None:
    plain, _ = generate(RULE, 20, 0, endpoint(server), SEEDS, tmp_path / "plain.jsonl")

    def said(kind: str, system: str, user: str, name: str) -> str:
        text = Server.said(server, kind, system, user, name)
        return text if kind == "advocate" else text.replace("{", '{"confidence": 0.9, ')

    server.said = said  # type: ignore[method-assign]
    more, statistics = generate(RULE, 20, 0, endpoint(server), SEEDS, tmp_path / "more.jsonl")
    assert (more, statistics["malformed"]) == (plain, 0)


def test_half_a_character_that_no_request_could_quote_is_asked_for_again(
    server: Server, tmp_path: Path
) -> None:
    plain, _ = generate(RULE, 20, 0, endpoint(server), SEEDS, tmp_path / "plain.jsonl")
    broken = json.dumps(
        {"choices": [{"message": {"content": "It is so \ud83d"}, "finish_reason": "stop"}]}
    )
    seen: list[str] = []
    server.change = lambda kind, text: (
        (200, broken) if kind == "advocate" and not seen and not seen.append(text) else None
    )  # type: ignore[func-returns-value]
    again, statistics = generate(RULE, 20, 0, endpoint(server), SEEDS, tmp_path / "broken.jsonl")
    assert (again, statistics["malformed"]) == (plain, 1)


def test_an_endpoint_that_is_too_slow_is_asked_twice_and_no_more(
    server: Server, tmp_path: Path
) -> None:
    server.delay_s = 1.0
    slow = dataclasses.replace(endpoint(server), timeout_s=0.2)
    with pytest.raises(
        GuardError,
        match=r"no answer about refund_promise/dimensions/0 in 0.2 s, 2 times.*GENERATOR_TIMEOUT_S",
    ):
        generate(RULE, 20, 0, slow, (), tmp_path / "answers.jsonl")
    assert server.kinds == ["dimensions"] * 2


def test_an_answer_out_of_form_is_asked_for_again_and_one_that_never_comes_costs_its_case_alone(
    server: Server, tmp_path: Path
) -> None:
    def said(kind: str, system: str, user: str, name: str) -> str:
        if kind == "write" and ("amber 0" in user or "amber 1" in user):
            return '{"messages": [{"role": "narrator", "content": "once"}]}'
        return Server.said(server, kind, system, user, name)

    server.said = said  # type: ignore[method-assign]
    examples, statistics = generate(RULE, 24, 0, endpoint(server), (), tmp_path / "answers.jsonl")
    assert len(examples) == 24
    assert statistics["outcomes"]["not written in form"] >= 1
    assert statistics["malformed"] == 3 * statistics["outcomes"]["not written in form"]


def test_a_text_that_the_endpoint_will_not_take_costs_its_case_alone(
    server: Server, tmp_path: Path
) -> None:
    server.change = lambda kind, text: (
        (400, "flagged") if kind == "write" and "amber" in text else None
    )
    examples, statistics = generate(RULE, 24, 0, endpoint(server), (), tmp_path / "answers.jsonl")
    assert len(examples) == 24
    assert statistics["outcomes"]["refused by the endpoint"] > 3
    asked = len(server.asked)
    assert generate(RULE, 24, 0, endpoint(server), (), tmp_path / "answers.jsonl") == (
        examples,
        statistics,
    )
    assert len(server.asked) == asked


def test_what_refuses_everything_is_an_error_and_is_asked_again_once_that_is_mended(
    server: Server, tmp_path: Path
) -> None:
    kept = tmp_path / "answers.jsonl"
    server.change = lambda kind, text: (403, "no such permission")
    with pytest.raises(
        GuardError, match=r"refused the policy.*no such permission.*GENERATOR_API_KEY"
    ):
        generate(RULE, 24, 0, endpoint(server), SEEDS, kept)
    server.change = lambda kind, text: (
        (403, "no such permission") if len(server.asked) > 40 else None
    )
    with pytest.raises(GuardError, match=r"refused 8 requests in a row.*no such permission"):
        generate(RULE, 24, 0, endpoint(server), SEEDS, kept)
    server.change = lambda kind, text: None
    _, statistics = generate(RULE, 24, 0, endpoint(server), SEEDS, kept)
    # A refusal that an answer still overtook counts as that of a text; another case takes its place.
    assert statistics["outcomes"]["accepted in round 1 after 0 rewritings"] == 24
    assert statistics["outcomes"].get("refused by the endpoint", 0) < 8


def test_an_answer_that_was_cut_off_is_none(server: Server, tmp_path: Path) -> None:
    plain, _ = generate(RULE, 20, 0, endpoint(server), SEEDS, tmp_path / "plain.jsonl")
    count = 0

    def every_fourth(kind: str, text: str) -> tuple[int, str] | None:
        nonlocal count
        count += 1
        cut = (
            {"content": "<think>" + text, "reasoning": None}
            if count % 8
            else {"content": "{" * 5000}
        )
        choice = {"message": cut, "finish_reason": "length" if count % 3 else "stop"}
        return (200, json.dumps({"choices": [choice]})) if count % 4 == 0 else None

    server.change = every_fourth
    found, statistics = generate(
        RULE, 20, 0, endpoint(server, concurrency=1), SEEDS, tmp_path / "cut.jsonl"
    )
    assert found == plain
    assert statistics["malformed"] > 10


def test_the_budget_ends_a_run_and_a_larger_one_goes_on_from_there(
    server: Server, tmp_path: Path
) -> None:
    priced = endpoint(
        server, price_in=1000.0, price_out=1000.0, concurrency=2
    )  # 0.12 USD an answer
    kept = tmp_path / "answers.jsonl"
    with pytest.raises(GuardError, match=r"budget is spent.*of 3 USD.*GENERATOR_BUDGET_USD"):
        generate(RULE, 20, 0, priced, SEEDS, kept, budget_usd=3.0)
    assert 25 <= len(server.asked) <= 25 + 2
    assert (
        sum(kind == "judge" for kind in server.kinds) >= 8
    )  # cases are finished before others begin
    examples, statistics = generate(RULE, 20, 0, priced, SEEDS, kept, budget_usd=30.0)
    assert len(examples) == 20
    assert len(server.asked) == len(set(server.asked)) == statistics["calls"]
    assert statistics["cost_usd"] == pytest.approx(0.12 * statistics["calls"])
    again = len(server.asked)
    with pytest.raises(GuardError, match="budget is spent"):
        generate(RULE, 40, 0, priced, SEEDS, kept, budget_usd=3.0)
    assert len(server.asked) == again  # what was paid in earlier runs counts
    with pytest.raises(GuardError, match="a budget needs prices"):
        generate(RULE, 20, 0, endpoint(server), SEEDS, kept, budget_usd=1.0)


def test_a_run_killed_ten_times_ends_with_the_same_data_and_asks_nothing_twice_that_was_answered(
    server: Server, tmp_path: Path
) -> None:
    plain, _ = generate(
        RULE, 80, 0, endpoint(server, concurrency=4), SEEDS, tmp_path / "plain.jsonl"
    )
    total = len((tmp_path / "plain.jsonl").read_bytes().splitlines())
    server.asked.clear()
    server.delay_s = 0.05
    kept, out = tmp_path / "answers.jsonl", tmp_path / "done.json"
    script = (
        "import json, sys; from pathlib import Path; from data.debate.debate import generate; from guard.endpoint.client import Endpoint\n"
        "from tests.data.test_barred import RULE, SEEDS\n"
        f"e = Endpoint({server.url!r}, 'toy', 'key', backoff_s=0.001, timeout_s=20, role='generator', concurrency=4)\n"
        f"examples, _ = generate(RULE, 80, 0, e, SEEDS, Path({str(kept)!r}))\n"
        f"Path({str(out)!r}).write_text(json.dumps([example.id for example in examples]))\n"
    )
    rng = random.Random(0)
    for kills_left in range(10, 0, -1):
        paid, mark = _names(kept) if kept.is_file() else set[str](), len(server.asked)
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
        assert not paid & set(server.asked[mark:])
    server.delay_s = 0.0
    asked_before = len(server.asked)
    paid = _names(kept)
    examples, _ = generate(RULE, 80, 0, endpoint(server, concurrency=4), SEEDS, kept)
    assert examples == plain
    assert not paid & set(server.asked[asked_before:])
    assert (
        len(server.asked) <= len(set(server.asked)) + 10 * 4
    )  # only what was in flight at a kill is asked again
    assert not out.exists()
    assert before > total / 2  # the last kill fell late


def test_an_answer_that_is_slow_once_changes_nothing(server: Server, tmp_path: Path) -> None:
    plain, _ = generate(RULE, 20, 0, endpoint(server), SEEDS, tmp_path / "plain.jsonl")
    slow: list[str] = []

    def once(kind: str, text: str) -> None:
        if kind == "judge" and not slow:
            slow.append(text)
            time.sleep(1.5)

    server.change = once
    again, _ = generate(RULE, 20, 0, endpoint(server, timeout_s=1), SEEDS, tmp_path / "slow.jsonl")
    assert slow and again == plain


def _names(kept: Path) -> set[str]:
    """What the server was asked for the answers that are kept, but for those that do not name it."""
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
    assert build(RULE, "llm", Counts(), 0, "keep", folder, writers=writers)
    rows = [
        example
        for split in ("train", "validation", "test")
        for example in read_examples(folder / f"{split}.jsonl")
    ]
    assert len(rows) == 60
    manifest = json.loads((folder / "manifest.json").read_text())
    assert manifest["debate"]["outcomes"] == {"accepted in round 1 after 0 rewritings": 60}
    assert sum(manifest["dimensions"]["dimension"].values()) == 60
    assert "  accepted by dimension: way " in table(RULE.id, manifest)
    asked = len(server.asked)
    assert not build(RULE, "llm", Counts(), 0, "keep", folder, writers=writers)
    assert build(RULE, "llm", Counts(), 0, "keep", folder, writers=writers, force=True)
    assert len(server.asked) == asked


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
    asked = len(server.asked)
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
    assert len(server.asked) == asked
