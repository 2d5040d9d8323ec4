"""A rule tried in a terminal: `python -m serve.attempt`, entry of `make try`. Each line is a
conversation, until an empty one. Nothing is counted or kept.
"""

from __future__ import annotations

import argparse
import re
import sys

from guard.conversation.chat import turns_of
from guard.conversation.example import ROLES
from guard.errors import exits_cleanly
from serve.engine.engines import GuardEngines
from serve.selection import Selection, open_engines, served_parts

SPEAKER = re.compile(rf"(?:^|\s/\s)\s*({'|'.join(ROLES)}):", re.IGNORECASE)
PROMPT = "A user's message, or `User: … / Assistant: …`; an empty line ends:"


def answer(engine: GuardEngines, rule: str, line: str) -> str:
    """The rule's verdict on the conversation of a line, or why there is none."""
    first, *parts = SPEAKER.split(line.strip())
    turns = [{"role": "user", "content": first}] if first else []
    for speaker, text in zip(parts[::2], parts[1::2], strict=True):
        turns.append({"role": speaker.lower(), "content": text.strip()})
    check = engine.check(turns_of(turns, where="the line"), [rule])
    if rule in check.refused:
        return f"unjudged: {check.refused[rule].why}"
    (verdict,) = check.verdicts
    sure = "" if verdict.confident else ", not confident"
    return f"{verdict.word}: p {verdict.p_violation:.3f}, by {verdict.by}{sure}"


@exits_cleanly
def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m serve.attempt", description="Try a rule.")
    parser.add_argument("--rule", required=True, help="a rule, trained or not")
    model = "a base of recipes/models (default: %(default)s)"
    parser.add_argument("--model", default="smollm2", help=model)
    parser.add_argument("--method", help="whose weights answer")
    arguments = parser.parse_args()
    selection = Selection(arguments.model, arguments.rule, arguments.method)
    with open_engines(served_parts(selection)) as engine:
        print(PROMPT, flush=True)
        while (line := sys.stdin.readline()).strip():
            print(answer(engine, arguments.rule, line), flush=True)


if __name__ == "__main__":
    main()
