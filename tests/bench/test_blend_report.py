"""`kvilt blend-report`: right cases, right comparisons, results that are gone on from, a curve, clear refusals."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from kvilt.bench.blend_curve import curve, series
from kvilt.bench.blend_measure import (
    FULL,
    REUSE,
    BlendCase,
    BlendMethod,
    BlendOutcome,
    blend_prompt_of,
    compare,
    f1,
    methods,
)
from kvilt.bench.blend_plot import plot
from kvilt.bench.blend_results import ReportLine, ReportSettings, lines, summaries, verdict
from kvilt.blend.chunk import ChunkCache
from kvilt.blend.recipe import Recipe
from kvilt.cli.blend_cases import read_cases, read_questions
from kvilt.cli.blend_report import BlendQuestions, ReportOutput, report
from kvilt.errors import InputError, ParamError, Unsupported
from kvilt.llm import LLM, load
from kvilt.store.store import Store
from kvilt.store.tier import Budget

TOWER = "The Eiffel Tower is 330 metres tall. It stands in Paris and was finished in 1889 for the world's fair."
PEAK = "Mount Everest is 8849 metres high. It was first climbed in 1953 by Edmund Hillary and Tenzing Norgay."
SETTING = ReportSettings("a model", 512)
CASE = BlendCase("How tall is the Eiffel Tower?", (PEAK, TOWER), ("330 metres",))


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with load(smollm2_path, threads=1, kv_memory="256M", max_context=512) as made:
        yield made


def write(path: Path, text: str) -> str:
    path.write_text(text)
    return str(path)


# Cases.


def test_questions_about_texts_have_an_order_of_their_own(tmp_path: Path) -> None:
    files = [write(tmp_path / f"{i}.txt", f"text {i}\n") for i in range(6)]
    asked = write(tmp_path / "q", "first?\n\n second?\nthird?\n")
    cases = read_cases(files, read_questions(asked), 4, seed=1)
    assert [case.question for case in cases] == ["first?", "second?", "third?"]
    assert all(len(set(case.documents)) == 4 for case in cases)
    assert len({case.documents for case in cases}) == 3
    assert cases == read_cases(files, read_questions(asked), 4, seed=1)
    assert read_cases(files, ["?"], 99, seed=0)[0].documents != ()


def test_json_brings_questions_documents_and_answers(tmp_path: Path) -> None:
    musique = {
        "question": "a?",
        "ctxs": [{"title": "T", "text": "one"}, {"title": "", "text": "two"}],
        "answers": ["x"],
    }
    plain = {"question": "b?", "documents": ["one", {"text": "two"}], "answer": "y"}
    bare = {"question": "c?", "documents": ["one"]}
    whole = write(tmp_path / "all.json", json.dumps([musique, plain]))
    by_line = write(tmp_path / "more.jsonl", json.dumps(bare) + "\n")
    assert read_cases([whole, by_line], [], 10, 0) == [
        BlendCase("a?", ("T\none", "two"), ("x",)),
        BlendCase("b?", ("one", "two"), ("y",)),
        BlendCase("c?", ("one",)),
    ]


@pytest.mark.parametrize(
    "entry", ["3", "{}", '{"question": 1, "documents": ["a"]}', '{"question": "a", "documents": []}', '["a"]']
)
def test_an_entry_that_is_no_case_is_named(tmp_path: Path, entry: str) -> None:
    path = write(tmp_path / "bad.json", f'[{{"question": "a?", "documents": ["b"]}}, {entry}]')
    with pytest.raises(InputError, match="entry 1"):
        read_cases([path], [], 10, 0)


def test_what_cannot_be_asked_is_refused(tmp_path: Path) -> None:
    text, empty = write(tmp_path / "a.txt", "text"), write(tmp_path / "b.txt", " \n")
    binary = tmp_path / "c.txt"
    binary.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ParamError, match="question"):
        read_cases([text], [], 10, 0)
    with pytest.raises(ParamError, match="files"):
        read_cases([], ["?"], 10, 0)
    with pytest.raises(InputError, match="empty"):
        read_cases([empty], ["?"], 10, 0)
    with pytest.raises(InputError, match="UTF-8"):
        read_cases([str(binary)], ["?"], 10, 0)
    with pytest.raises(InputError, match="not JSON"):
        read_cases([write(tmp_path / "d.json", "{")], [], 10, 0)
    with pytest.raises(ParamError, match="limit"):
        BlendQuestions([text], ["?"], None, 1, 0, 0, None).cases()


# Measuring.


def test_all_ways_are_compared_with_the_whole_prefill(llm: LLM) -> None:
    wanted = methods(["head", "query"], [0.5, 1.0])
    with Store(Budget(1 << 28)) as store:
        found = list(compare(llm, ChunkCache(llm.executor, store, llm.tokenizer.head), CASE, 512, wanted))
    by_name = {one.method: one for one in found}
    assert list(by_name) == ["full", "prefix", "reuse", "head 50%", "head 100%", "query 50%", "query 100%"]
    for name in ("full", "prefix", "head 100%", "query 100%"):  # exact ones
        assert by_name[name].kl == pytest.approx(0, abs=1e-6)
        assert by_name[name].agreement == 1
        assert by_name[name].text == by_name["full"].text
        assert by_name[name].nll == pytest.approx(by_name["full"].nll)
    assert by_name["reuse"].kl > by_name["query 50%"].kl > 1e-4
    assert by_name["reuse"].recomputed == 0
    assert by_name["query 50%"].recomputed == by_name["query 50%"].reused // 2


def test_documents_are_cut_until_they_fit(llm: LLM) -> None:
    long = BlendCase("Why?", (TOWER * 40, PEAK * 40))
    blend_prompt = blend_prompt_of(llm, long, 300)
    assert len(blend_prompt.ids) < 300
    assert len({len(span) for span in blend_prompt.documents}) == 1
    with pytest.raises(InputError, match="do not fit"):
        blend_prompt_of(llm, long, 40)


def test_f1_counts_words() -> None:
    assert f1("The tower, is 330 metres.", ["330 metres", "no"]) == pytest.approx(2 * 2 / (4 + 2))
    assert f1("nothing", ["330 metres"]) == 0


# Results.


def outcome(method: str, first_token_s: float, kl: float, recomputed: int = 0) -> BlendOutcome:
    return BlendOutcome(method, first_token_s, 120, 100, recomputed, kl, 0.5, "text")


def test_means_are_over_questions_that_both_have() -> None:
    found = summaries(
        [
            ReportLine("0", outcome("full", 8.0, 0.0)),
            ReportLine("1", outcome("full", 9.0, 0.0)),
            ReportLine("0", outcome("reuse", 1.0, 0.4)),
            ReportLine("0", outcome("head 15%", 2.0, 0.1, 15)),
            ReportLine("1", outcome("head 15%", 3.0, 0.3, 15)),
        ]
    )
    full, reuse, head = found
    assert (full.faster, full.kl_of_reuse, full.nll) == (1.0, 0.0, None)
    assert reuse.kl_of_reuse == 1
    assert (head.faster, head.recomputed, head.questions) == (3.5, 0.15, 2)
    assert head.kl == pytest.approx(0.2)
    assert head.kl_of_reuse == pytest.approx(0.25)


def test_the_verdict_is_the_fastest_method_that_is_safe() -> None:
    measured = [("full", 8.0, 0.0), ("reuse", 0.1, 0.5), ("head 15%", 1.0, 0.2), ("query 15%", 2.0, 0.03)]
    found = summaries([ReportLine("0", outcome(*one, recomputed=15)) for one in [*measured, ("query 30%", 4.0, 0.01)]])
    assert found[0].recomputed == 1.0, "a whole prefill computes everything"
    assert verdict(found).startswith("query 15% is safe for these documents: 4.0x sooner")
    assert verdict(found[:3]).startswith("nothing here is safe (KL above 0.1); the nearest is head 15%")
    assert "--strategies" in verdict(found[:2])


def test_the_verdict_claims_no_gain_where_there_is_none() -> None:
    measured = [("full", 1.0, 0.0), ("query 15%", 3.0, 0.03)]
    found = summaries([ReportLine("0", outcome(*one, recomputed=15)) for one in measured])
    assert "safe for these documents and not faster" in verdict(found)


def test_a_report_goes_on_where_it_ended(llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = str(tmp_path / "out.jsonl")
    first = lines(llm, [CASE], [FULL, REUSE], SETTING, out)
    again = lines(llm, [CASE], [FULL, REUSE], SETTING, out)
    assert again == first
    more = lines(llm, [CASE], methods(["head"], [0.5]), SETTING, out)
    assert [line.outcome.method for line in more] == ["full", "reuse", "prefix", "head 50%"]
    assert more[:2] == first
    with pytest.raises(InputError, match="int8"):
        lines(llm, [CASE], [FULL], ReportSettings("a model", 512, "int8"), out)
    Path(out).write_text("no report\n")
    with pytest.raises(InputError, match="line 1"):
        lines(llm, [CASE], [FULL], SETTING, out)


@pytest.mark.slow
def test_documents_can_go_through_a_codec(llm: LLM) -> None:
    def reuse(codec: str) -> BlendOutcome:
        return lines(llm, [CASE], [REUSE], ReportSettings("a model", 512, codec), None)[0].outcome

    assert reuse("zstd").kl == reuse("raw").kl
    assert reuse("int8").kl != reuse("raw").kl
    with pytest.raises(ParamError, match="codec"):
        BlendQuestions(["x"], ["?"], None, 1, 0, None, None, "mp3").cases()


def test_the_command_tells_it_as_a_table_and_as_json(
    smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    files = [write(tmp_path / "a.txt", TOWER), write(tmp_path / "b.txt", PEAK)]
    asked = BlendQuestions(files, [CASE.question], None, 2, 0, None, 256)
    out = str(tmp_path / "out.jsonl")
    config = {"threads": 1, "kv_memory": "128M"}
    report(asked, str(smollm2_path), ["head"], [30], ReportOutput(out, True, None), config)
    told = json.loads(capsys.readouterr().out)
    assert [one["method"] for one in told] == ["full", "prefix", "reuse", "head 30%"]
    report(asked, str(smollm2_path), ["head"], [30], ReportOutput(out, False, None), config)
    text = capsys.readouterr().out
    assert "| head 30%" in text
    assert "KL of the first token" in text


# Drawing.

POINTS = [
    ("full", 0.0, 0.0),
    ("reuse", 0.0, 0.4),
    ("query 15%", 0.15, 0.1),
    ("query 5%", 0.05, 0.2),
    ("head 15%", 0.15, 0.3),
]


def test_curves_begin_at_plain_reuse_and_go_by_share() -> None:
    assert series(POINTS) == {"query": [(0.0, 0.4), (0.05, 0.2), (0.15, 0.1)], "head": [(0.0, 0.4), (0.15, 0.3)]}
    drawn = curve(POINTS).splitlines()
    assert "A query  B head" in drawn[0]
    assert "│*" in drawn[1]  # the top is plain reuse
    assert drawn[-1].endswith("15% recomputed")
    low = next(row for row in drawn if row.lstrip().startswith("0.114"))
    assert low.endswith("A")
    assert curve([("full", 0.0, 0.0)]) == ""
    assert curve([("reuse", 0.0, 0.0), ("head 100%", 1.0, 0.0)])  # nothing is wrong anywhere


def test_the_curve_as_a_picture(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot(POINTS, "a title", str(tmp_path / "curve.svg"))
    assert "<svg" in (tmp_path / "curve.svg").read_text()
    with pytest.raises(Unsupported, match="nonsense"):
        plot(POINTS, "a title", str(tmp_path / "curve.nonsense"))


RIVER = "The Nile is 6650 kilometres long. It flows north through eleven countries and ends in the Mediterranean Sea."
WALL = "The Great Wall of China is 21196 kilometres long. Most of what stands today was built by the Ming, of brick."
LAKE = "Lake Baikal is 1642 metres deep. It holds a fifth of the world's fresh water, and seals live in it all year."
PLAIN = "The Amazon forest is the size of Australia. It rains there on two of three days, half of it its own."


@pytest.mark.slow
def test_tokens_that_follow_are_less_wrong(llm: LLM) -> None:
    """The whole point of mending, on real weights: nearer to the whole prefill with the same tokens computed."""
    texts = [" ".join(each) for each in ((PEAK, RIVER, WALL, LAKE, PLAIN), (LAKE, WALL, TOWER, PLAIN, PEAK, RIVER))]
    cases = [
        BlendCase(one, tuple(texts), ()) for one in ("How tall is the tower?", "Where does the Nile end?", "How deep?")
    ]
    wanted = [BlendMethod(f"mend {share}", Recipe(0.2, "query", repair=share, min_gain=0.0)) for share in (0.0, 0.8)]
    kl: dict[str, float] = {}
    for case in cases:
        with Store(Budget(1 << 28)) as store:
            for found in compare(llm, ChunkCache(llm.executor, store), case, 512, wanted):
                kl[found.method] = kl.get(found.method, 0.0) + found.kl
    assert kl["mend 0.8"] < 0.8 * kl["mend 0.0"]
