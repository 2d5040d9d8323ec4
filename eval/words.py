"""The baseline of words alone, which `make data` measures: AUROC without understanding. Knows nothing of how it is measured."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from guard.errors import GuardError
from guard.example import SPLITS

UNNAMED = "None"  # what the data stage calls the stratum of examples without one


def words_alone(data: Path) -> dict[str, float]:
    """The best AUROC of words alone by stratum of the test split, from `manifest.json` in a rule's data folder.

    Empty where there is no manifest, where it describes other examples than those beside it, or where the words were too few to
    measure. Raises GuardError where it cannot be read.
    """
    path = data / "manifest.json"
    if not path.is_file():
        return {}
    try:
        manifest = json.loads(path.read_bytes())
        if any(
            manifest["sha256"][split]
            != hashlib.sha256((data / f"{split}.jsonl").read_bytes()).hexdigest()
            for split in SPLITS
        ):
            return {}
        return {
            str(stratum): float(floor["best"])
            for stratum, floor in manifest["auroc_from_surface"]["words"].items()
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise GuardError(
            f"not a manifest of data: {error!r}",
            where=path,
            remedy=f"Delete it, or run `make data RULE={data.name} FORCE=1`",
        ) from error
