"""Which folder may import which. Read from the source: an import inside a function counts too."""

from __future__ import annotations

import ast
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
OURS = ("guard", "data", "train", "eval", "serve", "vllm_alora", "vllm_encoder")

# Folder -> prefixes of our modules it may import, besides its own. The most specific folder counts.
MAY_IMPORT = {
    "guard": (),
    "data": ("guard",),
    "train": ("guard", "data", "serve.registry"),  # where it registers versions
    "eval": ("guard", "data", "serve.engine"),
    "serve": ("guard", "vllm_alora"),  # the entries: up, doctor, merge, versions
    "serve/engine": ("guard", "vllm_alora", "vllm_encoder"),
    "serve/registry": ("guard",),
    "serve/client": (),
    "serve/policy": ("guard",),
    "serve/tenants": ("guard",),
    "serve/api": ("guard", "serve.engine", "serve.policy", "serve.tenants", "serve.registry"),
    "serve/console": (
        *("guard", "serve.engine", "serve.tenants", "serve.api", "serve.registry", "serve.scan"),
    ),
    "serve/plan": ("guard", "serve.engine"),
    "serve/scan": ("guard", "serve.engine", "serve.selection"),
    "serve/cluster": (
        *("guard", "serve.engine", "serve.policy", "serve.tenants", "serve.api"),
        *("serve.selection", "serve.observers", "serve.registry", "serve.console"),
    ),
    "serve/bench": ("guard", "serve", "vllm_alora"),
    "serve/vllm_alora": ("vllm_alora",),
    "serve/vllm_encoder": ("vllm_encoder",),
}
# Room of a stage -> the other rooms of that stage it may import. The files that stand beside the
# rooms may be imported too, as long as they do not lead back into the room.
ROOMS = {
    "data/generator": (),
    "data/debate": (),
    "train/calibration": (),
    "train/head": ("train/calibration",),
    "train/adapter": ("train/calibration", "train/head"),  # an adapter may answer by a head
    "train/prefix": ("train/adapter", "train/calibration", "train/head"),
    "train/reader": ("train/adapter", "train/calibration", "train/prefix"),
    "train/encoder": ("train/adapter", "train/calibration", "train/head"),
    "eval/judge": (),
    "eval/report": ("eval/judge",),
    "serve/engine/backends": (),
    "serve/client": (),
    "serve/policy": (),
    "serve/tenants": (),
    "serve/api/formats": ("serve/policy", "serve/api/input", "serve/api/observe"),
    "serve/api/input": ("serve/policy",),
    "serve/api/observe": ("serve/policy",),
    "serve/scan": ("serve/engine/backends",),
    "serve/console": (
        "serve/tenants",
        "serve/api/formats",
        "serve/api/input",
        "serve/api/observe",
        "serve/scan",
    ),
    "serve/bench/workload": (),
    "serve/cluster": (
        *("serve/policy", "serve/tenants", "serve/api/formats", "serve/api/input"),
        *("serve/api/observe", "serve/console"),
    ),
}
# What nobody may import but itself: benchmarks measure the product, which knows nothing of them.
PRIVATE = ("serve.bench",)
# Folder -> the only other packages it may import, besides the standard library.
ONLY_THESE = {
    "guard": (
        *("pydantic", "yaml", "numpy", "tokenizers", "huggingface_hub", "httpx", "filelock"),
        *("psutil", "tqdm"),
        *("scipy", "sklearn"),  # calibrate.py alone
        "gguf",  # gguf_file.py alone
        "py3langid",  # language.py alone
        "safetensors",  # weights/low_rank.py alone
    ),
    # vLLM, and what vLLM itself cannot run without.
    "serve/vllm_alora": ("vllm", "torch", "numpy", "safetensors", "transformers"),
    "serve/vllm_encoder": ("vllm", "torch", "transformers"),
    "serve/client": ("httpx",),
}


def violations(root: Path) -> list[str]:
    """Imports under `root` that the tables above do not allow: `file:line: folder imports X`."""
    found = []
    for folder in MAY_IMPORT:
        inner = [other for other in MAY_IMPORT if other.startswith(f"{folder}/")]
        for path in sorted((root / folder).rglob("*.py")):
            if any(path.is_relative_to(root / other) for other in inner):
                continue
            for line, module in imports(path, root):
                if not is_allowed(folder, module):
                    found.append(f"{path.relative_to(root)}:{line}: {folder} imports {module}")
    return found


def room_violations(root: Path) -> list[str]:
    """Imports of another room that ROOMS does not allow, and those that lead back into a room."""
    found = []
    for room, allowed in ROOMS.items():
        stage = room.partition("/")[0]
        others = [other for other in ROOMS if other.startswith(f"{stage}/")]
        barred = [other for other in others if other not in (room, *allowed)]
        beside: list[Path] = []
        for path in sorted((root / room).rglob("*.py")):
            for line, module in imports(path, root):
                beside.append(root / f"{module.replace('.', '/')}.py")
                if any(_is_inside(module, other.replace("/", ".")) for other in barred):
                    found.append(f"{path.relative_to(root)}:{line}: {room} imports {module}")
        found += _ways_back(root, room, beside)
    return found


