"""The repository as a whole.

Nothing of one machine is in it, every file of a kind is valid, every command explains itself, and
tests mirror the folders.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from guard.rule import load_rule, rule_names
from tests.long_files import LONG_FILES_S

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "vllm", "transformers", "peft", "trl", "datasets")
# Source file -> why there is no test file of its name. What tests it instead stands in the reason.
WITHOUT_A_TEST_OF_THEIR_OWN: dict[str, str] = {
    "train/batch.py": "tests/train/adapter/test_trained.py holds padded rows to rows alone",
    "train/study.py": "tests/train/test_run.py",
    "train/adapter/steps.py": "test_trl.py beside it",
    "train/encoder/settings.py": "test_bases.py beside it",
    "train/encoder/trained.py": "test_model.py beside it",
    "train/export.py": "tests/train/test_job.py",
    "train/methods.py": "tests/train/test_job.py",
    "train/adapter/load.py": "test_trained.py beside it trains on 4 bits",
    "train/calibration/coverage.py": "test_validation.py beside it",
    "train/prefix/member.py": "test_fleet.py beside it",
    "train/prefix/prefixes.py": "test_suffixes.py beside it",
    "train/prefix/stacked.py": "test_suffixes.py beside it",
    "data/debate/prompts.py": "test_debate.py beside it has a server that answers by their words",
    "data/llm_reply.py": "tests/data/test_new_rule.py has answers in form and out of it",
    "data/manifest.py": "tests/data/test_build.py builds and shows it",
    "eval/answers.py": "tests/eval/test_quality.py holds answers against labels",
    "eval/study/report.py": "test_run.py beside it writes and reads reports",
    "serve/cluster/kubernetes.py": "tests/deploy/test_kubernetes.py runs it on Ray",
    "serve/bench/http.py": "test_soak.py beside it measures the same server",
    "serve/bench/encoder.py": "test_latency.py beside it",
    "serve/bench/engines.py": "test_latency.py and workload/test_fleet_servers.py beside it use it",
    "serve/bench/load.py": "test_fleet.py beside it measures the same engine",
    "serve/bench/plot.py": "test_report.py beside it draws its rows",
    "serve/bench/workload/adapters.py": "test_fleet_servers.py beside it serves them",
    "serve/bench/workload/peft_baseline.py": "test_fleet_servers.py beside it, of which it is one",
    "serve/bench/workload/prompts.py": "test_server.py beside it",
    "serve/bench/workload/traffic.py": "test_server.py beside it",
    "serve/doctor/__main__.py": "test_rules.py beside it",
    "serve/doctor/finding.py": "test_rules.py beside it",
    "serve/doctor/installation.py": "test_rules.py beside it",
    "serve/doctor/machine.py": "test_rules.py beside it",
    "serve/engine/backends/decoder.py": "test_dispatch.py and test_head.py above ask it",
    "serve/engine/backends/environment.py": "test_arguments.py beside it",
    "serve/engine/backends/start.py": "a row of each kind; the engine's tests start them all",
    "serve/engine/backends/worker.py": "test_vllm_engine.py beside it",
    "serve/engine/backend.py": "test_engines.py beside it has one without a model",
    "serve/engine/codes.py": "test_call.py beside it",
    "serve/engine/plan.py": "test_dispatch.py beside it",
    "serve/engine/prompts.py": "test_call.py beside it",
    "serve/engine/rules.py": "test_engine.py beside it",
    "serve/engine/score.py": "test_call.py beside it",
    "serve/engine/thread/pace.py": "test_engine_thread.py beside it",
    "serve/engine/thread/watchdog.py": "test_engine_thread.py beside it",
    "serve/engine/refusals.py": "values; test_engine_thread.py beside it is refused by them",
    "serve/api/formats/conversation.py": "tests/serve/api/test_wire_format.py asks in all formats",
    "serve/api/observe/record.py": "values; tests/serve/api/observe/test_audit.py writes them",
    "serve/api/observe/requests.py": "tests/serve/api/test_app.py asks with ids",
    "serve/api/engine_service.py": "tests/serve/api/test_app.py asks it over HTTP",
    "serve/api/service.py": "tests/serve/api/test_app.py asks it over HTTP",
    "serve/api/errors.py": "tests/serve/api/test_app.py makes them",
    "serve/api/probes.py": "tests/serve/api/test_app.py asks them",
    "serve/api/calls.py": "tests/serve/api/formats/test_litellm.py keeps some",
    "serve/api/input/lines.py": "tests/serve/api/formats/test_stream.py reads some",
    "serve/api/catalogue.py": "tests/serve/api/test_access.py asks one",
    "serve/api/input/encodings.py": "tests/serve/api/input/test_limits.py packs bodies",
    "serve/api/input/strict_json.py": "tests/serve/api/input/test_limits.py sends some",
    "serve/api/observe/traces.py": "tests/serve/api/observe/test_audit.py reads them",
    "serve/api/observe/metrics.py": "tests/serve/api/observe/test_audit.py counts",
    "serve/api/observe/server_log.py": "tests/serve/api/observe/test_audit.py reads it",
    "serve/tenants/key_ring.py": "tests/serve/tenants/test_tenant_file.py finds keys' owners",
    "serve/tenants/tenant.py": "tests/serve/tenants/test_tenant_file.py has tenants",
    "serve/client/answers.py": "tests/serve/client/test_synchronous.py reads them",
    "serve/client/attempts.py": "tests/serve/client/test_synchronous.py makes them",
    "serve/client/asynchronous.py": "tests/serve/client/test_synchronous.py asks both clients",
    "serve/client/reply.py": "tests/serve/client/test_synchronous.py writes one",
    "serve/policy/ruling.py": "tests/serve/policy/test_logic.py combines them",
    "serve/policy/rule_set.py": "tests/serve/policy/test_logic.py reads their file",
    "serve/cluster/served.py": "tests/serve/cluster/test_start.py starts it on an engine",
    "serve/observers.py": "test_up.py",
    "serve/private_ray.py": "test_up.py",
    "serve/tls.py": "test_up.py",
    "serve/up_arguments.py": "test_up.py",
    "serve/vllm_alora/admit.py": "test_adapter.py",
    "serve/vllm_alora/arrival.py": "test_handover.py",
    "serve/vllm_alora/peft_config.py": "test_adapter.py",
    "serve/vllm_alora/kv/block_counts.py": "test_allocation.py",
    "serve/vllm_alora/kv/block_hash.py": "test_allocation.py",
    "serve/vllm_alora/kv/partial_block_copies.py": "test_partial_block_seams.py",
    "serve/vllm_alora/kv/shared_context.py": "test_cascade.py",
    "serve/vllm_alora/kv/tiled_attention.py": "test_native_attention.py",
    "serve/vllm_alora/kv/resident.py": "test_followers.py",
    "serve/vllm_alora/low_rank/launch_grid.py": "test_sgmv.py",
    "serve/vllm_alora/low_rank/native.py": "test_sgmv.py",
    "serve/vllm_alora/states.py": "test_answers.py",
    "serve/vllm_alora/weights/prefetch.py": "test_slots.py",
    "serve/vllm_encoder/deberta.py": "test_bert.py",
    "serve/vllm_encoder/modernbert.py": "test_bert.py",
    "serve/vllm_encoder/rows.py": "test_bert.py",
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
    "tests/serve/engine/test_cut_base.py": "the engine on a base of a recipe's first layers",
    "tests/serve/client/test_package.py": "serve/client as a wheel",
    "tests/serve/cluster/test_autoscaling.py": "ray_pool.py, on a Ray of other replicas",
    "tests/serve/cluster/shards/test_shards_on_ray.py": "shards/ and ray_pool.py, on one Ray",
    "tests/serve/fuzz/test_run.py": "the whole server, by its own OpenAPI",
    "tests/serve/api/test_documented.py": "the examples of the server's pages, against all formats",
    "tests/serve/gpu_path/test_ring.py": "starts ring_kernels.py in a process of its own",
    "tests/serve/vllm_alora/test_parity.py": "all seams together, against PEFT",
    "tests/test_class_names.py": "the whole tree",
    "tests/test_documents.py": "the pages",
    "tests/test_house.py": "the whole tree",
    "tests/test_import_directions.py": "the whole tree",
    "tests/test_makefile.py": "the Makefile and setup/",
    "tests/test_repository.py": "the whole tree",
    "tests/test_tiny_base.py": "recipes/models/tiny",
}
# Folders of tests that mirror no folder of the source.
OF_THE_WHOLE = {"serve/fuzz": "the server by its own OpenAPI", "serve/gpu_path": "vLLM as on a GPU"}
# Written so that this file does not match itself.
REGISTRY_HOSTS = [
    rf"\b{host}\.org\b" for host in ("pypi", "pythonhosted", r"download\.pytorch", "anaconda")
]
MACHINE_PATHS = [
    rf"(?<![\w.~}}]){folder}/"
    for folder in ("/" + "root", "/" + "work", "/home/" + r"\w+", "/opt/" + "(?:wheels|pypi)")
]


def repository_files() -> list[Path]:
    """What is tracked or would be: everything that .gitignore does not name."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    paths = (ROOT / name for name in listed.stdout.split("\0"))
    return sorted(path for path in paths if path.is_file())


