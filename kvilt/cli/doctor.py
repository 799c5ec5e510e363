"""`kvilt doctor`: what this machine has, what kvilt uses of it, and what is wrong with what to do about it."""

from __future__ import annotations

import json
import os
import platform
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.text import Text

from .. import __version__
from ..config import available_memory_bytes, cache_home, config_files, env_store_redis, offline
from ..errors import KviltError
from .inspect_view import size

State = Literal["ok", "note", "broken"]
_MARKS = {"ok": ("✓", "green"), "note": ("·", "yellow"), "broken": ("✗", "red")}
_X86_FLAGS = ("avx2", "fma", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "amx_int8", "amx_bf16")
_ARM_FLAGS = ("asimd", "asimddp", "i8mm")
_LEAST_FREE = 1 << 30
# What a package is for, and the extra that installs it.
_OPTIONAL = {
    "fastapi": ("kvilt serve", "server"),
    "uvicorn": ("kvilt serve", "server"),
    "huggingface_hub": ("models as hf:org/name", "hub"),
    "llguidance": ("structured output", "grammar"),
    "redis": ("a shared store", "store"),
    "zstandard": ("compressed stores", "store"),
    "ray": ("kvilt cluster", "cluster"),
    "mcp": ("kvilt mcp", "mcp"),
    "zmq": ("KV events", "events"),
    "matplotlib": ("plots of reports", "plot"),
}


@dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at."""

    topic: str
    state: State
    text: str
    advice: str = ""


def report(as_json: bool) -> bool:
    """Print all findings; False if something is broken."""
    found = findings()
    sound = all(one.state != "broken" for one in found)
    if as_json:
        print(json.dumps({"ok": sound, "findings": [asdict(one) for one in found]}))
        return sound
    console = Console(highlight=False, soft_wrap=True)
    for one in found:
        mark, colour = _MARKS[one.state]
        console.print(Text.assemble((f"{mark} ", colour), (f"{one.topic:<14}", "dim"), one.text))
        if one.advice:
            console.print(Text(f"{'':<16}→ {one.advice}", style=colour))
    console.print(Text("all is well" if sound else "something is broken, see ✗", style="green" if sound else "red"))
    return sound


def findings() -> list[Finding]:
    """Everything that is looked at; a check that fails itself is a finding too."""
    found: list[Finding] = []
    for check in CHECKS:
        try:
            found += check()
        except Exception as error:
            found.append(Finding(check.__name__.strip("_"), "broken", f"{type(error).__name__}: {error}"))
    return found


def _python() -> Iterator[Finding]:
    yield Finding("kvilt", "ok", f"{__version__} on Python {platform.python_version()}, {platform.platform()}")


def _processor() -> Iterator[Finding]:
    flags: set[str] = set()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                flags.update(line.partition(":")[2].split())
                break
    except OSError:
        pass
    known = [flag for flag in (*_X86_FLAGS, *_ARM_FLAGS) if flag in flags]
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    has = f"with {', '.join(known)}" if known else "(the system does not list its instruction sets)"
    yield Finding("processor", "ok", f"{platform.machine()}, {cores} cores to use, {has}")
    free = available_memory_bytes()
    low = free < _LEAST_FREE
    advice = "close other programs, or set kv_memory to a small size" if low else ""
    yield Finding("memory", "note" if low else "ok", f"{size(free)} available", advice)


def _kernels() -> Iterator[Finding]:
    import torch

    from ..ops.select import LARGE_WEIGHT_BYTES, for_weights, select

    yield Finding("torch", "ok", f"{torch.__version__}, {torch.get_num_threads()} threads")
    ops = select()
    if ops.name == "reference":
        advice = "reinstall kvilt with a C++20 compiler, or from a wheel: pip install --force-reinstall --no-deps kvilt"
        yield Finding(
            "CPU kernels", "broken", "the native kernels are not there; plain torch is many times slower", advice
        )
    else:
        large = for_weights("native", LARGE_WEIGHT_BYTES)
        of_large = f"; {large} for weights of {size(LARGE_WEIGHT_BYTES)} and more" if large != "native" else ""
        uses = f"kvilt uses {ops.name}, {ops.numerics}{of_large}, KV in {ops.kv_dtype.name}"
        yield Finding("CPU kernels", "ok", uses)


def _gpu() -> Iterator[Finding]:
    import torch

    if not torch.cuda.is_available():
        driver = Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None
        if driver and torch.version.cuda is None:
            yield Finding("GPU", "broken", "there is an NVIDIA driver, but this torch is built without CUDA",
                          "install torch from the index of PyTorch for your version of CUDA")  # fmt: skip
        else:
            yield Finding("GPU", "ok", "none that torch can use; kvilt runs on the CPU")
        return
    from ..ops.select import select

    for index in range(torch.cuda.device_count()):
        about = torch.cuda.get_device_properties(index)
        name = f"cuda:{index} {about.name}, {size(about.total_memory)}"
        try:
            ops = select(device=torch.device("cuda", index))
            yield Finding("GPU", "ok", f"{name}; kvilt uses {ops.name}")
        except KviltError as error:
            yield Finding("GPU", "broken", name, str(error))


def _compiler() -> Iterator[Finding]:
    found = next((path for name in ("c++", "g++", "clang++") if (path := shutil.which(name))), None)
    text = found or "none; only needed to build kvilt from source"
    yield Finding("compiler", "ok", text)


def _packages() -> Iterator[Finding]:
    missing: dict[str, list[str]] = {}
    there = []
    for package, (purpose, extra) in _OPTIONAL.items():
        if (found := _version(package)) is None:
            missing.setdefault(extra, []).append(purpose)
        else:
            there.append(f"{package} {found}")
    yield Finding("packages", "ok", ", ".join(there) or "none of the optional ones")
    for extra, purposes in missing.items():
        wanted = ", ".join(dict.fromkeys(purposes))
        yield Finding("packages", "note", f"not installed: what {wanted} needs", f"pip install 'kvilt[{extra}]'")


def _version(package: str) -> str | None:
    named = {"zmq": "pyzmq"}.get(package, package)
    try:
        return version(named)
    except PackageNotFoundError:
        return None


def _redis() -> Iterator[Finding]:
    url = env_store_redis()
    if url is None:
        server = shutil.which("valkey-server") or shutil.which("redis-server")
        yield Finding(
            "Redis", "ok", f"not in use (KVILT_STORE_REDIS is not set){f'; {server} is installed' if server else ''}"
        )
        return
    try:
        from redis import Redis

        with Redis.from_url(url, socket_timeout=3, socket_connect_timeout=3) as client:
            client.ping()
        yield Finding("Redis", "ok", "the server of KVILT_STORE_REDIS answers")
    except ImportError:
        yield Finding("Redis", "broken", "KVILT_STORE_REDIS is set", "pip install 'kvilt[store]'")
    except Exception as error:  # of the library, and of the system below; a URL may hold a password
        text = f"the server of KVILT_STORE_REDIS does not answer ({type(error).__name__})"
        yield Finding("Redis", "broken", text, "start it, correct the URL, or unset KVILT_STORE_REDIS")


def _folders() -> Iterator[Finding]:
    from ..weights.on_disk import models_on_disk

    home = cache_home()
    there = next(path for path in (home, *home.parents) if path.exists())
    if not os.access(there, os.W_OK):
        yield Finding("folder", "broken", f"{home} cannot be written", "set KVILT_HOME to a folder of your own")
    else:
        free = shutil.disk_usage(there).free
        low = free < _LEAST_FREE
        yield Finding("folder", "note" if low else "ok", f"{home}, {size(free)} free", "make room" if low else "")
    models = models_on_disk()
    total = size(sum(model.nbytes for model in models))
    fetch = "" if models or not offline() else "unset KVILT_OFFLINE once to fetch a model"
    yield Finding("models", "ok" if not fetch else "note", f"{len(models)} fetched, {total}", fetch)


def _settings() -> Iterator[Finding]:
    import typer.main

    from .app import app
    from .settings import DEFAULT, settings

    root = typer.main.get_command(app)
    files = [str(path) for path in config_files() if path.is_file()]
    try:
        changed = {one.name for one in settings(root) if one.source != DEFAULT}
    except KviltError as error:
        yield Finding("settings", "broken", str(error), "correct the file; `kvilt config` shows what is read")
        return
    named = f"{', '.join(sorted(changed))} set" if changed else "all default"
    yield Finding("settings", "ok", f"{named}; {', '.join(files) or 'no kvilt.toml'}")


def _servers() -> Iterator[Finding]:
    from ..server.running import running_servers

    servers = running_servers()
    text = ", ".join(f"{one.url} (process {one.pid})" for one in servers) or "none running"
    yield Finding("servers", "ok", text)


CHECKS: tuple[Callable[[], Iterator[Finding]], ...] = (
    *(_python, _processor, _kernels, _gpu, _compiler),
    *(_packages, _redis, _folders, _settings, _servers),
)
