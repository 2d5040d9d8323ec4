"""What every benchmark's report has: where its numbers come from, and how it is kept. Knows nothing of what was measured."""

from __future__ import annotations

import json
from pathlib import Path

from guard.files import whole
from guard.yaml_file import Strict


class BenchReport(Strict):
    """A JSON file of measurements, all from one run."""

    commit: str
    hardware: str
    versions: dict[str, str]
    model: str

    def save(self, path: Path) -> None:
        """Write the file, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        with whole(path) as part:
            part.write_text(json.dumps(self.model_dump(mode="json"), indent=1) + "\n", encoding="utf-8")