def entries() -> list[str]:
    """Every module that is run as `python -m`."""
    modules = []
    for stage in ("data", "train", "eval", "serve"):
        for path in (ROOT / stage).rglob("*.py"):
            if 'if __name__ == "__main__":' in path.read_text(encoding="utf-8"):
                module = ".".join(path.relative_to(ROOT).with_suffix("").parts)
                modules.append(module.removesuffix(".__main__"))
    return sorted(modules)


def test_no_file_names_a_package_registry_or_a_path_of_one_machine() -> None:
    pattern = re.compile("|".join([*REGISTRY_HOSTS, *MACHINE_PATHS]).encode())
    found = []
    for path in repository_files():
        content = path.read_bytes()
        if b"\0" not in content[:8192]:  # text
            found += [f"{path}: {match[0].decode()}" for match in pattern.finditer(content)]
    assert found == []


def test_every_shipped_rule_loads() -> None:
    names = rule_names("all")
    assert {"medical_advice", "pii_leak", "jailbreak_attempt", "refund_promise"} <= set(names)
    assert all(load_rule(name).violates for name in names)


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
    command = [sys.executable, "-c", asks_for_help]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert f"python -m {module}" in done.stdout or module in done.stdout
    assert "--" in done.stdout


def test_the_entries_are_found() -> None:
    found = {"data.build", "train.run", "eval.run", "serve.bench", "serve.up", "serve.doctor"}
    assert found <= set(entries())


def folders_without_a_source(root: Path) -> set[str]:
    """The folders with tests under `root`/tests that are no folder of the source."""
    folders = {path.parent.relative_to(root / "tests") for path in root.glob("tests/**/test_*.py")}
    return {folder.as_posix() for folder in folders if not (root / folder).is_dir()}


def test_tests_mirror_the_folders_and_the_files_that_are_begun_first_exist(tmp_path: Path) -> None:
    assert folders_without_a_source(ROOT) == set(OF_THE_WHOLE)
    assert [name for name in LONG_FILES_S if not (ROOT / name).is_file()] == []
    for file in ("guard/a.py", "tests/guard/test_b.py", "tests/gone/test_a.py"):
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / file).touch()
    assert folders_without_a_source(tmp_path) == {"gone"}
