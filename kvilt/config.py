"""Frozen run configuration, and the only place that reads environment variables.

Refuses to know models: a value here is what a user may set, checked by name.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from .errors import ParamError

DEFAULT_MODEL = "smollm2"
_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20, "g": 1 << 30, "t": 1 << 40}


@dataclass(frozen=True, slots=True)
class RunConfig:
    """How a model is run; the same names in `kvilt.load(...)` and on the command line."""

    device: str = "auto"  # auto: the GPU if there is one; cpu, cuda or cuda:1
    threads: int | None = None  # None: one for each physical core that the process may use
    kv_memory: int | None = None  # bytes; None: a quarter of the available memory
    max_context: int | None = None  # tokens; None: the model's own
    kv_dtype: str = "auto"  # a name of the registry in kvilt/ops/kv_dtypes.py, which checks it
    backend: str = "auto"  # a name of the registry in kvilt/ops/select.py, which checks it
    lora_memory: int | None = None  # bytes that adapters may take between steps; None: 1 GiB
    gpu_memory: float = 0.9  # of a GPU's memory, what weights, KV and activations may take together
    # Tokens between two checkpoints of recurrent state, in models that have some, rounded up to whole pages. Going back
    # to any place computes at most so many tokens again, as long as the checkpoint was not evicted. None: 32 to 512, as
    # the memory for states allows.
    state_every: int | None = None
    numa: bool = True  # CPU threads stay on physical cores, in equal shares on NUMA nodes; False: the system decides
    # Processes of this machine that share a model, each with a part of its weights, heads and KV. See docs/parallel.md.
    tensor_parallel: int = 1
    parallel_timeout_s: float = 60.0  # how long a process waits for the others in a step before it gives up
    deterministic: bool = False  # a row's bits do not depend on its batch; on the CPU they never do

    def __post_init__(self) -> None:
        for name in ("threads", "kv_memory", "max_context", "lora_memory", "state_every", "tensor_parallel"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ParamError(name, f"must be a whole number and at least 1, not {value!r}")
        if not isinstance(self.device, str) or not re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device):
            raise ParamError("device", f"must be auto, cpu, cuda or cuda:N, not {self.device!r}")
        if not isinstance(self.gpu_memory, int | float) or not 0 < self.gpu_memory <= 1:
            raise ParamError("gpu_memory", f"must be above 0 and at most 1, not {self.gpu_memory!r}")
        for name in ("deterministic", "numa"):
            if not isinstance(getattr(self, name), bool):
                raise ParamError(name, f"must be True or False, not {getattr(self, name)!r}")
        if not 0 < self.parallel_timeout_s < math.inf:
            raise ParamError("parallel_timeout_s", f"must be a finite number above 0, not {self.parallel_timeout_s!r}")


@dataclass(frozen=True, slots=True)
class StepSizes:
    """What a step may hold."""

    step_tokens: int
    shared_step_tokens: int
    max_rows: int


# By kind of device: products on a GPU need thousands of tokens to be efficient.
STEP_SIZES = {"cpu": StepSizes(512, 128, 128), "cuda": StepSizes(8192, 1024, 256)}


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How requests share steps."""

    # The first three are None where the device decides: see STEP_SIZES.
    step_tokens: int | None = None  # tokens of one step; a longer prompt runs in several, beside other requests' rows
    shared_step_tokens: int | None = None  # the same while one owner draws beside others: each token waits for a step
    max_rows: int | None = None  # samples in one step
    max_waiting: int = 1024  # requests that may wait; more are refused
    unread_tokens: int = 64  # tokens a client may leave unread before its request is held
    step_timeout_s: float = 120.0  # a step that takes longer counts as hung
    max_handles: int = 256  # named KV handles of one owner: a key, whatever its salts
    handle_share: float = 0.5  # of all pages, what one owner's handles may hold
    handle_ttl_s: float = 3600.0  # how long a handle lives unless the request says otherwise
    # Owners, which are API keys behind a server, share steps and KV pages by weight; one that is not named weighs 1.
    owner_weights: Mapping[str, float] = field(default_factory=dict)
    discover: bool = False  # blend known documents that prompts hold without naming them
    # Plan and launch a step while the device computes the one before; None: where the device is not the CPU.
    overlap: bool | None = None
    # Where a store outlives the process: the fewest missing tokens of a prompt that are worth looking for there. None:
    # prefixes are neither kept nor looked for there.
    stored_prefix_tokens: int | None = 64
    # Other processes write notes into the same store: notes are read when a request names them, not at the start, and
    # a handle is noted before its creation is confirmed.
    shared_notes: bool = False

    def __post_init__(self) -> None:
        for name in ("max_waiting", "unread_tokens", "max_handles"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                raise ParamError(name, f"must be a whole number and at least 1, not {value!r}")
        for name in ("step_tokens", "shared_step_tokens", "max_rows", "stored_prefix_tokens"):
            value = getattr(self, name)
            if value is not None and (type(value) is not int or value < 1):
                raise ParamError(name, f"must be None or a whole number and at least 1, not {value!r}")
        if self.step_tokens is not None and (self.max_rows or 1) > self.step_tokens:
            raise ParamError("max_rows", f"must not be above step_tokens, which is {self.step_tokens}")
        for weight in self.owner_weights.values():
            if not 0.001 <= weight <= 1000:
                raise ParamError("owner_weights", f"a weight is a number from 0.001 to 1000, not {weight!r}")
        for name in ("step_timeout_s", "handle_share", "handle_ttl_s"):
            if not 0 < getattr(self, name) < math.inf:
                raise ParamError(name, f"must be a finite number above 0, not {getattr(self, name)!r}")

    def step_sizes(self, device: str) -> StepSizes:
        """What a step may hold on a kind of device; what is not given is the device's own."""
        own = STEP_SIZES.get(device, STEP_SIZES["cpu"])
        step_tokens = self.step_tokens or max(own.step_tokens, self.max_rows or 1)
        return StepSizes(
            step_tokens,
            self.shared_step_tokens or own.shared_step_tokens,
            self.max_rows or min(own.max_rows, step_tokens),
        )


@dataclass(frozen=True, slots=True)
class GateConfig:
    """How often blended prompts are compared with whole prefills, and what the gate does with the results."""

    every: int = 50  # one in so many blended requests of a recipe is compared; 0: none, and the gate does nothing
    act: bool = True  # raise the ratio of a recipe that is too far off, and beyond that compute prompts as a whole
    max_kl: float = 0.1  # mean KL of the first token, in nats, above which it is
    trusted: float = 0.7  # the share of that below which a lower ratio is taken up again
    step: float = 1.5  # the ratio is raised by this factor
    ceiling: float = 0.5  # and not beyond this
    least: int = 8  # comparisons before the gate acts; twice as many before a ratio is taken up again
    patience: int = 500  # steps of others that a comparison waits for; then it is dropped
    path: Path | None = None  # a file that keeps what was learnt; None: beside the documents, where they have a disk

    def __post_init__(self) -> None:
        for name, least in (("every", 0), ("least", 2), ("patience", 1)):
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise ParamError(name, f"must be a whole number and at least {least}, not {value!r}")
        if not 0 < self.max_kl < math.inf:
            raise ParamError("max_kl", f"must be a finite number above 0, not {self.max_kl!r}")
        if not 1.01 <= self.step < math.inf:
            raise ParamError("step", f"must be a finite number of at least 1.01, not {self.step!r}")
        for name in ("trusted", "ceiling"):
            if not 0 < getattr(self, name) <= 1:
                raise ParamError(name, f"must be above 0 and at most 1, not {getattr(self, name)!r}")


def parse_bytes(text: str, name: str = "kv_memory") -> int:
    """A number of bytes from `512M`, `2GiB`, `1.5g` or a plain number."""
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(?:i?b)?\s*", text, re.IGNORECASE)
    if match is None:
        raise ParamError(name, f"cannot read {text!r} as a size; write it like 512M or 2GiB")
    return int(float(match[1]) * _UNITS[match[2].lower()])


def env_threads() -> int | None:
    """KVILT_THREADS, for where the command line cannot be changed."""
    text = os.environ.get("KVILT_THREADS", "").strip()
    if not text:
        return None
    if not text.isdecimal() or int(text) < 1:
        raise ParamError("KVILT_THREADS", f"must be a whole number and at least 1, not {text!r}")
    return int(text)


def env_api_keys() -> list[str]:
    """KVILT_API_KEY: a server's keys, separated by commas, so that no command line shows them."""
    given = os.environ.get("KVILT_API_KEY")
    keys = [key for each in (given or "").split(",") if (key := each.strip())]
    if given is not None and not keys:
        raise ParamError("KVILT_API_KEY", "is set and holds no key; write keys into it, or unset it")
    return keys


def env_admin_key() -> str | None:
    """KVILT_ADMIN_KEY: the key of routes for the owner of a server."""
    return os.environ.get("KVILT_ADMIN_KEY", "").strip() or None


def env_store_redis() -> str | None:
    """KVILT_STORE_REDIS: the URL of the shared store, so that no command line shows a password in it."""
    return os.environ.get("KVILT_STORE_REDIS", "").strip() or None


def without_ray_telemetry() -> None:
    """Ray reports its usage over the network unless the environment says no; a user who wants that sets it to 1."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")


def cache_home() -> Path:
    """The one folder for fetched models: KVILT_HOME, else the user's cache folder."""
    if home := os.environ.get("KVILT_HOME"):
        return Path(home).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "kvilt"


# Variables with a meaning of their own; where one of them is set, no configuration file sets that option.
_OWN_VARIABLES = frozenset({"threads", "api_key", "admin_key", "store_redis"})
_PREFIX = "KVILT_"


def env_settings(names: Collection[str]) -> dict[str, str | None]:
    """Options that the environment sets, KVILT_PORT for `port`; None for those that other functions here read."""
    found = {name: os.environ.get(_PREFIX + name.upper()) for name in names}
    return {name: None if name in _OWN_VARIABLES else text for name, text in found.items() if text is not None}


def env_sets_options() -> bool:
    """Whether a variable sets an option of some command, as `env_settings` reads it."""
    meant = {"HOME", "OFFLINE", *(name.upper() for name in _OWN_VARIABLES)}
    return any(name.startswith(_PREFIX) and name.removeprefix(_PREFIX) not in meant for name in os.environ)


def config_files() -> tuple[Path, Path]:
    """The files with settings: the user's own, and that of the current folder, which goes before it."""
    base = os.environ.get("XDG_CONFIG_HOME")
    return (Path(base) if base else Path.home() / ".config") / "kvilt" / "kvilt.toml", Path.cwd() / "kvilt.toml"


def run_home() -> Path:
    """The folder that lists this user's running servers: in XDG_RUNTIME_DIR, else in the folder of `cache_home`."""
    if runtime := os.environ.get("XDG_RUNTIME_DIR"):
        return Path(runtime) / "kvilt"
    return cache_home() / "run"


def offline() -> bool:
    """KVILT_OFFLINE=1 promises that nothing is fetched."""
    return os.environ.get("KVILT_OFFLINE", "") not in ("", "0")


def available_cpus() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def available_memory_bytes() -> int:
    """Memory the system says a new process may use without swapping."""
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):
        return 4 << 30
