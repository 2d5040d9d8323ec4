"""The examples of the server's pages in docs/, run as they stand there."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx import Client

from guard.conversation.example import Message
from serve.api.app import create_app
from serve.api.formats.table import WIRE_FORMATS
from serve.engine import Refusal, Score
from serve.engine.call import Call
from serve.policy.rule_set import load_rule_sets
from serve.tenants.tenant_file import load_tenants
from tests.serve.serving import serving
from tests.serve.toy_engine import ToyEngine

DOCS = Path(__file__).parents[3] / "docs"
PAGES = ("server", "streams", "python", "rule_sets_and_tenants", "formats", "operation")
TEXT = "\n".join((DOCS / f"{page}.md").read_text(encoding="utf-8") for page in PAGES)
ADDRESS = "localhost:8000"
# (commands, answer): every block of commands that is followed by its answer.
COMMANDS = re.findall(r"```sh\n([^`]*)```\n\n```json\n([^`]*)```", TEXT)
PROGRAMS = re.findall(r"```python\n([^`]*)```", TEXT)
CONFIGURATIONS = re.findall(r"```yaml\n([^`]*)```", TEXT)
ASKED = (Message("user", "My head hurts."),)


class DocumentedEngine(ToyEngine):
    """0.974 and 0.953 probable, whatever is said; but a question alone leaks nothing."""

    def __init__(self) -> None:
        super().__init__({"medical_advice": 3.62, "pii_leak": 3.0})

    def _outcome(self, name: str, call: Call) -> Score | Refusal:
        if name == "pii_leak" and self.conversations[-1] == ASKED:
            return Score(-3.0, cached_tokens=3, computed_tokens=2, latency_ms=1.0)
        return super()._outcome(name, call)


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    """A server of the rules that the examples name."""
    engine = DocumentedEngine()
    folder = tmp_path_factory.mktemp("documented")
    (folder / "sets.yaml").write_text(configuration("rule_sets:"))
    rule_sets = load_rule_sets(folder / "sets.yaml", engine.rules)
    (folder / "tenants.yaml").write_text(configuration("admins:"))
    assert load_tenants(folder / "tenants.yaml", rule_sets).all
    with serving(create_app(engine, rule_sets=rule_sets)) as client:  # type: ignore[arg-type]
        yield client


def configuration(beginning: str) -> str:
    """The one YAML of the pages that begins so."""
    (found,) = (text for text in CONFIGURATIONS if text.startswith(beginning))
    return found


def local(example: str, client: Client) -> str:
    assert ADDRESS in example
    here = example.replace(ADDRESS, client.base_url.netloc.decode())
    # The checkout's own client stands for the package (tests/serve/client/test_synchronous.py).
    return here.replace("centurion_client", "serve.client")


def shape(value: Any) -> Any:
    """The keys and the types of a JSON value."""
    if isinstance(value, dict):
        return {key: shape(inner) for key, inner in value.items()}
    if isinstance(value, list):
        return [shape(value[-1])] if value else []
    return type(value)


@pytest.mark.parametrize("name", WIRE_FORMATS)
def test_every_format_has_an_example_that_is_run(name: str) -> None:
    paths = re.findall(rf"{ADDRESS}(/[a-z0-9_/]*)", "".join([*dict(COMMANDS), *PROGRAMS]))
    if name == "openai_chat":  # by OpenAI's client, which knows the path
        assert "chat.completions.create" in "".join(PROGRAMS)
    else:
        assert any(WIRE_FORMATS[name].has_path(path) for path in paths)


def test_what_the_programs_import_exists() -> None:
    imports = re.findall(
        r"^(?:from (?:centurion_client|serve|guard)|import).*", "\n".join(PROGRAMS), re.MULTILINE
    )
    assert len(imports) > len(PROGRAMS)
    exec("\n".join(imports).replace("centurion_client", "serve.client"), {})


@pytest.mark.parametrize(("commands", "answer"), COMMANDS, ids=range(len(COMMANDS)))
def test_answers_have_the_documented_shape(client: Client, commands: str, answer: str) -> None:
    script = "set -e\n" + local(commands, client)
    got = subprocess.run(["bash", "-c", script], capture_output=True, check=True, timeout=60)
    assert shape(json.loads(got.stdout)) == shape(json.loads(answer))


# A word of each program that is run, and what it prints.
PRINTED = {
    "from openai": "yes 0.974\n",
    "is_allowed": "blocked: medical_advice\n",
    "rule_set=": "violation 0.953\n",
    "(asked, pieces)": "violation: medical_advice, pii_leak\n",
    "AsyncGuardClient": "violation: medical_advice\n",
    "aiohttp": "violation\n",
}


@pytest.mark.parametrize("word", PRINTED)
def test_a_program_prints_what_its_page_says(
    client: Client, capsys: pytest.CaptureFixture[str], word: str
) -> None:
    (example,) = (program for program in PROGRAMS if word in program)
    exec(local(example, client), {"__name__": "__main__"})
    assert capsys.readouterr().out == PRINTED[word]
