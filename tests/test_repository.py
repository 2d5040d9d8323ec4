"""The repository as a whole.

Nothing of one machine is in it, every file of a kind is valid, every command explains itself, and
tests mirror the folders.
"""

from __future__ import annotations

import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

from guard.recipe import MODELS, load_recipe
from guard.rule import RULES, load_rule
from tests.long_files import LONG_FILES_S

ROOT = Path(__file__).parent.parent
STAGES = ("guard", "data", "train", "eval", "serve")
HEAVY = ("torch", "vllm", "transformers", "peft", "trl", "datasets")
# Source file -> why there is no test file of its name. What tests it instead stands in the reason.
WITHOUT_A_TEST_OF_THEIR_OWN: dict[str, str] = {
    "data/debate/prompts.py": "test_debate.py beside it has a server that answers by their words",
    "data/llm_reply.py": "tests/data/test_new_rule.py has answers in form and out of it",
    "data/manifest.py": "tests/data/test_build.py builds and shows it",
    "eval/answers.py": "tests/eval/test_quality.py holds answers against labels",
    "eval/study/report.py": "test_run.py beside it writes and reads reports",
    "serve/cluster/kubernetes.py": "tests/deploy/test_kubernetes.py runs it on Ray",
    "serve/bench/http.py": "test_soak.py beside it measures the same server",
    "serve/engine/refusals.py": "values; test_engine_thread.py beside it is refused by them",
    "serve/api/observe/record.py": "values; tests/serve/api/observe/test_audit.py writes them",
    "serve/api/observe/requests.py": "tests/serve/api/test_app.py asks with ids",
    "serve/api/engine_service.py": "tests/serve/api/test_service.py asks it over HTTP",
    "serve/cluster/served.py": "tests/serve/cluster/test_start.py starts it on an engine",
}
TESTS_OF_SEVERAL_FILES: dict[str, str] = {
    "tests/deploy/test_agentgateway.py": "deploy/agentgateway against the server",
    "tests/deploy/test_docker.py": "deploy/docker, and what it names",
    "tests/deploy/test_kong.py": "deploy/kong's Lua against the server",
    "tests/deploy/test_systemd.py": "deploy/systemd, and what it names",
    "tests/deploy/test_kubernetes.py": "deploy/kubernetes, and the application that it names",
    "tests/deploy/test_litellm.py": "deploy/litellm in LiteLLM itself",
    "tests/deploy/test_nemo.py": "deploy/nemo in NeMo Guardrails itself",
    "tests/eval/test_engine.py": "the whole evaluation on the real engine",
    "tests/eval/test_gliner2.py": "a rule on GLiNER2 through training, evaluation and engine",
    "tests/serve/client/test_package.py": "serve/client as a wheel",
    "tests/serve/engine/test_cut_base.py": "the engine on a base of a recipe's first layers",
    "tests/serve/cluster/test_autoscaling.py": "ray_pool.py, on a Ray of other replicas",
    "tests/serve/cluster/shards/test_shards_on_ray.py": "shards/ and ray_pool.py, on one Ray",
    "tests/serve/fuzz/test_run.py": "the whole server, by its own OpenAPI",
    "tests/serve/api/test_documented.py": "the examples of the server's pages, against all formats",
    "tests/serve/gpu_path/test_ring.py": "starts ring_kernels.py in a process of its own",
    "tests/serve/gpu_path/test_sizes.py": "vLLM's configuration of a recipe on a faked GPU",
    "tests/serve/vllm_alora/test_parity.py": "all seams together, against PEFT",
    "tests/test_class_names.py": "the whole tree",
    "tests/test_documents.py": "the pages",
    "tests/test_house.py": "the whole tree",
    "tests/test_import_directions.py": "the whole tree",
    "tests/test_makefile.py": "the Makefile and setup/",
    "tests/test_repository.py": "the whole tree",
    "tests/test_tiny_base.py": "recipes/models/tiny",
}
# Written so that this file does not match itself.
REGISTRY_HOSTS = [
    rf"\b{host}\.org\b" for host in ("pypi", "pythonhosted", r"download\.pytorch", "anaconda")
]
MACHINE_PATHS = [
    rf"(?<![\w.~}}]){folder}/"
    for folder in ("/" + "root", "/" + "work", "/home/" + r"\w+", "/opt/" + "(?:wheels|pypi)")
]


