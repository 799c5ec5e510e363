"""How a command imports what it is made of, torch above all: most of the time before a first token."""

from __future__ import annotations

import atexit
import dataclasses
import gc
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from importlib.machinery import ModuleSpec
from types import FrameType, ModuleType
from typing import Any

_META_KERNELS = "torch._meta_registrations"
# Methods of dataclasses that most classes never use; frozen ones have the last two to refuse assignments.
_LATE_METHODS = frozenset(f"__{name}__" for name in ("repr", "eq", "hash", "setattr", "delattr"))
# Modules that trace or compile programs: importing one of them imports the kernels before.
_TRACERS = frozenset(f"torch.{name}" for name in ("_dynamo", "_inductor", "_decomp", "_refs", "_prims", "onnx"))


@contextmanager
def uncollected() -> Iterator[None]:
    """Import modules without garbage collections.

    Modules make hundreds of thousands of objects that stay as long as the process. Collections find no garbage among
    them and take a sixth of the time of the imports; afterwards they leave these objects out.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()
        atexit.register(gc.unfreeze)  # so that the native module is unloaded in order


@contextmanager
def quick_imports() -> Iterator[None]:
    """Import modules in all the ways of this file that go with a process that kvilt has for itself."""
    defer_meta_kernels()
    with uncollected(), late_methods(), known_frames():
        yield


@contextmanager
def known_frames() -> Iterator[None]:
    """Import modules while `inspect` finds the module of a frame by its name.

    By itself it compares the files of all modules. torch asks for one while it is imported: a twentieth of that time.
    """
    search = inspect.getmodule

    def find(asked: Any, file: str | None = None) -> ModuleType | None:
        named = sys.modules.get(asked.f_globals.get("__name__", "")) if isinstance(asked, FrameType) else None
        return named or search(asked, file)

    vars(inspect)["getmodule"] = find
    try:
        yield
    finally:
        vars(inspect)["getmodule"] = search


@contextmanager
def late_methods() -> Iterator[None]:
    """Import modules whose dataclasses compile their methods, except `__init__`, on first use.

    `dataclass` writes each method as text and compiles it, two fifths of the time to import kvilt. A run calls ten of
    2400 such methods. Only releases of Python that write one method at a time (3.11, 3.12) can leave them for later.
    """
    write: Callable[..., Any] | None = getattr(dataclasses, "_create_fn", None)
    if write is None:
        yield
        return

    def written(name: str, *how: Any, **named: Any) -> Any:
        return _late(name, lambda: write(name, *how, **named)) if name in _LATE_METHODS else write(name, *how, **named)

    vars(dataclasses)["_create_fn"] = written
    try:
        yield
    finally:
        vars(dataclasses)["_create_fn"] = write


def _late(name: str, write: Callable[[], Any]) -> Any:
    """A method that is written when it is first called, and then takes its own place in the class."""
    made: list[Any] = []

    def method(self: Any, *given: Any) -> Any:
        if not made:
            made.append(write())
            made[0].__qualname__ = method.__qualname__
        for owner in type(self).__mro__:
            if vars(owner).get(name) is method:
                setattr(owner, name, made[0])
        return made[0](self, *given)

    method.__name__ = name
    return method


def defer_meta_kernels() -> None:
    """Let torch import its Python kernels for tensors without data when they are needed, not at the start.

    They compute shapes for tracing and compiling, and take a quarter of torch's import. A command that only computes
    needs none. For a process that kvilt has for itself: others may use such tensors ("meta") without a tracer.
    """
    if "torch" not in sys.modules:
        sys.meta_path.insert(0, _MetaKernels())


class _MetaKernels:
    """Finder and loader of the kernels' module: an empty one, until the first use of a name in it or of a tracer."""

    def find_spec(self, name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> ModuleSpec | None:
        del path, target
        if name == _META_KERNELS:
            return ModuleSpec(name, self)  # type: ignore[arg-type]  # a loader without the base class, whose import is slow
        if name in _TRACERS:
            self._load()
        return None  # found as ever

    def create_module(self, spec: ModuleSpec) -> None:
        del spec  # any module will do

    def exec_module(self, module: ModuleType) -> None:
        def get(name: str) -> Any:
            if name.startswith("__"):  # what the import system asks every module for
                raise AttributeError(name)
            return getattr(self._load(), name)

        vars(module)["__getattr__"] = get

    def _load(self) -> ModuleType:
        """The kernels, imported as torch does it."""
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            sys.modules.pop(_META_KERNELS, None)
        import torch._meta_registrations as kernels

        return kernels
