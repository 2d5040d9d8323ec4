"""The user's own files in a folder of their own, beside the checkout's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from guard.home import ROOT, own_or_shipped, yaml_files

ASKS = """
import json
from guard.errors import GuardError
from guard.layout import Runs
from guard.recipe import load_recipe
from guard.rule import load_rule, rule_names

try:
    load_rule("ours_to")
except GuardError as error:
    unknown = str(error)
print(json.dumps({
    "runs": str(Runs().root),
    "rules": rule_names("all"),
    "titles": [load_rule(name).title for name in ("ours_too", "toxicity", "pii_leak")],
    "bases": [load_recipe(name).base_path for name in ("tiny", "by_path", "by_name")],
    "unknown": unknown,
}))
"""
RULE = "id: {name}\ntitle: {title}\npolicy: It is forbidden to do this.\njudged: user\n"
RULE += "violates: [this]\nallows: [that]\n"


def run(home: object, *command: str) -> subprocess.CompletedProcess[str]:
    """A command of Python in the checkout, with this home."""
    environment = {**os.environ, "CENTURION_HOME": str(home)}
    command = (sys.executable, *command)
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def write_home(folder: Path) -> None:
    """A home with a rule of its own, one that the checkout has too, and two recipes."""
    rules, models = folder / "recipes" / "rules", folder / "recipes" / "models"
    for made in (rules, models, folder / "bases" / "ours"):
        made.mkdir(parents=True)
    (rules / "ours_too.yaml").write_text(RULE.format(name="ours_too", title="Never this"))
    (rules / "toxicity.yaml").write_text(RULE.format(name="toxicity", title="Our own wording"))
    tiny = (ROOT / "recipes" / "models" / "tiny.yaml").read_text(encoding="utf-8")
    for name, base in {"by_path": f"{folder}/bases/ours", "by_name": "bases/ours"}.items():
        recipe = tiny.replace("name: tiny", f"name: {name}").replace("recipes/models/tiny", base)
        (models / f"{name}.yaml").write_text(recipe, encoding="utf-8")


def test_own_files_stand_beside_the_shipped_ones_and_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = tmp_path / "guard"
    write_home(home)
    monkeypatch.setenv("HOME", str(tmp_path))
    done = run("~/guard", "-c", ASKS)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    shipped = [path.stem for path in (ROOT / "recipes" / "rules").glob("*.yaml")]
    assert found["rules"] == sorted([*shipped, "ours_too"])
    own, replaced, as_shipped = found["titles"]
    assert (own, replaced) == ("Never this", "Our own wording") and as_shipped != replaced
    ours = str(home / "bases" / "ours")
    assert found["bases"] == [str(ROOT / "recipes" / "models" / "tiny"), ours, ours]
    assert found["runs"] == str(home / "runs")
    assert "Did you mean 'ours_too'?" in found["unknown"] and str(home) in found["unknown"]


def test_a_rule_is_written_into_the_home_alone_and_a_shipped_name_is_taken(tmp_path: Path) -> None:
    command = ("-m", "data.new_rule", "--policy", "never promise a delivery date", "--name")
    done = run(tmp_path / "new", *command, "delivery_date")
    assert done.returncode == 0, done.stderr
    written = tmp_path / "new" / "recipes" / "rules" / "delivery_date.yaml"
    assert written.is_file() and str(written) in done.stdout
    assert not (ROOT / "recipes" / "rules" / written.name).exists()
    done = run(tmp_path / "new", *command, "toxicity")
    assert done.returncode == 2 and "already exists" in done.stderr
    assert list(tmp_path.rglob("*.yaml")) == [written]


def test_without_a_home_it_is_the_checkout_and_other_folders_have_nothing_shipped(
    tmp_path: Path,
) -> None:
    script = "from guard.home import HOME, ROOT; from guard.layout import Runs\n"
    script += "assert HOME == ROOT and Runs().root == ROOT / 'runs'"
    assert run("", "-c", script).returncode == 0
    (tmp_path / "one.yaml").touch()
    assert yaml_files(tmp_path) == [tmp_path / "one.yaml"]
    assert own_or_shipped(tmp_path / "none.yaml") == tmp_path / "none.yaml"
