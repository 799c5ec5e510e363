"""Settings of commands from files and the environment, with one precedence, and `kvilt config`, which shows them.

A flag goes before the environment, that before `kvilt.toml` in the current folder, that before the user's own, and that
before the default. Values become the defaults of click, which checks them as it checks flags.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ..config import config_files, env_settings
from ..errors import ParamError

# Types of click, which typer brings with it under names that differ between releases.
CommandTree = Any
CommandOption = Any
ENVIRONMENT, DEFAULT = "environment", "default"
_SECRET = frozenset({"api_key", "admin_key", "store_redis"})
_NO_SETTINGS = frozenset({"help", "version", "install_completion", "show_completion"})


@dataclass(frozen=True, slots=True)
class Setting:
    """One option of one command."""

    command: str
    name: str
    value: Any
    source: str


@dataclass(frozen=True, slots=True)
class SettingsLayer:
    """The settings of one source: for all commands that know them, and for single commands."""

    source: str
    common: Mapping[str, Any]
    by_command: Mapping[str, Mapping[str, Any]]

    def of(self, command: str) -> dict[str, Any]:
        """What it says for a command; its own table goes before the common part."""
        return {**self.common, **self.by_command.get(command, {})}


def commands_of(root: CommandTree) -> dict[str, list[CommandOption]]:
    """Every command with its options, under its name: serve, or cluster up."""
    return dict(_walk(root, ()))


def _walk(group: CommandTree, path: tuple[str, ...]) -> Iterator[tuple[str, list[CommandOption]]]:
    for name, command in group.commands.items():
        options = [one for one in command.params if one.param_type_name == "option" and one.name not in _NO_SETTINGS]
        if options:
            yield " ".join((*path, name)), options
        if hasattr(command, "commands"):
            yield from _walk(command, (*path, name))


def read_layers(commands: Mapping[str, list[CommandOption]]) -> list[SettingsLayer]:
    """All sources, the weakest first."""
    files = [_file_layer(path, commands) for path in config_files() if path.is_file()]
    names = {option.name or "" for options in commands.values() for option in options}
    return [*files, SettingsLayer(ENVIRONMENT, env_settings(sorted(names)), {})]


def default_map(root: CommandTree) -> dict[str, Any]:
    """What stands in place of the defaults of options, as click takes it: nested by command."""
    commands, made = commands_of(root), dict[str, Any]()
    layers = read_layers(commands)
    for command, options in commands.items():
        into = made
        for part in command.split():
            into = into.setdefault(part, {})
        for option in options:
            value, _source = _resolve(command, option, layers)
            if value is not None:
                into[option.name or ""] = value
    return made


def settings(root: CommandTree) -> list[Setting]:
    """Every option of every command: its value without flags, and where that comes from."""
    commands = commands_of(root)
    layers = read_layers(commands)
    found = []
    for command, options in commands.items():
        for option in options:
            value, source = _resolve(command, option, layers)
            shown = _plain_default(option) if source == DEFAULT else value
            if option.name in _SECRET and source != DEFAULT:
                shown = "(set)"
            found.append(Setting(command, option.name or "", shown, source))
    return found


def _resolve(command: str, option: CommandOption, layers: list[SettingsLayer]) -> tuple[Any, str]:
    for layer in reversed(layers):
        given = layer.of(command)
        if option.name in given:
            return _for_option(option, given[option.name], layer.source), layer.source
    return None, DEFAULT


def _for_option(option: CommandOption, value: Any, source: str) -> Any:
    """A value as click takes it: an option that may be repeated takes a list, in the environment with commas."""
    if not option.multiple or value is None:
        return value
    if isinstance(value, str):
        return [part for each in value.split(",") if (part := each.strip())] if source == ENVIRONMENT else [value]
    return value if isinstance(value, list) else [value]


def _plain_default(option: CommandOption) -> Any:
    default = option.default
    if default is None or isinstance(default, str | int | float | bool):
        return default
    return list(default) if isinstance(default, list | tuple) else None


def _file_layer(path: Path, commands: Mapping[str, list[CommandOption]]) -> SettingsLayer:
    try:
        content = tomllib.loads(path.read_text("utf-8"))
    except (OSError, ValueError) as error:
        raise ParamError(str(path), f"cannot be read: {error}") from None
    known = {option.name or "" for options in commands.values() for option in options}
    common, by_command = dict[str, Any](), dict[str, dict[str, Any]]()
    for key, value in content.items():
        if isinstance(value, dict):
            _read_table(path, key, value, commands, by_command)
        else:
            common[_known_name(path, key, known, "")] = value
    return SettingsLayer(str(path), common, by_command)


def _read_table(
    path: Path,
    command: str,
    table: Mapping[str, Any],
    commands: Mapping[str, list[CommandOption]],
    into: dict[str, dict[str, Any]],
) -> None:
    """The table of a command, and those of its subcommands inside."""
    if not any(each == command or each.startswith(f"{command} ") for each in commands):
        raise ParamError(str(path), f"[{command}] is no command; the commands are {', '.join(commands)}")
    known = {option.name or "" for option in commands.get(command, ())}
    own = into.setdefault(command, {})
    for key, value in table.items():
        if isinstance(value, dict):
            _read_table(path, f"{command} {key}", value, commands, into)
        else:
            own[_known_name(path, key, known, f"[{command}] ")] = value


def _known_name(path: Path, key: str, known: set[str], where: str) -> str:
    name = key.replace("-", "_")
    if name not in known:
        raise ParamError(str(path), f"{where}{key} is no setting; `kvilt config` lists them")
    return name


def show_settings(root: CommandTree, command: str | None, changed: bool, as_json: bool) -> None:
    """Print every setting with its value and where it came from."""
    from rich.text import Text

    from .models import plain_table, print_table

    found = settings(root)
    names = dict.fromkeys(one.command for one in found)
    if command is not None and command not in names:
        raise ParamError("command", f"{command!r} has no settings; those that have are {', '.join(names)}")
    chosen = [
        one for one in found if command in (None, one.command) and not (changed and one.source == DEFAULT)
    ]  # fmt: skip
    if as_json:
        print(json.dumps([asdict(one) for one in chosen], default=str))
        return
    table = plain_table("setting", "value", "from", "commands")
    for (name, value, source), where in _grouped(chosen).items():
        table.add_row(name, Text(value), Text(source), Text(", ".join(where)))
    print_table(table)


def _grouped(chosen: list[Setting]) -> dict[tuple[str, str, str], list[str]]:
    """Commands by setting, value and source: one line for those that agree."""
    lines: dict[tuple[str, str, str], list[str]] = {}
    for one in sorted(chosen, key=lambda setting: setting.name):
        value = "" if one.value is None else json.dumps(one.value, default=str)
        lines.setdefault((one.name, value, one.source), []).append(one.command)
    return lines