@cache
def repository_files() -> list[Path]:
    """What is tracked or would be: everything that .gitignore does not name."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return sorted(
        path for name in listed.stdout.split("\0") if name and (path := ROOT / name).is_file()
    )


def entries() -> list[str]:
    """Every module that is run as `python -m`."""
    code = [
        path
        for folder in ("data", "train", "eval", "serve")
        for path in (ROOT / folder).rglob("*.py")
    ]
    mains = [
        path for path in code if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8")
    ]
    modules = [".".join(path.relative_to(ROOT).with_suffix("").parts) for path in mains]
    return sorted(module.removesuffix(".__main__") for module in modules)


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    pattern = re.compile("|".join([*REGISTRY_HOSTS, *MACHINE_PATHS]).encode())
    found = []
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" not in content[:8192]:  # text
            found += [
                f"{path.relative_to(ROOT)}: {match[0].decode()}"
                for match in pattern.finditer(content)
            ]
    assert found == []


@pytest.mark.parametrize("path", sorted(RULES.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_rule_loads(path: Path) -> None:
    assert load_rule(path.stem).violates


@pytest.mark.parametrize("path", sorted(MODELS.glob("*.yaml")), ids=lambda path: path.stem)
def test_every_recipe_loads(path: Path) -> None:
    assert load_recipe(path.stem).methods


def test_there_are_rules_and_recipes_at_all() -> None:
    assert {"medical_advice", "pii_leak", "jailbreak_attempt", "refund_promise"} <= {
        path.stem for path in RULES.glob("*.yaml")
    }
    assert {"tiny", "qwen3-0.6b", "qwen3-4b"} <= {path.stem for path in MODELS.glob("*.yaml")}


@pytest.mark.slow
@pytest.mark.parametrize("module", entries())
def test_every_command_explains_itself_before_it_imports_anything_heavy(module: str) -> None:
    asks_for_help = (
        "import runpy, sys\n"
        f"sys.argv = ['{module}', '--help']\n"
        "try:\n"
        f"    runpy.run_module('{module}', run_name='__main__')\n"
        "except SystemExit as ended:\n"
        f"    heavy = [name for name in {HEAVY} if name in sys.modules]\n"
        "    sys.exit(ended.code or (f'imported {heavy}' if heavy else 0))\n"
        "sys.exit('did not exit')\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", asks_for_help], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    assert f"python -m {module}" in done.stdout or module in done.stdout
    assert "--" in done.stdout


def test_the_entries_are_found() -> None:
    assert {
        "data.build",
        "train.run",
        "eval.run",
        "serve.bench",
        "serve.up",
        "serve.doctor",
        "serve.merge",
    } <= set(entries())


def files_without_a_source(root: Path) -> set[str]:
    """The test files under `root`/tests that are not called after a source file."""
    orphans = set()
    for path in (root / "tests").rglob("test_*.py"):
        test = path.relative_to(root / "tests")
        if not (root / test.parent / test.name.removeprefix("test_")).is_file():
            orphans.add(f"tests/{test.as_posix()}")
    return orphans


def test_every_test_file_is_called_after_what_it_tests_or_has_a_reason() -> None:
    assert files_without_a_source(ROOT) == set(TESTS_OF_SEVERAL_FILES)


def test_a_planted_test_file_without_a_source_is_found(tmp_path: Path) -> None:
    for file in ("guard/a.py", "tests/guard/test_a.py", "tests/guard/test_gone.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert files_without_a_source(tmp_path) == {"tests/guard/test_gone.py"}


def test_the_files_that_are_begun_first_exist() -> None:
    assert [name for name in LONG_FILES_S if not (ROOT / name).is_file()] == []


def sources_without_a_test(root: Path) -> set[str]:
    """The source files under `root` whose test file is missing; packages' __init__ need none."""
    missing = set()
    for stage in STAGES:
        for path in (root / stage).rglob("*.py"):
            source = path.relative_to(root)
            test = root / "tests" / source.parent / f"test_{source.name}"
            if source.name != "__init__.py" and not test.is_file():
                missing.add(str(source))
    return missing


def test_every_source_file_has_a_test_file_or_a_reason() -> None:
    missing = sources_without_a_test(ROOT)
    assert missing - set(WITHOUT_A_TEST_OF_THEIR_OWN) == set(), "write a test, or say why not"
    stale = set(WITHOUT_A_TEST_OF_THEIR_OWN) - missing
    assert stale == set(), "gone, or tested by now: strike them"


def test_a_planted_source_file_without_a_test_is_found(tmp_path: Path) -> None:
    for file in ("guard/__init__.py", "guard/a.py", "serve/api/b.py", "tests/guard/test_a.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert sources_without_a_test(tmp_path) == {"serve/api/b.py"}
