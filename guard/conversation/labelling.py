"""What the labels of a data set follow from besides its rows, so that a changed rule is noticed."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from guard.errors import GuardError
from guard.files.strict_json import load_json
from guard.rule import Rule

MANIFEST_KEY = "labelling"


def labelling(rule: Rule) -> dict[str, Any]:
    return {
        "judged": rule.judged,
        "turns": rule.turns,
        "commands": rule.commands,
        "depends_on_context": rule.depends_on_context,
    }


def check_labelling(data: Path, rule: Rule) -> None:
    """Raise GuardError if the rows in `data` were made for other fields of the rule. A folder
    without a manifest, as a study's, is taken as it is.
    """
    manifest = data / "manifest.json"
    if not manifest.is_file():
        return
    remedy = f"Run `make data RULE={rule.id} FORCE=1`"
    kept = load_json(manifest, remedy=remedy)
    if not isinstance(kept, dict):
        raise GuardError("the manifest is not an object", where=manifest, remedy=remedy)
    then = kept.get(MANIFEST_KEY, {})
    changed = [name for name, value in labelling(rule).items() if then.get(name, value) != value]
    if changed:
        was = ", ".join(f"{name}: {json.dumps(then[name])}" for name in changed)
        now = ", ".join(f"{name}: {json.dumps(labelling(rule)[name])}" for name in changed)
        raise GuardError(
            f"the rows of {rule.id} were made for {was}; the rule says {now}",
            where=data,
            remedy=f"Run `make data RULE={rule.id}` again, rows of your own with labels that fit",
        )
