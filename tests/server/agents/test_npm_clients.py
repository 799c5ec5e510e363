"""Agents' clients from npm edit a file through a real server, with no other network."""

from __future__ import annotations

from pathlib import Path

import pytest
import recorded
from agent_clients import AFTER, AGENTS, DONE, Workspace, run_agent
from scripted_server import scripted

from kvilt.executor.protocol import Executor
from kvilt.text.tokenizer import Tokenizer

pytestmark = [pytest.mark.slow, pytest.mark.needs("npm")]


@pytest.mark.parametrize("name", AGENTS)
def test_a_client_edits_a_file(
    name: str, roomy: Executor, tokenizer: Tokenizer, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    agent = AGENTS[name]
    place = Workspace(tmp_path / "work", tmp_path / "home")
    place.work.mkdir()
    place.home.mkdir()
    with scripted(roomy, tokenizer, agent.script(str(place.file)), aliases=agent.aliases) as running:
        done = run_agent(agent, place, running.server.url)
        requests = list(running.received)
    told = f"{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    assert done.returncode == 0, told
    assert place.file.read_text() == AFTER, told
    assert DONE in done.stdout
    assert [(one.path, one.status) for one in requests if one.status != 200] == []
    if request.config.getoption("--record-agents"):
        recorded.write(name, requests, place)
