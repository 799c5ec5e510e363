"""`kvilt` commands: in this process, or, where the process is the point, in one of their own."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass

from typer.testing import CliRunner

from kvilt.cli.app import app

ONE_THREAD = {"KVILT_THREADS": "1"}  # tests share the machine with each other


@dataclass(frozen=True)
class Done:
    returncode: int
    stdout: str
    stderr: str


def kvilt(*args: str, stdin: str = "", **env: str) -> Done:
    """The command in this process: the same code without the seconds it takes to import torch."""
    result = CliRunner().invoke(app, list(args), input=stdin, env={**ONE_THREAD, **env})
    return Done(result.exit_code, result.stdout, result.stderr)


def kvilt_process(*args: str, stdin: str = "", **env: str) -> Done:
    """The command as people run it."""
    command = [sys.executable, "-m", "kvilt.cli.main", *args]
    settings = {**os.environ, **ONE_THREAD, **env}
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, env=settings)
    return Done(done.returncode, done.stdout, done.stderr)
