"""Models as Anthropic's API lists them."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from ..service import Service


def anthropic_models(service: Service, cards: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All models; `cards` are the same models as OpenAI's API lists them."""
    data = [anthropic_model(service, card) for card in cards]
    names = [one["id"] for one in data]
    return {"data": data, "has_more": False, "first_id": names[0], "last_id": names[-1]}


def anthropic_model(service: Service, card: dict[str, Any]) -> dict[str, Any]:
    """One model."""
    context = service.llm.executor.max_context
    created = datetime.fromtimestamp(card["created"], UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "created_at": created,
        "lifecycle": "active",
        "max_input_tokens": context,
        "max_tokens": context,
    }
