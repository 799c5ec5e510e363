"""The model as Ollama's API describes it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

from ..service import Service

VERSION = "0.13.0"  # of Ollama, whose API this is: clients compare it
_NEVER = "9999-12-31T23:59:59Z"


def listed_models(service: Service) -> list[dict[str, Any]]:
    """The model under each of its names, and the loaded adapters."""
    adapters = [one.name for one in service.llm.executor.adapters.all()]
    return [_card(service, name) for name in (*service.config.names, *adapters)]


def loaded_models(service: Service) -> list[dict[str, Any]]:
    """The same: all of them are in memory, for as long as the server runs."""
    executor = service.llm.executor
    on_device = executor.weight_bytes if executor.pool.device.type != "cpu" else 0
    usage = executor.pool.usage()
    more = {
        "expires_at": _NEVER,
        "size_vram": on_device,
        "context_length": executor.max_context,
        # Not Ollama's: the KV of all keys, for `kvilt ps`.
        "kv_bytes": executor.pool.nbytes,
        "kv_used_bytes": usage.used_bytes,
        "requests": service.llm.engine.requests,
    }
    cards = listed_models(service)
    return [{name: value for name, value in card.items() if name != "modified_at"} | more for card in cards]


def shown_model(service: Service) -> dict[str, Any]:
    """Everything that is known of the model."""
    llm = service.llm
    spec, parser = llm.executor.spec, service.parser
    able = [
        ("completion", True),
        ("embedding", True),
        ("tools", bool(parser.calls.openings)),
        ("thinking", parser.thinking is not None),
    ]
    settings = llm.sampling_defaults.params
    named = ("temperature", "top_k", "top_p", "min_p")
    return {
        "modelfile": "",
        "parameters": "\n".join(f"{name} {getattr(settings, name)}" for name in named),
        "template": llm.tokenizer.chat_template or "",
        "details": _details(service),
        "model_info": {
            "general.architecture": spec.family,
            f"{spec.family}.context_length": llm.executor.max_context,
            f"{spec.family}.embedding_length": spec.hidden_size,
            f"{spec.family}.block_count": len(spec.layers),
        },
        "capabilities": [name for name, has in able if has],
        "modified_at": _time(service.created_s),
    }


def _card(service: Service, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "model": name,
        "modified_at": _time(service.created_s),
        "size": service.llm.executor.weight_bytes,
        "digest": service.fingerprint.removeprefix("fp_"),
        "details": _details(service),
    }


def _details(service: Service) -> dict[str, Any]:
    family = service.llm.executor.spec.family
    return {
        "parent_model": "",
        "format": "",
        "family": family,
        "families": [family],
        "parameter_size": "",
        "quantization_level": "",
    }


def _time(seconds: int) -> str:
    return datetime.fromtimestamp(seconds, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
