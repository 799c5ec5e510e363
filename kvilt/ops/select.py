"""The registry of backends, and the choice among them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import TypeAlias

import torch

from ..errors import ParamError, Unsupported
from .contract import Ops
from .native.backend import NativeOps, native_isas
from .reference import ReferenceOps

_log = logging.getLogger(__name__)

# Makes a backend on a device, for so many threads (None: its own choice); raises Unsupported where it cannot run.
MakeOps: TypeAlias = Callable[[torch.device, int | None], Ops]

CPU = torch.device("cpu")


class WrongDevice(Unsupported):
    """A backend was asked for on a device that it is not made for."""


def _native(isa: str, device: torch.device, threads: int | None, *, numa: bool = True) -> Ops:
    if device != CPU:
        raise WrongDevice(f"the native kernels run on the CPU, not on {device}")
    return NativeOps(threads, isa, numa=numa)


def _triton(dtype: torch.dtype, deterministic: bool, device: torch.device, _threads: int | None) -> Ops:
    if device.type != "cuda":
        raise WrongDevice(f"the triton kernels run on CUDA devices, not on {device}")
    try:
        from .triton.backend import TritonOps
        from .triton.deterministic import DeterministicTritonOps
    except ImportError as error:
        raise Unsupported(f"the CUDA kernels need triton ({error}); install it, or a torch built for CUDA") from None
    return DeterministicTritonOps(device, dtype) if deterministic else TritonOps(device, dtype)


def _reference(device: torch.device, _threads: int | None) -> Ops:
    return ReferenceOps(device)


# In order of preference: `auto` takes the first one that this machine can run, in its best instruction set.
BACKENDS: Mapping[str, MakeOps] = MappingProxyType(
    {"native": partial(_native, "auto"), "triton": partial(_triton, torch.bfloat16, False), "reference": _reference}
)
_AMX = ("amx", "amx-bf16", "amx-attention")
_ISAS = (*_AMX, "avx512bf16", "avx512", "avxvnni", "avx2", "i8mm", "neon", "generic")
_FOR_LARGE, LARGE_WEIGHT_BYTES = "amx-bf16", 512 << 20  # the instruction set for larger models, and their size
# Native kernels of one instruction set, for bits (and KV) that several kinds of machine share; and the CUDA kernels
# with weights, activations and KV in float32, beside which the usual ones can be judged.
NARROWED: Mapping[str, MakeOps] = MappingProxyType(
    {
        **{f"native/{isa}": partial(_native, isa) for isa in _ISAS},
        "triton/float32": partial(_triton, torch.float32, False),
    }
)
# Backends that have kernels of their own for `deterministic`, under the same names.
_DETERMINISTIC: Mapping[str, MakeOps] = MappingProxyType(
    {"triton": partial(_triton, torch.bfloat16, True), "triton/float32": partial(_triton, torch.float32, True)}
)
# Native kernels whose threads the system places, under the same names.
_UNPLACED: Mapping[str, MakeOps] = MappingProxyType(
    {"native": partial(_native, "auto", numa=False)}
    | {f"native/{isa}": partial(_native, isa, numa=False) for isa in _ISAS}
)
# All that can be asked for by name. Code is registered here, never state of a run: `register` belongs beside an import.
_NAMED: dict[str, MakeOps] = {**BACKENDS, **NARROWED}


def register(name: str, make: MakeOps) -> None:
    """Let a backend outside of kvilt be asked for by name; `auto` does not take it."""
    if name in names():
        raise ValueError(f"there is a backend {name!r} already")
    _NAMED[name] = make


def names() -> tuple[str, ...]:
    """What `backend` may be."""
    return ("auto", *_NAMED)


def only_on_cpu(backend: str) -> bool:
    """Whether a backend of that name has no kernels for other devices."""
    return backend.partition("/")[0] == "native"


def check_name(backend: str) -> None:
    """Refuse a name that is not registered, before anything is loaded."""
    if backend not in names():
        raise ParamError("backend", f"must be one of {', '.join(names())}, not {backend!r}")


def select(
    backend: str = "auto",
    threads: int | None = None,
    device: torch.device = CPU,
    deterministic: bool = False,
    numa: bool = True,
) -> Ops:
    """The backend of that name, or the best one for this device; a better one that is missing is said aloud.

    With `deterministic`, one whose results have the same bits in any batch. Without `numa`, one that leaves it to the
    system on which cores its threads run.
    """
    known = {**_NAMED, **(_DETERMINISTIC if deterministic else {}), **({} if numa else _UNPLACED)}
    if backend != "auto" and backend not in known:
        raise Unsupported(f"there is no backend {backend!r}; this build has {', '.join(_NAMED)}")
    ops = _first_of(known, threads, device) if backend == "auto" else known[backend](device, threads)
    if deterministic and not ops.deterministic:
        raise ParamError(
            "deterministic",
            f"the {ops.name} backend does not promise it; the native backend does on the CPU, and triton on a GPU",
        )
    return ops


def for_weights(backend: str, weight_bytes: int, device: torch.device = CPU) -> str:
    """The backend that is best for a model of this size, where `backend` leaves that open.

    Weights that no cache holds are read from memory for each token, and that takes longer than to make them bfloat16.
    """
    large = backend in ("auto", "native") and device == CPU and weight_bytes >= LARGE_WEIGHT_BYTES
    return f"native/{_FOR_LARGE}" if large and _FOR_LARGE in native_isas() else backend


def _first_of(known: Mapping[str, MakeOps], threads: int | None, device: torch.device) -> Ops:
    """The first backend, in order of preference, that can run on this device."""
    declined = []
    for name in BACKENDS:
        try:
            ops = known[name](device, threads)
        except WrongDevice:
            continue
        except Unsupported as reason:
            declined.append(reason)
            continue
        for why in declined:
            _log.warning("%s; running on %s, several times slower", why, ops.name)
        return ops
    raise AssertionError("the reference runs everywhere")
