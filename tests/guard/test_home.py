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

def base(name):
    return load_recipe(name).base_path

try:
    load_rule("ours_to")
except GuardError as error:
    unknown = str(error)
print(json.dumps({
    "runs": str(Runs().root),
    "rules": rule_names("all"),
    "titles": [load_rule(name).title for name in ("ours_too", "toxicity", "pii_leak")],
    "bases": [base("tiny"), base("by_path"), base("by_name")],
    "unknown": unknown,
}))
"""
RULE = "id: {name}\ntitle: {title}\npolicy: It is forbidden to do this.\njudged: user\n"
RULE += "violates: [this]\nallows: [that]\n"


def asked(home: str | None) -> dict[str, object]:
    """What a process with this home finds."""
    environment = {key: value for key, value in os.environ.items() if key != "CENTURION_HOME"}
    if home is not None:
        environment["CENTURION_HOME"] = home
    done = subprocess.run(
        [sys.executable, "-c", ASKS], cwd=ROOT, env=environment, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    answers: dict[str, object] = json.loads(done.stdout)
    return answers


def write_home(folder: Path) -> None:
    """A home with a rule of its own, one that the checkout has too, and two recipes."""
    rules, models = folder / "recipes" / "rules", folder / "recipes" / "models"
    rules.mkdir(parents=True)
    (rules / "ours_too.yaml").write_text(RULE.format(name="ours_too", title="Never this"))
    (rules / "toxicity.yaml").write_text(RULE.format(name="toxicity", title="Our own wording"))
    tiny = (ROOT / "recipes" / "models" / "tiny.yaml").read_text(encoding="utf-8")
    (folder / "bases" / "ours").mkdir(parents=True)
    bases = {"by_path": f"{folder}/bases/ours", "by_name": "bases/ours"}
    models.mkdir()
    for name, base in bases.items():
        recipe = tiny.replace("name: tiny", f"name: {name}").replace("recipes/models/tiny", base)
        (models / f"{name}.yaml").write_text(recipe, encoding="utf-8")


def test_own_files_stand_beside_the_shipped_ones_and_win(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_home(tmp_path / "guard")
    monkeypatch.setenv("HOME", str(tmp_path))
    found = asked("~/guard")
    shipped = [path.stem for path in (ROOT / "recipes" / "rules").glob("*.yaml")]
    assert found["rules"] == sorted([*shipped, "ours_too"])
    titles = found["titles"]
    assert isinstance(titles, list)
    assert titles[:2] == ["Never this", "Our own wording"] and titles[2] != "Our own wording"
    ours = str(tmp_path / "guard" / "bases" / "ours")
    assert found["bases"] == [str(ROOT / "recipes" / "models" / "tiny"), ours, ours]
    assert found["runs"] == str(tmp_path / "guard" / "runs")
    assert "Did you mean 'ours_too'?" in str(found["unknown"])
    assert str(tmp_path / "guard") in str(found["unknown"])


def make_rule(name: str, home: Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "data.new_rule", "--name", name]
    command += ["--policy", "never promise a delivery date"]
    environment = {**os.environ, "CENTURION_HOME": str(home)}
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)


def test_a_rule_is_written_into_the_home_alone_and_a_shipped_name_is_taken(tmp_path: Path) -> None:
    done = make_rule("delivery_date", tmp_path / "new")
    assert done.returncode == 0, done.stderr
    written = tmp_path / "new" / "recipes" / "rules" / "delivery_date.yaml"
    assert written.is_file() and str(written) in done.stdout
    assert not (ROOT / "recipes" / "rules" / written.name).exists()
    done = make_rule("toxicity", tmp_path / "new")
    assert done.returncode == 2 and "already exists" in done.stderr
    assert list(tmp_path.rglob("*.yaml")) == [written]


def test_without_a_home_it_is_the_checkout_and_other_folders_have_nothing_shipped(
    tmp_path: Path,
) -> None:
    environment = {key: value for key, value in os.environ.items() if key != "CENTURION_HOME"}
    script = "from guard.home import HOME, ROOT; from guard.layout import Runs\n"
    script += "assert HOME == ROOT and Runs().root == ROOT / 'runs'"
    for home in (None, ""):
        named = {} if home is None else {"CENTURION_HOME": home}
        subprocess.run(
            [sys.executable, "-c", script], cwd=ROOT, env=environment | named, check=True
        )
    (tmp_path / "one.yaml").touch()
    assert yaml_files(tmp_path) == [tmp_path / "one.yaml"]
    assert own_or_shipped(tmp_path / "none.yaml") == tmp_path / "none.yaml"
