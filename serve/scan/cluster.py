"""A scan by several engines at once, each an actor of Ray Data: `make scan CLUSTER=1 ACTORS=2`.

A part is the unit of work. One task reads the sources and hands on the missing parts; an actor
starts the engine, judges a part and writes it, whole or not at all. An actor that dies is started
again by Ray, a few times, and asked for its part again; what a killed scan has written is not
judged again. Sources, weights and output are files, on a cluster of several machines in a file
system that all of them have, beside a checkout at the same place; the names of files are those of
the folder that the scan was started in. Pinned to Ray 2.60.

With RAY_ADDRESS it joins that cluster, otherwise it starts Ray on this machine and ends it. Knows
nothing of command lines.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import os
import pickle
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import ray
import ray.data
from ray.data import Datasource, ReadTask
from ray.data.block import BlockMetadata
from ray.exceptions import RayError

from guard.errors import GuardError
from guard.machine.device import usable_cores
from serve.private_ray import private_ray
from serve.scan.judge import ScanEngine, part_rows
from serve.scan.parts import PartFolder, ScanManifest
from serve.scan.scan import (
    StoredPart,
    VerdictCounts,
    count_verdicts,
    finish,
    kept_verdicts,
    read_parts,
    scan_bar,
)

IN_FLIGHT = 2  # parts that an actor has: one that it judges, one that waits for it
RESTARTS = 10  # of an actor: a part that kills its engine must not do so for ever
START_S = 600  # seconds that an actor's engine has to start
SPINS = "10000"
ENGINE_CPUS = 1  # cores of an actor with a GPU
Batch = dict[str, Any]  # of Ray Data: columns by name
# Starts an engine in whichever process; it is pickled on the way there.
StartEngine = Callable[[], ScanEngine]


class PartSource(Datasource):  # type: ignore[misc]  # Ray is an extra
    """The missing parts of a scan, one per block, read by one task; those that are `present` have
    so many rows.
    """

    def __init__(self, folder: PartFolder, present: Mapping[int, int]) -> None:
        super().__init__()
        self._folder = folder
        self._present = present
        self._working_folder = Path.cwd()

    def estimate_inmemory_data_size(self) -> int:
        return sum(size for size, _ in self._folder.manifest.sources.values())

    def get_read_tasks(
        self, parallelism: int, per_task_row_limit: int | None = None, data_context: Any = None
    ) -> list[ReadTask]:
        """The one task, whatever the parallelism: parts are counted through all sources."""
        metadata = BlockMetadata(
            num_rows=None,
            size_bytes=self.estimate_inmemory_data_size(),
            input_files=None,
            exec_stats=None,
        )
        folder, present, working_folder = self._folder, self._present, self._working_folder

        def read() -> Iterator[pyarrow.Table]:
            with contextlib.chdir(working_folder):
                for part in read_parts(folder.manifest):
                    if part.number not in present:
                        yield _as_block(part)
                        continue
                    rows = present[part.number]
                    folder.check_rows(part.number, rows, len(part.conversations))

        return [ReadTask(read, metadata)]


class PartJudge:
    """The engine of one actor, whose process works in `working_folder`.

    Raises GuardError if it does not start, or not with what the scan began with.
    """

    def __init__(
        self, start_engine: StartEngine, folder: Path, manifest: ScanManifest, working_folder: Path
    ) -> None:
        os.chdir(working_folder)
        self._engine = start_engine()
        manifest.check_served(self._engine.rules)
        self._folder = PartFolder(folder, manifest)

    def __call__(self, batch: Batch) -> Batch:
        """Judge and write the batch's one part, unless it exists by now."""
        (pickled,) = batch["part"]
        part: StoredPart = pickle.loads(pickled)
        if self._folder.has(part.number):  # of an actor that died before it could say so
            counts = kept_verdicts(self._folder, part)
        else:
            rows = part_rows(self._engine, part.conversations, self._folder.manifest)
            self._folder.write(part.number, rows)
            counts = count_verdicts(vars(row) for row in rows)
        judged = pickle.dumps((part.read_bytes, counts))
        return {"judged": np.array([judged], dtype=object)}


def scan_on_cluster(start_engine: StartEngine, folder: PartFolder, actors: int) -> ScanManifest:
    """As `scan.scan`, by `actors` actors, each with an engine of its own.

    Raises GuardError where a source cannot be read or has changed, a part that exists is broken, an
    engine does not start or breaks, or the cluster has too little for the actors.
    """
    counts: VerdictCounts = Counter()
    present: dict[int, int] = {}
    with _ray(actors), scan_bar(folder.manifest) as bar:
        for number in folder.numbers():
            kept = count_verdicts(folder.read(number))
            present[number] = kept.total()
            counts.update(kept)
        judged = _judged_parts(start_engine, folder, present, actors)
        with _errors_of_actors():
            for read_bytes, part_counts in judged:
                counts.update(part_counts)
                bar.update(read_bytes)
    return finish(folder, counts)


