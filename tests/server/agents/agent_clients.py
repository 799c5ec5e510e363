"""Agents' clients from npm: how each is set up for a kvilt server, and the edit that the model makes through it.

`docs/agents.md` has the same settings for users.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from absent import skip_without
from scripted_server import Script, steps, tool_call

PACKAGES = Path(__file__).with_name("package.json")  # exact versions
TASK = "Change hello to goodbye in greeting.py"
BEFORE, AFTER = 'print("hello")\n', 'print("goodbye")\n'
PATCH = '*** Begin Patch\n*** Update File: greeting.py\n@@\n-print("hello")\n+print("goodbye")\n*** End Patch\n'
DONE = "The file says goodbye."
CLOSED = "http://127.0.0.1:9"  # the proxy of every other address: clients reach the server and nothing else


@dataclass(frozen=True)
class Workspace:
    """Where a client runs."""

    work: Path  # with the file to edit
    home: Path  # its settings

    @property
    def file(self) -> Path:
        return self.work / "greeting.py"


@dataclass(frozen=True)
class Launch:
    """How a client is started."""

    arguments: tuple[str, ...]
    environment: dict[str, str]


@dataclass(frozen=True)
class Agent:
    """A client with its settings."""

    name: str
    program: str
    launch: Callable[[Workspace, str], Launch]  # for the server with this address
    script: Callable[[str], Script]  # for the file with this path
    aliases: tuple[tuple[str, str], ...] = ()


def _claude(place: Workspace, url: str) -> Launch:
    environment = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "sk-any",
        "ANTHROPIC_MODEL": "tiny",
        "CLAUDE_CODE_MAX_CONTEXT_TOKENS": "32768",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "4096",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    return Launch(("-p", TASK, "--allowedTools", "Read,Edit,ToolSearch"), environment)


def _codex(place: Workspace, url: str, model: str = "tiny") -> Launch:
    settings = f"""
model = "{model}"
model_provider = "kvilt"
model_context_window = 32768

[model_providers.kvilt]
name = "kvilt"
base_url = "{url}/v1"
wire_api = "responses"
env_key = "KVILT_API_KEY"
"""
    (place.home / "config.toml").write_text(settings)
    arguments = ("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox", TASK)
    return Launch(arguments, {"CODEX_HOME": str(place.home), "KVILT_API_KEY": "sk-any"})


def _opencode(place: Workspace, url: str) -> Launch:
    options = {"baseURL": f"{url}/v1", "apiKey": "sk-any"}
    models = {"tiny": {"tool_call": True, "limit": {"context": 131072, "output": 8192}}}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "kvilt", "options": options, "models": models}
    settings = {"model": "kvilt/tiny", "autoupdate": False, "share": "disabled", "provider": {"kvilt": provider}}
    (place.work / "opencode.json").write_text(json.dumps(settings))
    environment = {"OPENCODE_DISABLE_MODELS_FETCH": "1", "OPENCODE_DISABLE_LSP_DOWNLOAD": "1"}
    return Launch(("run", TASK), environment)


def _edit_after_search(path: str) -> Script:
    """Claude Code asks for tools that it left out, and reads a file before it edits it."""
    edit = tool_call("Edit", file_path=path, old_string='"hello"', new_string='"goodbye"')
    return steps(
        tool_call("ToolSearch", query="select:WebFetch"),
        tool_call("Read", file_path=path),
        edit,
        "The file says goodbye.",
    )


def _edit(path: str) -> Script:
    edit = tool_call("edit", filePath=path, oldString='"hello"', newString='"goodbye"')
    return steps(tool_call("read", filePath=path), edit, DONE)


def _in_shell(path: str) -> Script:
    return steps(tool_call("exec_command", cmd=f"apply_patch <<'EOF'\n{PATCH}EOF\n"), DONE)


def _patch_after_search(path: str) -> Script:
    search = tool_call("tool_search", query="spawn agent")
    return steps(search, tool_call("apply_patch", input=PATCH), DONE)


def _in_namespace(path: str) -> Script:
    code = f"text(await tools.apply_patch({json.dumps(PATCH)}))"
    return steps(tool_call("functions.exec", input=code), DONE)


GPT = (("gpt-*", "tiny"),)
# Codex sends other tools for models that it knows.
AGENTS = {
    agent.name: agent
    for agent in (
        Agent("claude_code", "claude", _claude, _edit_after_search),
        Agent("codex", "codex", _codex, _in_shell),
        Agent("codex_search", "codex", lambda place, url: _codex(place, url, "gpt-5.5"), _patch_after_search, GPT),
        Agent("codex_namespace", "codex", lambda place, url: _codex(place, url, "gpt-6.1-sol"), _in_namespace, GPT),
        Agent("opencode", "opencode", _opencode, _edit),
    )
}


def installed() -> Path:
    """The folder with the programs, installed once for these versions. Workers of one run wait for each other."""
    if shutil.which("npm") is None:
        skip_without("npm")
    digest = hashlib.sha256(PACKAGES.read_bytes()).hexdigest()[:16]
    folder = Path("~/.cache/kvilt-tests").expanduser() / f"agents-{digest}"
    folder.mkdir(parents=True, exist_ok=True)
    done = folder / "installed"
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not done.exists():
            shutil.copy(PACKAGES, folder)
            command = ["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder)]
            if subprocess.run(command, cwd=folder, capture_output=True).returncode:
                skip_without("npm packages")
            done.touch()
    return folder / "node_modules" / ".bin"


def run_agent(agent: Agent, place: Workspace, url: str) -> subprocess.CompletedProcess[str]:
    """Let a client do its task."""
    place.file.write_text(BEFORE)
    launch = agent.launch(place, url)
    proxies = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"), CLOSED)
    environment = {"PATH": os.environ["PATH"], "HOME": str(place.home), "NO_PROXY": "127.0.0.1", **proxies}
    return subprocess.run(
        [str(installed() / agent.program), *launch.arguments],
        cwd=place.work,
        env={**environment, **launch.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