def _ways_back(root: Path, room: str, imported: list[Path]) -> list[str]:
    """The imports of `room` in the files outside of it that it imports, and in those they do."""
    found = []
    waiting, seen = list(imported), set[Path]()
    while waiting:
        path = waiting.pop()
        if path in seen or not path.is_file() or path.is_relative_to(root / room):
            continue
        seen.add(path)
        for line, module in imports(path, root):
            waiting.append(root / f"{module.replace('.', '/')}.py")
            if _is_inside(module, room.replace("/", ".")):
                found.append(f"{path.relative_to(root)}:{line}: leads back into {room}")
    return found


def is_allowed(folder: str, module: str) -> bool:
    package = module.partition(".")[0]
    if package in OURS:
        own = folder.replace("/", ".")
        if any(_is_inside(module, private) and not _is_inside(own, private) for private in PRIVATE):
            return False
        return any(_is_inside(module, prefix) for prefix in (own, *MAY_IMPORT[folder]))
    return package in sys.stdlib_module_names or package in ONLY_THESE.get(folder, (package,))


def _is_inside(module: str, package: str) -> bool:
    return f"{module}.".startswith(f"{package}.")


@cache
def imports(path: Path, root: Path) -> list[tuple[int, str]]:
    """Line and full name of every module that `path` imports."""
    package = list(path.relative_to(root).parts[:-1])
    found = []
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found += [(node.lineno, alias.name) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            above = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*above, *([node.module] if node.module else [])])
            # `from serve import engine` imports serve.engine; `from serve.engine import X` may name
            # a class, so no deeper.
            deeper = module in OURS or not module
            for alias in node.names:
                name = f"{module}.{alias.name}".strip(".") if deeper else module
                found.append((node.lineno, name))
    return found


def test_every_import_goes_in_an_allowed_direction() -> None:
    assert violations(ROOT) == []


def test_every_room_imports_only_the_rooms_it_may_and_nothing_that_imports_it() -> None:
    assert room_violations(ROOT) == []
    assert all((ROOT / room).is_dir() for room in ROOMS)
    for benchmark in (ROOT / "serve/bench").glob("*/__init__.py"):
        assert benchmark.parent.relative_to(ROOT).as_posix() in ROOMS


def test_a_planted_import_of_another_room_is_found_and_a_way_back(tmp_path: Path) -> None:
    planted = {
        "train/adapter/trl.py": "from train.prefix import trainer\nfrom train.job import Job",
        "train/prefix/trainer.py": "from train.adapter import trl",
        "eval/report/tables.py": "from eval.quality import METRICS",
        "eval/quality.py": "def f():\n    from eval.report.markdown import table",
    }
    for file, source in planted.items():
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).write_text(source)
    assert room_violations(tmp_path) == [
        "train/adapter/trl.py:1: train/adapter imports train.prefix",
        "eval/quality.py:2: leads back into eval/report",
    ]


def test_the_tables_name_every_folder_with_code() -> None:
    with_code = {
        path.parent.name for path in ROOT.glob("*/__init__.py") if path.parent.name != "tests"
    }
    assert with_code == {folder for folder in MAY_IMPORT if "/" not in folder}
    assert all((ROOT / folder).is_dir() for folder in MAY_IMPORT)


PLANTED = [
    ("guard/rule.py", "import torch", "torch"),
    ("guard/rule.py", "def f():\n    from transformers import AutoModel", "transformers"),
    ("guard/rule.py", "from ..data import build", "data.build"),
    ("data/build.py", "try:\n    import eval.run as e\nexcept ImportError: ...", "eval.run"),
    ("train/run.py", "from eval.metrics import auroc", "eval.metrics"),
    ("train/head/fit.py", "from serve import engine", "serve.engine"),
    ("eval/run.py", "from serve import engine, merge", "serve.merge"),
    ("eval/run.py", "import serve", "serve"),
    ("serve/up.py", "from serve.bench import harness", "serve.bench"),
    ("serve/engine/call.py", "from serve.up import main", "serve.up"),
    ("serve/api/formats/check.py", "import vllm_alora", "vllm_alora"),
    ("serve/policy/logic.py", "from serve.engine import Check", "serve.engine"),
    ("serve/vllm_alora/seam.py", "import peft", "peft"),
    ("serve/vllm_alora/seam.py", "from ..engine import Engine", "serve.engine"),
]
ALLOWED = [
    ("guard/rule.py", "import json\nimport yaml\nfrom . import errors\nimport guard.method"),
    ("data/build.py", "from guard import rule\nimport datasets\nfrom data.grammar import write"),
    ("train/head/fit.py", "from data.generator import generate\nfrom ..job import Job"),
    ("eval/run.py", "from serve.engine import Engine\nfrom serve import engine"),
    ("serve/up.py", "from serve.api.app import create_app\nimport vllm_alora\nimport fastapi"),
    ("serve/bench/harness.py", "from serve import merge\nfrom serve.bench.report import Report"),
    ("serve/vllm_alora/seam.py", "import vllm\nfrom vllm_alora.admit import x\nfrom . import y"),
]


@pytest.mark.parametrize(
    ("file", "source", "imported"), [*PLANTED, *((*allowed, None) for allowed in ALLOWED)]
)
def test_a_planted_import_is_found_unless_its_direction_is_allowed(
    tmp_path: Path, file: str, source: str, imported: str | None
) -> None:
    (tmp_path / file).parent.mkdir(parents=True)
    (tmp_path / file).write_text(source)
    found = violations(tmp_path)
    if imported is None:
        assert found == []
    else:
        (line,) = found
        assert line.startswith(f"{file}:") and line.endswith(f" imports {imported}")
