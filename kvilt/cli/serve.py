"""`kvilt serve`: one model behind an OpenAI-compatible HTTP API."""

from __future__ import annotations

import asyncio
import errno
import gc
import os
import socket
import sys
from contextlib import AbstractContextManager, ExitStack, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..config import EngineConfig, GateConfig, env_api_keys
from ..errors import ParamError, Unsupported
from ..llm import AsyncLLM, load_async
from ..server.logs import configure_logs
from ..server.running import RunningServer, ServedModel, process_ticks, register
from ..weights.file_identity import file_identity
from ..weights.hub import resolve
from .keys import admin_key, read_keys, weighted_keys
from .options import DRAFTS, RUNTIME, STORE
from .progress import bars, tracked
from .store import context_prefix, open_store

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..server.config import ServeConfig
    from ..server.kv_events.publisher import KVEventPublisher
    from ..server.listener import HTTPServer

    OnReady = Callable[[HTTPServer, KVEventPublisher | None], None]

VISIBLE_KEYS = (
    "every user of this machine sees keys of the command line in the list of processes; "
    "use --api-key-file and --admin-key-file, or KVILT_API_KEY and KVILT_ADMIN_KEY"
)


def serve(
    model: str,
    options: dict[str, Any],
    engine: dict[str, Any],
    store: dict[str, Any],
    config: dict[str, Any],
    on_ready: OnReady | None = None,
) -> None:
    """Load a model and serve it until a signal stops the server; `on_ready` is told of it in place of the terminal."""
    try:
        from ..server.listener import SWITCH_S
        from ..server.listener import serve as listen
    except ImportError as error:
        raise Unsupported(f"the server needs {error.name}; install it with: pip install 'kvilt[server]'") from None
    settings = serve_config(model, options, store["store"])
    given = {name: value for name, value in engine.items() if value is not None}
    chosen = EngineConfig(**given, owner_weights=owner_weights(options["api_key_file"]))
    gate = gate_of(options)
    configure_logs(options["log_level"], options["log_format"])
    check_port("port", settings.host, settings.port)
    if settings.metrics_port is not None:
        check_port("metrics_port", settings.metrics_host, settings.metrics_port)
    warn_of_access(settings, options, on_ready is None)
    adapters = [named_path(each) for each in options["lora"]]
    with open_store(store) as kept:
        with bars() as shown:
            own = {"store": kept, "context_prefix": context_prefix(store), "gate": gate, **config}
            found = resolve(model, shown.fetching)
            served = ServedModel(settings.names, model, str(found.resolve()), file_identity(found))
            llm = load_async(found, on_fetch=shown.fetching, engine=chosen, **own)
        for name, path in adapters:
            if name in settings.names:
                raise ParamError("lora", f"{name!r} is the model's own name; give the adapter another one")
            llm.load_lora(path, name)
        if options["warm_up"]:
            with tracked("preparing kernels", 100) as show:
                llm.warm_up(lambda done, total: show(100 * done // total, ""))
        llm.grammars.warm_up()
        gc.collect()
        gc.freeze()  # the model stays: later collections need not walk over it
        sys.setswitchinterval(SWITCH_S)
        try:
            with (
                ExitStack() as listed,
                publishing(llm, options) as events,
                asyncio.Runner(loop_factory=loop_factory()) as runner,
            ):

                def ready(listener: HTTPServer) -> None:
                    if on_ready is None:
                        record = server_record(settings, listener.port, (served,), {**store, **config})
                        listed.enter_context(register(record))
                    (on_ready or _ready)(listener, events)

                runner.run(listen(llm, settings, ready))
        finally:
            gc.unfreeze()  # else the native module is not unloaded in order at exit


def check_port(option: str, host: str, port: int) -> None:
    """Refuse an address that cannot be listened on, before a model is loaded for it."""
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            tried.bind(address)
    except OSError as error:
        flag = f"--{option.replace('_', '-')}"
        if error.errno == errno.EADDRINUSE:
            what = f"{host}:{port} is in use by another program; choose another with {flag}, or 0 for any free one"
        else:
            what = f"cannot listen on {host}:{port}: {error.strerror or error}"
        raise ParamError(option, what) from None


def warn_of_access(settings: ServeConfig, options: dict[str, Any], by_user: bool) -> None:
    """Warn of a server that is open to others, and of keys that a user has written where others see them."""
    if not settings.is_local and not settings.api_keys:
        print("warning: every client that reaches this address can use the model; set --api-key", file=sys.stderr)
    if by_user and (options["api_key"] or options["admin_key"]):
        print(f"warning: {VISIBLE_KEYS}", file=sys.stderr)


def publishing(llm: AsyncLLM, options: dict[str, Any]) -> AbstractContextManager[KVEventPublisher | None]:
    """Publishes KV events while a block runs, if --kv-events says where."""
    if options["kv_events"] is None:
        return nullcontext()
    try:
        from ..server.kv_events.publisher import KVEventPublisher, check_endpoint
    except ImportError as error:
        raise Unsupported(f"KV events need {error.name}; install it with: pip install 'kvilt[events]'") from None
    if not check_endpoint(options["kv_events"]):
        print("warning: every client that reaches --kv-events reads the prompts of all keys", file=sys.stderr)
    pool = llm.executor.pool
    return KVEventPublisher(
        llm.executor.prefixes,
        pool.layout.page_tokens,
        options["kv_events"],
        options["kv_events_replay"],
        options["kv_events_topic"],
        "CPU" if pool.device.type == "cpu" else "GPU",
    )


def server_record(
    settings: ServeConfig, port: int, models: tuple[ServedModel, ...], options: dict[str, Any]
) -> RunningServer:
    """The server as other commands of this user find it."""
    groups = (STORE, DRAFTS, RUNTIME)
    usual = {name: option.default for group in groups for name, option in group.options.items()}
    given = {name: value for name, value in options.items() if name in usual and value != usual[name]}
    given.pop("store_redis", None)  # its URL may hold a password
    return RunningServer(
        pid=os.getpid(),
        url=local_url(settings.host, port),
        models=models,
        needs_key=bool(settings.api_keys),
        version=__version__,
        options=given,
        start_ticks=process_ticks(os.getpid()),
    )


def local_url(host: str, port: int) -> str:
    """The address at which a client on this machine reaches a server that listens on `host`."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _ready(listener: HTTPServer, events: KVEventPublisher | None) -> None:
    config = listener.service.config
    host = f"[{config.host}]" if ":" in config.host else config.host
    print(f"{config.names[0]} is served at http://{host}:{listener.port}", file=sys.stderr, flush=True)
    if events is not None:
        print(f"KV events are at {events.endpoint}, replayed at {events.replay}", file=sys.stderr, flush=True)
    if listener.metrics is not None:
        print(
            f"metrics are at http://{config.metrics_host}:{listener.metrics.port}/metrics", file=sys.stderr, flush=True
        )


def serve_config(model: str, options: dict[str, Any], store: str | None = None) -> ServeConfig:
    """The options as the server's configuration, with keys from files and the environment.

    Without --kv-dir, handles are saved in the folder of the store; the page's conversations are kept there too.
    """
    from ..server.config import ServeConfig

    names = tuple(options["served_model_name"]) or (default_name(model),)
    keys = (*options["api_key"], *read_keys(options["api_key_file"]), *env_api_keys())
    same = (
        "host",
        "port",
        "metrics_host",
        "metrics_port",
        "grace_s",
        "max_body_bytes",
        "max_file_bytes",
        "max_session_bytes",
        "stable_prompts",
        "max_connections",
        "keep_alive_s",
    )
    kept = None if store is None else Path(store).expanduser()
    saved = options["kv_dir"] or (None if kept is None else kept / "handles")
    return ServeConfig(
        names=names,
        aliases=tuple(_alias(each, names[0]) for each in options["alias"]),
        api_keys=tuple(dict.fromkeys(keys)),
        admin_key=admin_key(options["admin_key"], options["admin_key_file"]),
        allowed_hosts=tuple(options["allowed_host"]),
        cors_origins=tuple(options["cors_origin"]),
        kv_dir=None if saved is None else Path(saved),
        chats_dir=None if kept is None else kept / "chats",
        files_dir=Path(options["files_dir"]) if options["files_dir"] else None,
        lora_dir=Path(options["lora_dir"]) if options["lora_dir"] else None,
        **{name: options[name] for name in same},
    )


def gate_of(options: dict[str, Any]) -> GateConfig:
    """How blended prompts are compared with whole prefills. A server compares by default: no user evaluates for it."""
    path = options["gate_path"]
    return GateConfig(
        every=options["gate_every"],
        act=options["gate_act"],
        max_kl=options["gate_max_kl"],
        path=None if path is None else Path(path),
    )


def named_path(text: str) -> tuple[str, str]:
    """An adapter's name and folder, from NAME=PATH."""
    name, equals, path = text.partition("=")
    if not name or not equals or not path:
        raise ParamError("lora", f"cannot read {text!r}; write it as NAME=PATH")
    return name, path


def _alias(text: str, model: str) -> tuple[str, str]:
    """An alias and what it stands for, from NAME or NAME=ADAPTER."""
    alias, _, target = text.partition("=")
    return alias, target or model


def default_name(model: str) -> str:
    """The default name of a model in requests; never a path."""
    name = model.removeprefix("hf:")
    return Path(name).stem if "/" in name and not model.startswith("hf:") else name


def owner_weights(path: str | None) -> dict[str, float]:
    """The weights of a key file by tenant."""
    from ..server.auth import tenant_of_key

    return {tenant_of_key(key): weight for key, weight in weighted_keys(path).items() if weight != 1.0}


def loop_factory() -> Any:
    """uvloop where it is installed."""
    try:
        import uvloop
    except ImportError:
        return None
    return uvloop.new_event_loop