def _judged_parts(
    start_engine: StartEngine, folder: PartFolder, present: Mapping[int, int], actors: int
) -> Iterator[tuple[int, VerdictCounts]]:
    """Of each part as it is judged, in any order: the bytes that were read for it, its verdicts."""
    context = ray.data.DataContext.get_current()
    context.enable_progress_bars = False
    # One part per block: parts that share a block would be judged by one actor.
    context.target_max_block_size = 1
    context.wait_for_min_actors_s = START_S
    source = PartSource(folder, present)
    dataset = ray.data.read_datasource(source, override_num_blocks=1, num_cpus=0)
    judged = dataset.map_batches(
        PartJudge,
        fn_constructor_args=(start_engine, folder.folder, folder.manifest, Path.cwd()),
        batch_size=1,
        batch_format="numpy",
        compute=ray.data.ActorPoolStrategy(size=actors, max_tasks_in_flight_per_actor=IN_FLIGHT),
        max_restarts=RESTARTS,
        max_task_retries=RESTARTS,
        **_actor_resources(actors),
    )
    for row in judged.iter_rows():
        yield pickle.loads(row["judged"])


def _as_block(part: StoredPart) -> pyarrow.Table:
    # As Arrow's large binary: a part may have more than 2 GiB.
    pickled = pyarrow.array([pickle.dumps(part)], pyarrow.large_binary())
    return pyarrow.table({"part": pickled})


def _actor_resources(actors: int) -> dict[str, float]:
    """What an actor takes of its node: a GPU, where vLLM uses them, or its share of the cores,
    which Ray makes its number of threads.

    Raises GuardError if there is not enough for all.
    """
    on_cpu = importlib.metadata.version("torch").endswith("+cpu")
    resource, unit = ("CPU", "CPU cores") if on_cpu else ("GPU", "GPUs")
    nodes: list[int] = []
    for node in ray.nodes():
        if node["Alive"]:
            nodes.append(int(node["Resources"].get(resource, 0)))
    available = sum(nodes)
    if available < actors:
        raise GuardError(
            f"the cluster has too few {unit}: each actor needs one of its own",
            got=f"{actors} actors, {available} {unit}",
            remedy="Ask for fewer with ACTORS=",
        )
    if on_cpu:
        return {"num_cpus": most_cores_each(nodes, actors)}
    return {"num_cpus": ENGINE_CPUS, "num_gpus": 1}


def most_cores_each(nodes: Sequence[int], actors: int) -> int:
    """The most cores per actor with which all actors fit on nodes of so many cores."""
    for cores in range(max(nodes), 1, -1):
        if sum(node_cores // cores for node_cores in nodes) >= actors:
            return cores
    return 1


@contextlib.contextmanager
def _ray(actors: int) -> Iterator[None]:
    """The cluster of RAY_ADDRESS, or one on this machine for as long as the context.

    No word of Ray's own is on the terminal.
    """
    with contextlib.ExitStack() as stack:
        if os.environ.get("RAY_ADDRESS"):
            os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
            logging.getLogger("ray").setLevel(logging.ERROR)
            ray.init(log_to_driver=False, logging_level=logging.ERROR)
            stack.callback(ray.shutdown)
        else:
            temporary = tempfile.TemporaryDirectory(prefix="scan-", ignore_cleanup_errors=True)
            scratch = Path(stack.enter_context(temporary))
            places = max(actors, len(usable_cores()))
            stack.enter_context(private_ray(scratch, places, _waiting()))
        logging.getLogger("ray.data").setLevel(logging.CRITICAL)  # an error of an actor is raised
        yield


def _waiting() -> dict[str, str]:
    """How the threads of an actor wait for each other: a while, since Ray's own processes want the
    cores too, unless the shell says otherwise.
    """
    if os.environ.get("OMP_WAIT_POLICY"):
        return {}
    return {"GOMP_SPINCOUNT": SPINS}


@contextlib.contextmanager
def _errors_of_actors() -> Iterator[None]:
    """Raise the GuardError of an actor as it was there; any other as one that says what it was."""
    try:
        yield
    except RayError as error:
        # What Ray raises has the actor's error in its text, and not always as its cause.
        lines = [line for line in str(error).splitlines() if line.strip()]
        ours = [line for line in lines if "GuardError: " in line]
        if ours:
            raise GuardError(ours[-1].partition("GuardError: ")[2]) from error
        remedy = "Finished parts are kept; run without CLUSTER=1 to see the whole error"
        raise GuardError(f"an actor failed: {lines[-1]}", remedy=remedy) from error
