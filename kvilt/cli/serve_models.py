"""`kvilt serve --model a --model b`: several models behind one address, each in a process of its own."""

from __future__ import annotations

import asyncio
import dataclasses
import re
import secrets
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..config import available_memory_bytes, parse_bytes
from ..errors import ParamError, Unsupported
from ..llm.generation import sampling_defaults
from ..models.assemble import read_spec
from ..server.logs import configure_logs
from ..server.running import ServedModel, register
from ..weights.file_identity import file_identity
from ..weights.hub import resolve
from ..weights.source import open_checkpoint
from .progress import bars
from .serve import check_port, default_name, loop_factory, serve_config, server_record, warn_of_access

if TYPE_CHECKING:
    from ..server.config import ServeConfig
    from ..server.model_router.listener import RouterServer
    from ..server.model_router.model_process import RoutedModel

_PROCESS = "kvilt.cli.model_process"
# Options that belong to one model, which these would have to name.
_ONE_MODEL = ("lora", "kv_events")


def serve_models(
    models: list[str],
    memory: str | None,
    options: dict[str, Any],
    engine: dict[str, Any],
    store: dict[str, Any],
    config: dict[str, Any],
) -> None:
    """Serve several models until a signal stops the server."""
    try:
        from ..server.model_router.app import ModelRouter
        from ..server.model_router.listener import serve_models as listen
        from ..server.model_router.loaded_models import LoadedModels
        from ..server.model_router.model_process import start_model
    except ImportError as error:
        raise Unsupported(f"the server needs {error.name}; install it with: pip install 'kvilt[server]'") from None
    names = _names(models, options)
    settings = _settings(models[0], names, options, store)
    memory_bytes = available_memory_bytes() if memory is None else parse_bytes(memory, "models_memory")
    configure_logs(options["log_level"], options["log_format"])
    warn_of_access(settings, options, by_user=True)
    admin_key = settings.admin_key or secrets.token_hex(32)
    own = {
        name: {
            "options": _own_options(name, options, store, admin_key, list(settings.api_keys)),
            "engine": engine,
            "store": store,
            "config": config,
        }
        for name in names
    }
    routed, served = _fetched(dict(zip(names, models, strict=True)), own)

    async def run() -> None:
        kv_memory = config["kv_memory"]
        kv_bytes = None if kv_memory is None else parse_bytes(kv_memory, "kv_memory")
        loaded = LoadedModels(
            routed,
            lambda model: start_model(model, _PROCESS),
            memory_bytes,
            lambda: available_memory_bytes() // 4 if kv_bytes is None else kv_bytes,
            settings.grace_s,
        )
        await listen(ModelRouter(settings, loaded, admin_key), ready)

    with ExitStack() as listed, asyncio.Runner(loop_factory=loop_factory()) as runner:

        def ready(listener: RouterServer) -> None:
            listed.enter_context(register(server_record(settings, listener.port, tuple(served), {**store, **config})))
            _say_ready(listener)

        runner.run(run())


def _names(models: list[str], options: dict[str, Any]) -> list[str]:
    given = list(options["served_model_name"])
    if given and len(given) != len(models):
        raise ParamError(
            "served_model_name",
            f"{len(models)} models take {len(models)} names, in their order; {len(given)} are given",
        )
    names = given or [default_name(model) for model in models]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ParamError("model", f"two models would be called {twice[0]!r}; name them with --served-model-name")
    return names


def _settings(first: str, names: list[str], options: dict[str, Any], store: dict[str, Any]) -> ServeConfig:
    """What the router listens with; its ports are free."""
    for name in _ONE_MODEL:
        if options[name]:
            flag = f"--{name.replace('_', '-')}"
            raise ParamError(name, f"{flag} is for one model; leave it out, or serve that model alone")
    made = serve_config(first, {**options, "served_model_name": [names[0]]}, store["store"])
    check_port("port", made.host, made.port)
    if made.metrics_port is not None:
        check_port("metrics_port", made.metrics_host, made.metrics_port)
    return dataclasses.replace(made, names=tuple(names))


def _fetched(models: dict[str, str], own: dict[str, dict[str, Any]]) -> tuple[list[RoutedModel], list[ServedModel]]:
    """All models on this machine, fetched where they are not: for the router, and for those who look for a server."""
    routed, served = [], []
    with bars() as shown:
        for name, source in models.items():
            path = resolve(source, shown.fetching)
            routed.append(_routed(name, source, path, own[name]))
            served.append(ServedModel((name,), source, str(path.resolve()), file_identity(path)))
    return routed, served


def _routed(name: str, source: str, path: Path, own: dict[str, Any]) -> RoutedModel:
    """A model with what lists of models say of it. A file that cannot be read is refused here, not by a request."""
    from ..server.model_router.model_process import RoutedModel

    checkpoint = open_checkpoint(path)
    context = min(read_spec(checkpoint).context, own["config"]["max_context"] or sys.maxsize)
    return RoutedModel((name,), source, path, context, sampling_defaults(checkpoint).fields, own)


def _own_options(
    name: str, options: dict[str, Any], store: dict[str, Any], admin_key: str, api_keys: list[str]
) -> dict[str, Any]:
    """The options of one model's process: on loopback, with the same keys, and with folders of its own."""
    folder = re.sub(r"[^A-Za-z0-9._-]", "_", name).lstrip(".") or "model"
    kept = store["store"] and Path(store["store"]).expanduser() / "handles"
    saved = options["kv_dir"] or kept
    gate = options["gate_path"]
    return {
        **options,
        "host": "127.0.0.1",
        "port": 0,
        "metrics_port": None,
        "allowed_host": [*options["allowed_host"], options["host"]],
        "api_key": api_keys,
        "admin_key": admin_key,
        "admin_key_file": None,
        "kv_dir": str(Path(saved) / folder) if saved else None,
        "files_dir": str(Path(options["files_dir"]) / folder) if options["files_dir"] else None,
        "gate_path": None if gate is None else str(Path(gate).with_name(f"{folder}-{Path(gate).name}")),
    }


def _say_ready(listener: RouterServer) -> None:
    config = listener.service.config
    host = f"[{config.host}]" if ":" in config.host else config.host
    *others, last = config.names
    said = f"{', '.join(others)} and {last} are served at http://{host}:{listener.port}; requests load them"
    print(said, file=sys.stderr, flush=True)
    if listener.metrics is not None:
        metrics = f"http://{config.metrics_host}:{listener.metrics.port}/metrics"
        print(f"metrics are at {metrics}", file=sys.stderr, flush=True)
