"""The guardrail server: `python -m serve.up`, entry of `make up`. `serve/api` says what it answers.

Knows nothing of vLLM; that is the engine's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import os
import signal
import socket
import ssl
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI

from guard.arguments import count, port, seconds
from guard.errors import GuardError, exits_cleanly
from guard.layout import Runs
from guard.method import METHODS
from serve.api.app import create_app
from serve.api.bounded_heads import bounded_heads
from serve.api.engine_service import EngineService
from serve.api.observe.record import Observer
from serve.api.observe.server_log import configuration
from serve.api.service import FindTrained
from serve.cluster.served import ServedOptions
from serve.cluster.size import ReplicaRange, ScalingPace
from serve.engine import GuardEngine
from serve.engine.mixed import MixedEngine
from serve.engine.thread.engine_thread import CLOSING_S, TIMEOUT_S, EngineThread
from serve.engine.thread.restart import RestartableEngine
from serve.observers import open_observers
from serve.policy.rule_set import RuleSet, load_rule_sets
from serve.selection import Selection, ServedPart, find_trained, served_parts, start_warm
from serve.tenants.tenant_file import Tenants, load_tenants

FAILED = 2  # the exit status
BACKLOG = 2048  # connections that the system holds until they are accepted
# Seconds that an unused connection is kept: longer than clients and proxies keep theirs (httpx 5,
# nginx 60), or one is closed here at the moment that its next request is sent, which is then lost.
KEEP_ALIVE_S = 75


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m serve.up",
        description="Serve the trained rules of a base model over HTTP.",
    )
    add = parser.add_argument
    several = "several separated by commas answer side by side"
    add("--model", default="tiny", help=f"a base of recipes/models; {several} (default: tiny)")
    add("--rules", help="comma-separated; default: every trained rule")
    add(
        "--method",
        help=f"whose weights answer: {', '.join(METHODS)}; "
        "default: the recipe's first adapter that shares conversations between rules",
    )
    add("--rule-sets", type=Path, help="a YAML file of named rule sets (docs/server.md)")
    add("--tenants", type=Path, help="a YAML file of tenants and their keys (docs/server.md)")
    add(
        "--audit-log",
        type=Path,
        help="a file that gets a line of JSON for every check; "
        "{hostname} and {pid} in its name are filled in",
    )
    add("--traces", help="an OTLP receiver for spans, over HTTP: http://collector:4318")
    add("--watch", action="store_true", help="serve rules that are trained again by new weights")
    _add_tls_options(parser)
    add("--merged", action="store_true", help="serve one rule, from the base of `make merge`")
    _add_replica_options(parser)
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=port, default=8000, help="0 for a free one (default: %(default)s)")
    add(
        "--timeout",
        type=seconds,
        default=TIMEOUT_S,
        help="seconds that a check may take (default: %(default)g)",
    )
    add(
        "--runs",
        type=Path,
        default=Runs().root,
        help="where the weights are (default: %(default)s)",
    )
    arguments = parser.parse_args()
    if arguments.merged and arguments.method:
        parser.error("--merged serves the method that was merged: leave out --method")
    arguments.replicas = _replicas(parser, arguments)
    if arguments.merged and arguments.watch:
        parser.error("--merged answers from a base that is merged once: leave out --watch")
    if arguments.merged and arguments.replicas:
        parser.error("--merged answers from one process: leave out --replicas and --shards")
    return arguments


def _add_replica_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--replicas",
        type=ReplicaRange.parse,
        help="servers behind one address, on Ray: 2, or 1-4 for as many as the load needs",
    )
    add(
        "--scale-down",
        type=seconds,
        help="with --replicas 1-4: seconds of less load until one of them ends "
        f"(default: {ScalingPace.down_s:g})",
    )
    add(
        "--shards",
        type=count,
        default=1,
        help="groups of so many replicas that the rules are split over (default: %(default)s)",
    )


def _replicas(
    parser: argparse.ArgumentParser, arguments: argparse.Namespace
) -> ReplicaRange | None:
    """How many replicas each shard has; None for a server that is one process."""
    size: ReplicaRange | None = arguments.replicas
    if size is None and arguments.shards > 1:
        size = ReplicaRange(1, 1)
    if arguments.scale_down is None:
        return size
    if size is None or size.is_fixed:
        parser.error("--scale-down is for a number that follows the load: --replicas 1-4")
    return size.scaled_down_after(arguments.scale_down)


def _add_tls_options(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--tls-cert", type=Path, help="a PEM file with the server's chain of certificates")
    add(
        "--tls-key", type=Path, help="a PEM file with its private key, if that is not in the former"
    )
    add("--tls-client-ca", type=Path, help="a PEM file: only clients with its certificates may ask")


@exits_cleanly
def main() -> None:
    """Serve until SIGINT or SIGTERM."""
    arguments = _arguments()
    selection = Selection(
        arguments.model,
        arguments.rules,
        arguments.method,
        arguments.merged,
        Runs(arguments.runs),
    )
    parts = served_parts(selection)
    rule_sets = _rule_sets(arguments.rule_sets, parts)
    tenants = _tenants(arguments.tenants, rule_sets)
    tls = _tls(arguments.tls_cert, arguments.tls_key, arguments.tls_client_ca)
    observers = open_observers(arguments.audit_log, arguments.traces)
    if arguments.replicas is not None:
        with _listening(arguments.host, arguments.port) as listener:
            _print_loading(parts)
            options = ServedOptions(
                parts,
                arguments.timeout,
                rule_sets,
                tenants,
                arguments.audit_log,
                arguments.traces,
            )
            find = find_trained(selection, parts)
            _serve_cluster(arguments, options, observers, find, listener, tls)
        return
    with _listening(arguments.host, arguments.port) as listener:
        _print_loading(parts)

        def start(folders: Mapping[str, Path] | None) -> GuardEngine | MixedEngine:
            return start_warm(parts, folders, is_merged=arguments.merged)

        with RestartableEngine(start) as engine:
            app = create_app(
                engine,
                arguments.timeout,
                rule_sets=rule_sets,
                is_watching=arguments.watch,
                tenants=tenants,
                observers=observers,
                find_trained=find_trained(selection, parts),
            )
            _serve(app, listener, arguments.timeout, tls)


def _print_loading(parts: Sequence[ServedPart]) -> None:
    for part in parts:
        names = ", ".join(part.folders)
        label = METHODS[part.method].label
        count = len(part.folders)
        print(f"loading {part.recipe.name} with {count} rules ({label}): {names}", flush=True)


def _rule_sets(path: Path | None, parts: Sequence[ServedPart]) -> dict[str, RuleSet]:
    """The rule sets of the file, if there is one. Raises GuardError for what is wrong with it."""
    if path is None:
        return {}
    served = [name for part in parts for name in part.folders]
    return load_rule_sets(path, served)


def _tenants(path: Path | None, rule_sets: Mapping[str, RuleSet]) -> Tenants | None:
    """The tenants of the file, if there is one. Raises GuardError for what is wrong with it."""
    if path is None:
        return None
    if not rule_sets:
        raise GuardError(
            "tenants are given rule sets, and there are none",
            where=path,
            remedy="Name the file that has them with RULESETS=",
        )
    return load_tenants(path, rule_sets)


def _tls(cert: Path | None, key: Path | None, client_ca: Path | None) -> dict[str, Any]:
    """uvicorn's settings for these files; none without a certificate.

    Raises GuardError for files that are no certificate and its key.
    """
    if cert is None:
        if key or client_ca:
            remedy = "Name the certificate with --tls-cert (TLSCERT=)"
            raise GuardError("TLS needs a certificate", got=key or client_ca, remedy=remedy)
        return {}
    settings: dict[str, Any] = {"ssl_certfile": cert, "ssl_keyfile": key}
    if client_ca is not None:
        settings |= {"ssl_ca_certs": str(client_ca), "ssl_cert_reqs": ssl.CERT_REQUIRED}
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a terminal to ask, a key with a password would let the server hang.
        context.load_cert_chain(cert, key, password=str)
        if client_ca is not None:
            context.load_verify_locations(client_ca)
    except OSError as error:
        remedy = (
            "Name PEM files: the chain (TLSCERT=), its key without a password (TLSKEY=), "
            "the clients' authority (TLSCA=)"
        )
        where = ", ".join(str(path) for path in (cert, key, client_ca) if path)
        raise GuardError(f"no TLS: {error}", where=where, remedy=remedy) from error
    return settings


class EngineBoundServer(uvicorn.Server):
    """Ends when its engine has failed for good, as a signal would end it."""

    def __init__(self, config: uvicorn.Config, service: EngineService) -> None:
        super().__init__(config)
        self._service = service

    async def on_tick(self, counter: int) -> bool:
        """Whether to end; asked ten times a second."""
        is_over = await super().on_tick(counter)
        return is_over or self._service.thread.failure is not None


def _serve(app: FastAPI, listener: socket.socket, timeout_s: float, tls: Mapping[str, Any]) -> None:
    """Serve an app whose engine is in this process. Raises GuardError once that has failed."""
    service: EngineService = app.state.service
    _answer(EngineBoundServer(_config(app, timeout_s, tls), service), listener)
    _end_with_its_engine(service.thread)


def _serve_cluster(
    arguments: argparse.Namespace,
    options: ServedOptions,
    observers: Sequence[Observer],
    find: FindTrained,
    listener: socket.socket,
    tls: Mapping[str, Any],
) -> None:
    """Serve replicas in processes of their own. Raises GuardError if they do not start."""
    from serve.cluster.start import started_cluster

    with started_cluster(
        arguments.replicas,
        options,
        shards=arguments.shards,
        observers=observers,
        is_watching=arguments.watch,
        find_trained=find,
    ) as app:
        _answer(uvicorn.Server(_config(app, arguments.timeout, tls)), listener)


def _config(app: FastAPI, timeout_s: float, tls: Mapping[str, Any]) -> uvicorn.Config:
    # Whoever sends his request slowly is not waited for longer than a check may take.
    patience_s = math.ceil(timeout_s + CLOSING_S)
    return uvicorn.Config(
        app,
        http=bounded_heads(patience_s),
        log_config=configuration(),
        timeout_graceful_shutdown=patience_s,
        timeout_keep_alive=KEEP_ALIVE_S,
        server_header=False,
        **tls,
    )


def _answer(server: uvicorn.Server, listener: socket.socket) -> None:
    """Answer on the socket until a signal, or the server itself, ends it."""
    host, port = listener.getsockname()[:2]
    scheme = "https" if server.config.is_ssl else "http"
    name = f"[{host}]" if ":" in host else host
    address = f"{scheme}://{name}:{port}"
    print(f"{address}/v1/check is ready; {address}/docs describes it; Ctrl+C stops it", flush=True)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ends it as Ctrl+C does
    # uvicorn raises the signal again after it has shut down.
    with contextlib.suppress(KeyboardInterrupt):
        server.run(sockets=[listener])


def _end_with_its_engine(thread: EngineThread) -> None:
    """Raise GuardError if the engine has failed for good, so that the process ends with an error.

    Its batch may hang: nothing of it can be closed, so the process ends here.
    """
    if thread.failure is None:
        return
    if thread.hangs_for_good:
        print(f"error: {thread.failure}", file=sys.stderr, flush=True)
        os._exit(FAILED)
    raise thread.failure


def _listening(host: str, port: int) -> socket.socket:
    """The server's socket, bound before the engine starts.

    A port in use should not cost the user that wait.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=BACKLOG)
    except (OSError, OverflowError) as error:
        remedy = "Choose another port with PORT=, or an address of this machine with HOST="
        raise GuardError(f"cannot listen on {host}:{port}: {error}", remedy=remedy) from error


if __name__ == "__main__":
    main()
