"""Torch held to one thread, for the calling thread alone. Refuses to know steps and models.

`torch.set_num_threads` also writes a number for the whole process, which threads that use torch for the first time take
over: two models would overwrite each other's. The settings below belong to the calling thread and to no other.
"""

from __future__ import annotations

import ctypes
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

_LIBRARY = {"linux": "libtorch_cpu.so", "darwin": "libtorch_cpu.dylib", "win32": "torch_cpu.dll"}


@dataclass(frozen=True, slots=True)
class _Settings:
    """The number of threads of OpenMP and of MKL, as the libraries that torch has loaded keep it for each thread."""

    set_openmp: Callable[[int], object] | None
    set_mkl: Callable[[int], int] | None  # returns the number before; 0: the one of the process


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Torch operations of this thread use one core; other threads, also those that start meanwhile, use theirs."""
    settings = _settings()
    # Torch sets the number of a thread at its first use there. Asking makes it do so now and not inside.
    threads = torch.get_num_threads()
    if settings.set_openmp is None:
        yield
        return
    settings.set_openmp(1)
    mkl_threads = settings.set_mkl(1) if settings.set_mkl is not None else 0
    try:
        yield
    finally:
        settings.set_openmp(threads)
        if settings.set_mkl is not None:
            settings.set_mkl(mkl_threads)


@cache
def _settings() -> _Settings:
    """Where torch is built without OpenMP, there is nothing to set: its threads then do not wait on the cores."""
    path = Path(torch.__file__).parent / "lib" / _LIBRARY.get(sys.platform, "")
    try:
        # Its symbols and those of the libraries it is linked with: the OpenMP and the MKL that torch itself calls.
        library = ctypes.CDLL(str(path) if path.is_file() else None)
    except (OSError, TypeError):
        return _Settings(None, None)
    # The C functions; MKL's names in small letters are those of Fortran, which take addresses.
    openmp, mkl = getattr(library, "omp_set_num_threads", None), getattr(library, "MKL_Set_Num_Threads_Local", None)
    if openmp is not None:
        openmp.restype, openmp.argtypes = None, (ctypes.c_int,)
    if mkl is not None:
        mkl.restype, mkl.argtypes = ctypes.c_int, (ctypes.c_int,)
    return _Settings(openmp, mkl)
