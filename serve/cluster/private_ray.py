"""A Ray of this process's own, on this machine, for as long as it is needed. Imports Ray.

No dashboard, no usage statistics, no word of its own on the terminal. Its processes know each other
by a token, as Ray has it by default; without one in the environment Ray would write one into the
home folder, which all clusters of the user share, so each process makes one that no file has. Ray
reads RAY_AUTH_MODE once, when it is imported: it is left alone here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping
from pathlib import Path

import ray
from ray._private import auto_init_hook

OBJECT_STORE_BYTES = 512 * 2**20  # for data on its way between processes; more goes to disk


@contextlib.contextmanager
def private_ray(
    scratch: Path, places: int, environment: Mapping[str, str] | None = None
) -> Iterator[None]:
    """A Ray with `places` CPUs to give away, its files in `scratch`, a folder with a short path.

    Its processes find `environment` in theirs, unless this process's own says otherwise.
    """
    settings = {"RAY_AUTH_TOKEN": secrets.token_hex(32), "RAY_USAGE_STATS_ENABLED": "0"}
    settings |= environment or {}
    for name, value in settings.items():
        os.environ.setdefault(name, value)
    logging.getLogger("ray").setLevel(logging.ERROR)
    # Asking Ray after its end would start another one, as threads of Ray Serve do.
    auto_init_hook.enable_auto_connect = False
    ray.init(
        address="local",
        num_cpus=places,
        include_dashboard=False,
        log_to_driver=False,
        logging_level=logging.ERROR,
        object_store_memory=OBJECT_STORE_BYTES,
        _node_ip_address="127.0.0.1",
        _temp_dir=str(scratch),
    )
    try:
        yield
    finally:
        ray.shutdown()
