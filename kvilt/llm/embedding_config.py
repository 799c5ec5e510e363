"""How a model's author embeds texts: pooling, length and prompts, from sentence-transformers files or GGUF."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

from ..engine.pooling import PoolingKind
from ..errors import InputError, ParamError, Unsupported, WeightError
from ..models.families.registry import has_head
from ..weights.json_file import read_object, read_objects
from ..weights.source import GGUF, Checkpoint

MODULES, PROMPTS = "modules.json", "config_sentence_transformers.json"
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,99}")  # a folder of a module
_MODES: Mapping[str, PoolingKind] = MappingProxyType({"mean": "mean", "lasttoken": "last"})
# llama.cpp's numbers; 0 says nothing.
_GGUF_MODES: Mapping[int, PoolingKind] = MappingProxyType({1: "mean", 3: "last"})
_OLD_MODES: Mapping[str, str] = MappingProxyType({"mean_tokens": "mean"})


@dataclass(frozen=True, slots=True)
class EmbeddingConfig:
    """What holds where a caller says nothing. Any decoder embeds; one that was trained for it has a way of its own."""

    pooling: PoolingKind = "mean"
    normalize: bool = True  # to length 1
    dimensions: int | None = None  # the first so many
    prompts: Mapping[str, str] = field(default_factory=dict)  # by name; one stands before a text
    default_prompt: str | None = None
    problem: str = ""  # why the author's way is not possible
    generates: bool = True  # False: the model was kept without its head

    def pooled(self, asked: PoolingKind | None) -> PoolingKind:
        """How a text is pooled; a caller's wish is served even where the author's is not."""
        if asked is not None:
            return asked
        if self.problem:
            raise Unsupported(f"{self.problem}; give pooling as mean or last if that is what you want")
        return self.pooling

    def prompt(self, name: str | None) -> str:
        """What stands before a text."""
        chosen = self.default_prompt if name is None else name
        if chosen is None:
            return ""
        if chosen not in self.prompts:
            known = ", ".join(sorted(self.prompts)) or "none"
            raise ParamError("prompt_name", f"there is no prompt {chosen[:64]!r}; the model has: {known}")
        return self.prompts[chosen]

    def check_generates(self) -> None:
        """Refuse to generate with a model that has no head."""
        if not self.generates:
            raise InputError("this model was kept without its head: it embeds texts and generates none")


def embedding_config(checkpoint: Checkpoint) -> EmbeddingConfig:
    """What a checkpoint says of embeddings."""
    if checkpoint.format is GGUF:
        return _from_gguf(checkpoint.config)
    folder = checkpoint.path if checkpoint.path.is_dir() else checkpoint.path.parent
    found = _from_modules(folder) if (folder / MODULES).is_file() else EmbeddingConfig()
    if (folder / PROMPTS).is_file():
        found = _with_prompts(found, read_object(folder / PROMPTS))
    return replace(found, generates=has_head(checkpoint))


def _from_gguf(metadata: Mapping[str, Any]) -> EmbeddingConfig:
    said = metadata.get(f"{metadata.get('general.architecture')}.pooling_type", 0)
    if said in _GGUF_MODES:
        return EmbeddingConfig(_GGUF_MODES[said])
    return EmbeddingConfig(problem=f"the file's pooling_type {said} is neither mean nor last" if said else "")


def _from_modules(folder: Path) -> EmbeddingConfig:
    """The modules that a text passes, one after the other."""
    found = EmbeddingConfig(normalize=False)
    for module in read_objects(folder / MODULES):
        kind = str(module.get("type", "")).rpartition(".")[2]
        match kind:
            case "Transformer":
                pass
            case "Pooling":
                found = _with_pooling(found, folder, module.get("path"))
            case "Normalize":
                found = replace(found, normalize=True)
            case _:
                found = replace(
                    found, problem=f"{MODULES} names the module {kind[:64]!r}, which kvilt does not compute"
                )
    return found


def _with_pooling(config: EmbeddingConfig, folder: Path, path: object) -> EmbeddingConfig:
    if not isinstance(path, str) or not _PLAIN.fullmatch(path):
        raise WeightError(MODULES, "the path of a module must be the name of a folder beside it")
    modes = _modes(read_object(folder / path / "config.json"))
    if len(modes) != 1 or modes[0] not in _MODES:
        return replace(config, problem=f"{path}/config.json pools by {' and '.join(modes) or 'nothing'}")
    return replace(config, pooling=_MODES[modes[0]])


def _modes(config: Mapping[str, Any]) -> list[str]:
    """The modes that are on, by the names that newer files have: `pooling_mode` is one of them, or a list."""
    said = config.get("pooling_mode")
    if said is not None:
        return [str(mode) for mode in (said if isinstance(said, list) else [said])]
    on = [name.removeprefix("pooling_mode_") for name, value in config.items() if value is True]
    return [_OLD_MODES.get(name, name) for name in on if f"pooling_mode_{name}" in config]


def _with_prompts(config: EmbeddingConfig, said: Mapping[str, Any]) -> EmbeddingConfig:
    prompts, default, dimensions = said.get("prompts") or {}, said.get("default_prompt_name"), said.get("truncate_dim")
    if not isinstance(prompts, dict) or not all(isinstance(text, str) for text in prompts.values()):
        raise WeightError(PROMPTS, "prompts must map names to texts")
    if default is not None and default not in prompts:
        raise WeightError(PROMPTS, f"default_prompt_name {default!r} is none of the prompts")
    if dimensions is not None and (type(dimensions) is not int or dimensions < 1):
        raise WeightError(PROMPTS, "truncate_dim must be a whole number above 0")
    return replace(config, prompts=prompts, default_prompt=default, dimensions=dimensions)
