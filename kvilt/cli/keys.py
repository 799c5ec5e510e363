"""Keys of servers and of their clients: from options, files and the environment."""

from __future__ import annotations

import re
from pathlib import Path

from ..config import env_admin_key, env_api_keys
from ..errors import ParamError

_KEY_LINE = re.compile(r"(?P<key>\S+)(?:\s+weight=(?P<weight>[0-9]{1,4}(?:\.[0-9]{1,3})?))?")


def admin_key(given: str | None, path: str | None) -> str | None:
    """The admin key, from the option, a file or the environment; more than one is refused."""
    found = [key for key in (given, *read_keys(path, "admin_key_file"), env_admin_key()) if key is not None]
    if len(set(found)) > 1:
        raise ParamError("admin_key", f"is given {len(set(found))} times; there is one")
    return found[0] if found else None


def client_key(given: str | None, path: str | None) -> str | None:
    """The key that a client sends: the option's, else the first of a file, else the first of KVILT_API_KEY."""
    found = [*([given] if given is not None else []), *read_keys(path), *env_api_keys()]
    return found[0] if found else None


def read_keys(path: str | None, option: str = "api_key_file") -> list[str]:
    """The keys of a file, at least one."""
    return list(weighted_keys(path, option))


def weighted_keys(path: str | None, option: str = "api_key_file") -> dict[str, float]:
    """The keys of a file and their weights, at least one key. A line is KEY, or KEY weight=NUMBER.

    Empty lines and lines that start with # are skipped.
    """
    if path is None:
        return {}
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError) as error:
        raise ParamError(option, f"{path!r} cannot be read: {error}") from None
    found = [_KEY_LINE.fullmatch(line) for each in lines if (line := each.strip()) and not line.startswith("#")]
    if not found:
        raise ParamError(option, f"{path!r} holds no key; write one on a line, or leave the option out")
    keys = {one["key"]: float(one["weight"] or 1.0) for one in found if one is not None}
    if None in found:
        raise ParamError(
            option,
            f"{path!r} has a line with blanks in it; a key is a whole line, and so is a comment, "
            "and only weight=NUMBER may stand behind a key",
        )
    return keys
