"""Variables of a chat template as the command line gives them: NAME=VALUE."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from ..errors import ParamError


def read_template_options(given: Sequence[str]) -> dict[str, Any]:
    """The variables by name; a value that is JSON is what it stands for, any other is a text."""
    found: dict[str, Any] = {}
    for option in given:
        name, equals, value = option.partition("=")
        if not equals or not name.isidentifier():
            raise ParamError("template_option", f"{option[:64]!r} is not NAME=VALUE, like enable_thinking=false")
        if name in found:
            raise ParamError("template_option", f"{name!r} is given twice")
        found[name] = _value(value)
    return found


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text
