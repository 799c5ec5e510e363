"""What notebooks draw: caches, completions and models as HTML, parsed and compared with what they stand for."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest

import kvilt
from kvilt import LLM, Completion, KVCache
from kvilt.kv.drawing import in_units
from kvilt.llm.completion import Timing, Usage
from kvilt.llm.tool_calls import ParsedToolCall

VOID = {"br", "img", "meta"}
EVIL = "<script>alert(1)</script>&\"'"


class Parsed(HTMLParser):
    """HTML as a list of elements, each with its attributes and its own text; tags must be balanced."""

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.elements: list[tuple[str, dict[str, str | None], list[str]]] = []
        self._open: list[tuple[str, dict[str, str | None], list[str]]] = []
        self.feed(html)
        self.close()
        assert not self._open, f"not closed: {[tag for tag, _, _ in self._open]}"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({name for name, _ in attrs}) == len(attrs)
        element = (tag, dict(attrs), [])
        self.elements.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open.pop()[0] == tag

    def handle_data(self, data: str) -> None:
        for _, _, texts in self._open:
            texts.append(data)

    def texts(self, kind: str) -> list[str]:
        """The texts of elements of a tag or a class."""
        return ["".join(texts) for tag, attrs, texts in self.elements if kind in (tag, *_classes(attrs))]

    def count(self, kind: str) -> int:
        return len(self.texts(kind))

    def titles(self, kind: str) -> list[str]:
        return [attrs.get("title") or "" for tag, attrs, _ in self.elements if kind in (tag, *_classes(attrs))]


def _classes(attrs: dict[str, str | None]) -> list[str]:
    return (attrs.get("class") or "").split()


def parsed(drawn: object) -> Parsed:
    html = drawn._repr_html_()  # type: ignore[attr-defined]
    for outside in ("<script", "http:", "https:", "url(", "@import", "<link", "<img"):
        assert outside not in html, "a drawing stands alone"
    return Parsed(html)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with kvilt.load(smollm2_path, kv_memory="64M", max_context=512, threads=1) as one:
        yield one


@pytest.fixture
def kv(llm: LLM) -> Iterator[KVCache]:
    with llm.prefill("The quick brown fox jumps over the lazy dog. " * 4) as one:
        yield one


def test_a_cache_draws_its_pages_and_tokens(llm: LLM, kv: KVCache) -> None:
    size = kv.layout.page_tokens
    drawn = parsed(kv)
    held = len(kv.pages()[0])
    assert held >= 2
    assert sum(drawn.count(kind) for kind in ("kvilt-own", "kvilt-kept", "kvilt-shared")) == held
    assert drawn.count("kvilt-shared") == 0
    (tokens,) = drawn.texts("kvilt-tokens")
    assert tokens.split() == [str(token) for token in kv.tokens()]
    titles = [title for title in drawn.titles("span") if title.startswith("position")]
    assert len(titles) == kv.lengths[0] and titles[3] == f"position 3, id {kv.tokens()[3]}, exact, base"
    assert f"tokens {size} to {2 * size - 1}" in "".join(drawn.titles("i"))
    (head, *_) = drawn.texts("kvilt-kv")
    assert f"{kv.lengths[0]} tokens" in head and "0 of them shared" in head


def test_a_fork_shares_pages_until_it_writes(llm: LLM, kv: KVCache) -> None:
    with kv.fork() as child:
        drawn = parsed(child)
        assert drawn.count("kvilt-shared") == len(kv.pages()[0]) and drawn.count("kvilt-own") == 0
        assert all("shared by 2 caches" in title for title in drawn.titles("kvilt-shared"))
        assert parsed(kv).count("kvilt-shared") == len(kv.pages()[0]), "of the parent, too"
        (line,) = drawn.texts("kvilt-lineage")
        assert line == f"fork at {kv.lengths[0]} → now {kv.lengths[0]} tokens"
        child.truncate(5)
        assert parsed(child).count("kvilt-shared") == 1
        assert parsed(child).texts("kvilt-lineage") == [f"fork at {kv.lengths[0]} → now 5 tokens"]


def test_lineage_names_the_last_verbs(llm: LLM, kv: KVCache) -> None:
    length = kv.lengths[0]
    with kv.fork() as one, one.deep_copy() as two, llm.executor.create_kv_cache() as three:
        assert two.lineage == (f"fork at {length}", f"deep copy at {length}")
        three.select_and_copy_from(two, 0)
        assert three.lineage[-1] == f"row 0 at {length}"
        three.load(kv.serialize())
        assert three.lineage == ("loaded",)
        assert kv.lineage == ()
    forks = [kv.fork()]
    for _ in range(20):
        forks.append(forks[-1].fork())
    assert len(forks[-1].lineage) == 8
    for fork in forks:
        fork.close()


def test_text_is_drawn_by_the_model_and_escaped(llm: LLM) -> None:
    with llm.prefill(EVIL) as kv:
        (tokens,) = parsed(llm.draw(kv)).texts("kvilt-tokens")
        assert tokens == EVIL
        assert all(part.isdecimal() for part in parsed(kv).texts("kvilt-tokens")[0].split()), "kv knows no text"


def test_a_long_cache_is_cut(llm: LLM) -> None:
    with llm.prefill("word " * 300) as kv:
        drawn = parsed(kv)
        assert drawn.count("kvilt-cut") == 1 and f"{kv.lengths[0] - 128} tokens" in drawn.texts("kvilt-cut")[0]
        assert len(kv._repr_html_()) < 40_000


def test_a_closed_cache_says_so(llm: LLM, kv: KVCache) -> None:
    fork = kv.fork()
    fork.close()
    assert "closed" in parsed(fork).texts("kvilt-kv")[0]


def test_a_completion_shows_its_usage(llm: LLM) -> None:
    llm.executor.prefixes.clear()
    prompt = "One two three four five six seven eight nine ten eleven twelve thirteen fourteen fifteen sixteen " * 2
    first = llm.generate(prompt, max_tokens=4, temperature=0)
    again = llm.generate(prompt, max_tokens=4, temperature=0)
    assert again.usage.prefix_hit > 0
    for done in (first, again):
        drawn = parsed(done)
        assert drawn.texts("kvilt-answer") == [done.text]
        cells = drawn.titles("kvilt-bar")  # the bar itself has none
        assert cells == [""]
        shares = [title for title in drawn.titles("i") if title]
        counts = [int(title.split()[0].replace(",", "")) for title in shares]
        assert sum(counts) == done.usage.prompt_tokens
        (lines,) = drawn.texts("table")
        assert f"{done.usage.cached_tokens} of them not computed" in lines and "ended by length" in lines
    assert any("prefix" in title for title in parsed(again).titles("i"))


def test_a_completion_is_escaped(llm: LLM) -> None:
    done = llm.generate("Hi", max_tokens=1)
    call = ParsedToolCall(name=EVIL, arguments=EVIL)
    evil = replace(done, text=EVIL, reasoning=EVIL, warnings=(EVIL,), tool_calls=(call,))
    drawn = Parsed(evil._repr_html_())
    assert drawn.texts("kvilt-answer") == [EVIL] and drawn.count("script") == 0
    assert EVIL in drawn.texts("details")[0]


def test_a_completion_without_times_is_drawn() -> None:
    done = Completion("", [], "stop", Usage(0, 0, 0), None, Timing(0.0, 0.0))
    assert parsed(done).texts("kvilt-answer") == [""]


def test_a_model_shows_what_it_is(llm: LLM, kv: KVCache) -> None:
    drawn = parsed(llm)
    (lines,) = drawn.texts("table")
    for part in ("llama, 30 layers of 576", "512 tokens", "cpu", "Q4_1"):
        assert part in lines
    used = next(title for title in drawn.titles("i") if "in use" in title)
    assert int(used.split()[0]) == llm.executor.pool.usage().used


def test_a_closed_model_says_so(smollm2_path: Path) -> None:
    llm = kvilt.load(smollm2_path, kv_memory="16M", max_context=128, threads=1)
    llm.close()
    assert "closed" in parsed(llm).texts("kvilt-llm")[0]


@pytest.mark.parametrize(("nbytes", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 << 40, "3.0 TiB")])
def test_sizes_have_units(nbytes: int, text: str) -> None:
    assert in_units(nbytes) == text
