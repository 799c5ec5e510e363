"""Lists of models in the formats of three APIs, also of models that are not loaded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from .model_process import RoutedModel


def merged_list(
    path: str, models: Sequence[RoutedModel], lists: Mapping[str, Any], created_s: int, for_anthropic: bool
) -> dict[str, Any]:
    """One list of all models, in the order of the command line; `lists` are those of loaded ones by name.

    /api/ps lists only what is loaded.
    """
    key = "data" if path == "/v1/models" else "models"
    cards: list[dict[str, Any]] = []
    for model in models:
        if model.name in lists:
            cards += [_as_loaded(path, card, for_anthropic) for card in lists[model.name][key]]
        elif path != "/api/ps":
            cards += [{**list_entry(path, model, created_s, for_anthropic), _ID[path]: name} for name in model.names]
    if path != "/v1/models":
        return {"models": cards}
    if for_anthropic:
        return {"data": cards, "has_more": False, "first_id": cards[0]["id"], "last_id": cards[-1]["id"]}
    return {"object": "list", "data": cards}


_ID = {"/v1/models": "id", "/api/tags": "name"}


def _as_loaded(path: str, card: dict[str, Any], for_anthropic: bool) -> dict[str, Any]:
    return {**card, "loaded": True} if path == "/v1/models" and not for_anthropic else card


def list_entry(path: str, model: RoutedModel, created_s: int, for_anthropic: bool) -> dict[str, Any]:
    """A model that is not loaded."""
    if path == "/api/tags":
        return {"name": model.name, "model": model.name, "modified_at": _time(created_s), "size": model.file_bytes}
    if for_anthropic:
        shown = {"id": model.name, "display_name": model.name, "created_at": _time(created_s), "lifecycle": "active"}
        return {"type": "model", **shown, "max_input_tokens": model.context, "max_tokens": model.context}
    return {
        "id": model.name,
        "object": "model",
        "created": created_s,
        "owned_by": "kvilt",
        "root": model.name,
        "parent": None,
        "max_model_len": model.context,
        "sampling_defaults": dict(model.sampling_defaults),
        "loaded": False,
    }


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
