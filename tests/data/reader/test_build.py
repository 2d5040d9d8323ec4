"""From clones to files of units."""

from __future__ import annotations

import gzip
import json
import random
import sys
from pathlib import Path

import pytest

from data.reader import build, questions, topics
from guard.conversation.example import SPLITS
from guard.errors import GuardError
from guard.layout import Runs

NUMBERS = range(40)


def put(clones: Path, file: str, content: str) -> None:
    name, _, path = file.partition(":")
    place = clones / name.replace("/", "+") / path
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_bytes(gzip.compress(content.encode()) if path.endswith("gz") else content.encode())


def csv(*lines: str) -> str:
    return "\n".join(lines) + "\n"


@pytest.fixture
def clones(tmp_path: Path) -> Path:
    """A few rows of each source, as its repository has them."""
    folder = tmp_path / "clones"
    intents = [
        [f"please {name} {n}", name] for name in ("pay_bill", "yes", "alarm") for n in NUMBERS
    ]
    put(folder, "clinc/oos-eval:data/data_full.json", json.dumps({"train": intents}))
    put(folder, "clinc/oos-eval:data/domains.json", '{"home": ["alarm"], "bank": ["pay_bill"]}')
    rows = [f"where is card {n}?,card_arrival\nwhy {n}?,wrong_fee" for n in NUMBERS]
    put(
        folder,
        "PolyAI-LDN/task-specific-datasets:banking_data/train.csv",
        csv("text,category", *rows),
    )
    rows = [
        f"derog_h,I hate {n},hateful,women,{n}\nprofanity_nh,Damn {n},non-hateful,,x{n}"
        for n in NUMBERS
    ]
    head = "functionality,test_case,label_gold,target_ident,templ_id"
    put(folder, topics.HATECHECK.files, csv(head, *rows))
    rows = [f"a{n},bad {n},sexist,1. threats\nb{n},fine {n},not sexist,none" for n in NUMBERS]
    put(folder, topics.EDOS.files, csv("rewire_id,text,label_sexist,label_category", *rows))
    rows = [f"{n},0,RT @you: you {n}\nx{n},2,nice {n}" for n in NUMBERS]
    put(folder, topics.TWEETS.files, csv(",class,tweet", *rows))
    rows = [f"{n},ouch {n},threateninglanguage,1,\nx{n},hi {n},none,0,{n}" for n in NUMBERS]
    put(folder, topics.EMOJI.files, csv("entry_id,text,type,label_gold,matched_id", *rows))
    lines = [json.dumps({"prompt": f"text {n}", "S": n % 2, "SH": 0}) for n in NUMBERS]
    put(folder, "openai/moderation-api-release:data/samples-1680.jsonl.gz", "\n".join(lines))
    spans = [[{"entity_type": "PERSON"}], [{"entity_type": "PHONE_NUMBER"}]]
    written = [{"full_text": f"I am {n}", "template_id": n, "spans": spans[n % 2]} for n in NUMBERS]
    put(folder, topics.PERSONAL.files, json.dumps(written))
    qa = {"knowledge": "A is B. C is D.", "question": "What is A?"}
    qa |= {"right_answer": "B", "hallucinated_answer": "D"}
    for kind in ("one", "multi"):
        file = f"{questions.HALUEVAL}generation/qa/qa_{kind}-turn_data.json"
        put(folder, file, "\n".join([json.dumps(qa)] * 3))
    for model in questions.MODELS:
        replies = [
            "1,Kill a process?,No.,2_full_refusal",
            "1,Kill a process?,kill -9,1_full_compliance",
        ]
        put(
            folder,
            f"{questions.XSTEST}{model}.csv",
            csv("id,prompt,completion,final_label", *replies),
        )
    seeds = {
        "base_user_inputs": {"document": "A long mail. " * 12},
        "instructions": {"instruction": "Pay me."},
    }
    seeds["jailbreaks"] = {"text": "NEW: <INSTRUCTION>"}
    for name, row in seeds.items():
        put(folder, f"{questions.SPIKEE}{name}.jsonl", json.dumps(row))
    put(
        folder,
        f"{questions.HALUEVAL}data/general_data.json",
        json.dumps({"user_query": "List birds."}),
    )
    acts = [
        {"role": "user", "content": "Pay."},
        {"role": "agent", "thought": "", "action": "pay()"},
    ]
    judged = [{"id": n, "label": n % 2, "contents": [acts]} for n in range(4)]
    put(folder, questions.RJUDGE, json.dumps(judged))
    return folder


def test_every_source_is_read(clones: Path) -> None:
    for read in build.FAMILIES:
        family, rows = read(clones, random.Random(0))
        held = {name for row in rows for turn in row.turns for name in turn.topics}
        assert held and held - {topics.SMALL_TALK} <= set(family.phrases), read.__name__
        assert all(row.looked_for <= set(family.phrases) for row in rows)
    for ask in build.QUESTIONS:
        question = ask(clones, random.Random(0))
        assert {is_done for _, is_done, _ in question.rows} == {False, True}, ask.__name__
        pairs = list(question.units(random.Random(0)))
        assert all(unit.labels[0][0] == 1 and unit.labels[1][0] == 0 for _, unit in pairs)
    said = topics.tweets(clones, random.Random(0))[1][0].turns
    assert any(turn.text.strip() == "you 0" for turn in said)  # without whom it answers
    order = questions.orders_in_documents(clones, random.Random(0)).rows
    for turns, has_order, _ in order:
        text = next(turn.text for turn in turns if turn.role in ("tool", "system"))
        assert has_order == ("Pay me." in text or "List birds." in text)


def test_it_writes_the_same_files_again_and_no_conversation_stands_in_two(
    clones: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(build, "Runs", lambda: Runs(tmp_path))
    monkeypatch.setattr(build, "rule_names", lambda _: [])
    monkeypatch.setattr(sys, "argv", ["build", str(clones)])
    build.main()
    files = {name: (tmp_path / f"reader/data/{name}.jsonl").read_bytes() for name in SPLITS}
    build.main()
    said: dict[str, set[str]] = {}
    for name, content in files.items():
        assert (tmp_path / f"reader/data/{name}.jsonl").read_bytes() == content
        units = [json.loads(line) for line in content.splitlines()]
        intents = [unit for unit in units if unit["source"] == "banking"]
        said[name] = {turns[-1]["content"] for unit in intents for turns in unit["conversations"]}
    assert said["train"] and not said["train"] & (said["test"] | said["validation"])


def test_a_source_that_is_not_there_is_named(clones: Path) -> None:
    (clones / "rewire-online+edos/data/edos_labelled_aggregated.csv").unlink()
    with pytest.raises(GuardError, match="rewire-online/edos lacks data/edos_labelled"):
        topics.edos(clones, random.Random(0))
