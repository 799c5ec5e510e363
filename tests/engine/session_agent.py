"""A client with sessions that does anything: the events of property tests, and answers compared with a cold run."""

from __future__ import annotations

from hypothesis import strategies as st
from session_world import World

from kvilt.engine.sessions.session import SessionInfo

TEXT = [i * 7 % 61 for i in range(300)]

EVENTS = st.one_of(
    st.tuples(st.just("turn"), st.integers(0, 5), st.integers(1, 40)),
    st.tuples(st.just("edit"), st.integers(0, 200), st.integers(0, 60)),
    st.tuples(st.just("strip"), st.integers(0, 200), st.integers(1, 30)),
    st.tuples(st.just("branch"), st.integers(0, 5), st.integers(0, 60)),
    st.tuples(st.just("fork"), st.integers(0, 5), st.integers(0, 3)),
    st.tuples(st.just("delete"), st.integers(0, 3), st.just(0)),
    st.tuples(st.just("wait"), st.integers(1, 80), st.just(0)),
    st.tuples(st.just("evict"), st.integers(1, 3), st.just(0)),
    st.tuples(st.just("restart"), st.integers(0, 1), st.just(0)),
)


class Agent:
    """Does what a client does with its sessions, and checks every answer against a cold run."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.prompt = TEXT[:40]
        self.prompts = [self.prompt]
        self.names = ["s0"]
        self.said: dict[tuple[int, ...], list[int]] = {}

    def act(self, kind: str, one: int, two: int) -> None:
        match kind:
            case "turn":
                self.prompt = [*self.prompt, *TEXT[one * 20 : one * 20 + two]]
            case "edit":
                at = one % len(self.prompt)
                self.prompt = [*self.prompt[:at], two, *self.prompt[at + 1 :]]
            case "strip":
                at = one % len(self.prompt)
                self.prompt = [*self.prompt[:at], *self.prompt[at + two :]] or [two]
            case "branch":
                self.prompt = [*self.prompts[one % len(self.prompts)], two]
            case "fork":
                self.fork(f"s{two}")
            case "delete":
                self.forget(self.names[one % len(self.names)])
            case "wait":
                self.world.now += one
            case "evict":
                for _ in range(one):
                    self.world.handles.evict_one(True)
            case "restart":
                self.restart(with_file=bool(one))
        self.ask()

    def ask(self) -> None:
        self.prompt = self.prompt[:200]
        key = tuple(self.prompt)
        if key not in self.said:
            self.said[key] = self.world.cold(self.prompt)
        said = self.world.ask(self.prompt, self.names[-1])
        assert said.tokens == self.said[key]
        assert said.computed + said.reused == len(self.prompt)
        self.prompts.append(self.prompt)
        self.prompt = [*self.prompt, *said.tokens[:2]]

    def fork(self, name: str) -> None:
        if name not in self.names and any(info.name == self.names[-1] for info in self.world.sessions.owned("")):
            self.world.sessions.fork("", self.names[-1], name)
            self.names.append(name)

    def forget(self, name: str) -> None:
        if any(info.name == name for info in self.world.sessions.owned("")):
            self.world.sessions.delete("", name)

    def restart(self, with_file: bool) -> None:
        before = self.world.sessions.owned("")
        names = [info.name for info in before]
        data = self.world.exchange.export("", names[0]) if with_file and names else None
        self.world.restart()
        after = self.world.sessions.owned("")
        assert sorted(map(trees, after)) == sorted(map(trees, before if self.world.folder is not None else []))
        if data is not None:
            self.world.exchange.load("", data)


def trees(info: SessionInfo) -> tuple[str, list[tuple[object, ...]]]:
    """What a session keeps across a restart."""
    return info.name, [(turn.id, turn.parent, turn.shared_tokens, turn.tokens, turn.origin) for turn in info.turns]
