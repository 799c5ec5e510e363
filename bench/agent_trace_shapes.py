"""The conversations of agents that bench/agent_traces.py plays: what each turn sends, given the answers so far.

 append    one agent: each turn adds the answer and a tool's result
 forks     an agent that tries several ways: every fourth turn opens a branch behind any earlier answer, up to 8 of
           them; each other turn goes on with any branch
 stripped  answers begin with reasoning. Four turns bring results of tools, and carry all that was said; the fifth is a
           question of the user, and leaves out the reasoning of all earlier answers, as chat templates and clients do

Results of tools have 25 words and questions 12, of about 3.5 tokens each, of no meaning; the system prompt has 120.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Message = dict[str, Any]
Ask = Callable[[list[Message], int], str]
WORDS = ("river", "stone", "window", "letter", "garden", "market", "bridge", "winter", "silver", "paper", "engine")
BRANCHES = 8
RESULT, QUESTION, SYSTEM = 25, 12, 120  # words


@dataclass(frozen=True)
class Turn:
    """One request of a trace."""

    special: bool = False  # it leaves the append-only path: opens or changes a branch, or leaves reasoning out


@dataclass(frozen=True)
class Shape:
    """How a trace is played, and the tokens of each of its answers."""

    play: Callable[[int, Ask, random.Random], list[Turn]]
    answer: int


def words(dice: random.Random, count: int) -> str:
    """Some words of no meaning, which no cache has seen."""
    return " ".join(f"{dice.choice(WORDS)}{dice.randrange(100)}" for _ in range(count))


def user(dice: random.Random, count: int) -> Message:
    return {"role": "user", "content": words(dice, count)}


def assistant(text: str) -> Message:
    return {"role": "assistant", "content": text}


def began(dice: random.Random) -> list[Message]:
    system = {"role": "system", "content": f"You are an agent with tools. {words(dice, SYSTEM)}"}
    return [system, user(dice, QUESTION)]


def append(turns: int, ask: Ask, dice: random.Random) -> list[Turn]:
    said = began(dice)
    for _ in range(turns):
        said = [*said, assistant(ask(said, 12)), user(dice, RESULT)]
    return [Turn()] * turns


def forks(turns: int, ask: Ask, dice: random.Random) -> list[Turn]:
    branches, answered, done, last = [began(dice)], list[list[Message]](), list[Turn](), 0
    for turn in range(turns):
        at = dice.randrange(len(branches))
        if turn % 4 == 3 and len(branches) < BRANCHES:
            at = len(branches)
            branches.append([*dice.choice(answered), user(dice, QUESTION)])
        answered.append([*branches[at], assistant(ask(branches[at], 12))])
        branches[at] = [*answered[-1], user(dice, RESULT)]
        done.append(Turn(special=at != last))
        last = at
    return done


def stripped(turns: int, ask: Ask, dice: random.Random) -> list[Turn]:
    said, done = began(dice), list[Turn]()
    for turn in range(turns):
        asks = turn % 5 == 0 and turn > 0
        if asks:
            said = [without_reasoning(one) for one in said]
        said = [*said, assistant(ask(said, 60))]
        done.append(Turn(special=asks))
        said.append(user(dice, QUESTION if turn % 5 == 4 else RESULT))
    return done


def without_reasoning(message: Message) -> Message:
    """The last quarter of an answer that was not cut yet; what stands before it is its reasoning."""
    if message["role"] != "assistant" or message.get("cut"):
        return message
    text = message["content"]
    return {**message, "content": text[len(text) * 3 // 4 :], "cut": True}


def played(name: str, turns: int, ask: Ask) -> list[Turn]:
    """All turns of a trace; the same dice for every client, so that prompts differ by answers only."""

    def plain(said: list[Message], tokens: int) -> str:
        return ask([{"role": one["role"], "content": one["content"]} for one in said], tokens)

    return TRACES[name].play(turns, plain, random.Random(7))


TRACES = {"append": Shape(append, 12), "forks": Shape(forks, 12), "stripped": Shape(stripped, 60)}
