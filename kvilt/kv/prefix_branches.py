"""The known prefixes of a tenant as a tree of branches, for views of it. Reads nodes, and changes none."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from .pool import PagePool
from .prefix_keys import PrefixNode, tokens_of
from .row import GONE, Token


@dataclass(frozen=True, slots=True)
class PrefixRun:
    """Nodes one after the other, and their counts; their tokens do not change any more."""

    nodes: tuple[PrefixNode, ...]
    parent: str | None
    start: int
    pages: int
    hits: int
    caches: int


@dataclass(frozen=True, slots=True)
class PrefixRuns:
    """The runs of a tenant, parents before children, and how many continuations of them were left out."""

    runs: tuple[PrefixRun, ...]
    omitted: int = 0


@dataclass(frozen=True, slots=True)
class PrefixBranch:
    """Known pages one after the other, up to where they branch or end."""

    id: str
    parent: str | None  # the branch it continues
    adapter: str
    start: int  # where its first token stands
    tokens: tuple[Token, ...]
    pages: int  # of all groups
    hits: int  # sequences that found it
    caches: int  # that hold it now


def find_runs(roots: Iterable[PrefixNode], pool: PagePool, most: int | None) -> PrefixRuns:
    """The runs that begin with these nodes, `most` of them; the caller holds the pool's lock."""
    open_ends: deque[tuple[PrefixNode, str | None, int]] = deque((node, None, 0) for node in roots)
    found: list[PrefixRun] = []
    while open_ends and (most is None or len(found) < most):
        node, parent, start = open_ends.popleft()
        nodes = [node]
        while len(nodes[-1].children) == 1:
            nodes.extend(nodes[-1].children.values())
        found.append(_run(tuple(nodes), pool, parent, start))
        stop = start + len(nodes) * pool.layout.page_tokens
        open_ends.extend((child, _name(node), stop) for child in nodes[-1].children.values())
    return PrefixRuns(tuple(found), len(open_ends))


def branch_of(run: PrefixRun, page_tokens: int) -> PrefixBranch:
    """A run with its tokens; needs no lock."""
    first = run.nodes[0]
    tokens = tuple(tokens_of(run.nodes, page_tokens))
    return PrefixBranch(
        _name(first), run.parent, first.scope.adapter, run.start, tokens, run.pages, run.hits, run.caches
    )


def _run(nodes: tuple[PrefixNode, ...], pool: PagePool, parent: str | None, start: int) -> PrefixRun:
    first = [(group, page) for group, page in enumerate(nodes[0].pages) if page != GONE]
    return PrefixRun(
        nodes=nodes,
        parent=parent,
        start=start,
        pages=sum(page != GONE for node in nodes for page in node.pages),
        hits=nodes[0].hits,
        caches=max((pool.caches(group, page) for group, page in first), default=0),
    )


def _name(node: PrefixNode) -> str:
    """What the branch that begins with a node is called."""
    return node.key[:16].hex()
