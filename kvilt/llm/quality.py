"""Makes the quality gate that a configuration asks for, with the file that keeps its certificates."""

from __future__ import annotations

from pathlib import Path

from ..blend.certificate import CertificateFile
from ..blend.quality_gate import QualityGate
from ..config import GateConfig
from ..executor.protocol import Executor
from ..store.store import Store

_NAME = "certificates.json"


def gate_for(config: GateConfig | None, executor: Executor, store: Store | None) -> QualityGate | None:
    """The gate of a configuration; None if it compares nothing."""
    if config is None or not config.every:
        return None
    path = _path(config, store)
    return QualityGate(
        config, lambda: executor.pool.identity().model, CertificateFile(path) if path is not None else None
    )


def _path(config: GateConfig, store: Store | None) -> Path | None:
    if config.path is not None:
        return Path(config.path)
    folder = store.folder if store is not None else None
    return folder / _NAME if folder is not None else None
