"""`kvilt bench serve` against a scripted server: what is asked and how many at once, and numbers from given times."""

from __future__ import annotations

import asyncio
import builtins
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from fake_openai import Answer, FakeOpenAI, serving
from typer.testing import CliRunner

from kvilt.bench.serve import LoadRun, ServerUnusable, measure
from kvilt.bench.serve_client import RequestTrace, ServerTarget, send_request
from kvilt.bench.serve_load import LoadPlan, arrival_times, conversations
from kvilt.bench.serve_stats import SLO, Percentiles, is_good, spread, summary
from kvilt.cli.app import app
from kvilt.cli.bench_serve import _lines
from kvilt.errors import ParamError


def measured(fake: FakeOpenAI, plan: LoadPlan, chat: bool = True, model: str | None = None) -> LoadRun:
    async def go() -> LoadRun:
        async with serving(fake):
            return await measure(ServerTarget(fake.url, chat), plan, model, lambda *_: None)

    return asyncio.run(go())


def asked(fake: FakeOpenAI, body: dict[str, Any], **options: Any) -> RequestTrace:
    async def go() -> RequestTrace:
        async with serving(fake):
            return await send_request(ServerTarget(options.pop("url", fake.url), True, **options), body)

    return asyncio.run(go())


# Times that were given, numbers worked out by hand.

FAST = RequestTrace(10.0, 10.5, [10.1, 10.2, 10.4], prompt_tokens=4, output_tokens=5, cached_tokens=3)
SLOW = RequestTrace(11.0, 13.0, [12.0, 13.0], prompt_tokens=6, output_tokens=2)
LOST = RequestTrace(10.5, 14.0, [11.0], error="timeout")
ONE = RequestTrace(12.0, 12.2, [12.1], output_tokens=1)


def test_numbers_from_given_times() -> None:
    found = summary([FAST, SLOW, LOST], SLO(), skipped=2)
    assert (found.requests, found.answered, found.skipped, found.errors) == (3, 2, 2, {"timeout": 1})
    assert found.seconds == pytest.approx(4.0)  # from 10.0 to 14.0: the lost one took its time, too
    assert (found.prompt_tokens, found.cached_tokens, found.output_tokens) == (10, 3, 7)
    assert found.output_tokens_per_s == pytest.approx(7 / 4)
    assert found.requests_per_s == pytest.approx(0.5)
    assert found.counted_by == "usage" and found.good is None and found.good_requests_per_s is None
    assert found.ttft_ms is not None and found.ttft_ms.p50 == pytest.approx((100 + 1000) / 2)
    assert found.itl_ms is not None and found.itl_ms.mean == pytest.approx((100 + 200 + 1000) / 3)
    assert found.tpot_ms is not None and found.tpot_ms.mean == pytest.approx((300 / 4 + 1000) / 2)
    assert found.e2e_ms is not None and found.e2e_ms.most == pytest.approx(2000)


def test_percentiles_interpolate() -> None:
    found = spread([i / 1000 for i in range(1, 102)])  # 1 to 101 ms
    assert found is not None
    assert (found.p50, found.p90, found.p99) == pytest.approx((51, 91, 100))
    assert spread([]) is None


@pytest.mark.parametrize(
    ("trace", "goal", "good"),
    [
        (FAST, SLO(ttft_ms=101), True),
        (FAST, SLO(ttft_ms=99), False),
        (FAST, SLO(itl_ms=76), True),  # 300 ms for 4 tokens
        (FAST, SLO(itl_ms=74), False),
        (SLOW, SLO(ttft_ms=2000, itl_ms=999), False),
        (ONE, SLO(itl_ms=0.001), True),  # nothing came after its first token
        (LOST, SLO(ttft_ms=9999), False),
    ],
)
def test_goodput_counts_answers_that_kept_the_goal(trace: RequestTrace, goal: SLO, good: bool) -> None:
    assert is_good(trace, goal) is good
    found = summary([trace], goal)
    assert found.good == int(good)


def test_without_usage_pieces_are_counted_and_that_is_said() -> None:
    bare = RequestTrace(0.0, 1.0, [0.5, 0.6, 0.7])
    found = summary([bare, FAST], SLO())
    assert (found.output_tokens, found.counted_by) == (3 + 5, "chunks")
    assert any("pieces of text were counted" in line for line in _lines(LoadRun("m", [bare], 0, []), SLO(), found))


def test_a_run_in_which_nothing_was_answered_has_no_latencies() -> None:
    found = summary([LOST], SLO(ttft_ms=1))
    assert found.ttft_ms is None and found.e2e_ms is None and found.output_tokens_per_s == 0
    assert summary([], SLO()).seconds == 0


# What is asked, and when.


@pytest.mark.parametrize("workload", ["random", "shared-prefix", "multi-turn"])
def test_prompts_come_from_the_seed_alone(workload: str) -> None:
    plan = LoadPlan(workload, requests=10, prompt_tokens=20, turns=4)
    assert conversations(plan) == conversations(plan)
    assert conversations(plan) != conversations(LoadPlan(workload, requests=10, prompt_tokens=20, turns=4, seed=1))
    turns = [turn for each in conversations(plan) for turn in each.turns]
    assert len(turns) == 10 and all(len(turn.split()) == 20 for turn in turns)
    assert len(set(turns)) == 10


def test_shared_prefixes_are_shared_and_conversations_have_their_turns() -> None:
    plan = LoadPlan("shared-prefix", requests=40, prompt_tokens=20, groups=3)
    assert len({" ".join(each.turns[0].split()[:15]) for each in conversations(plan)}) == 3
    plan = LoadPlan("multi-turn", requests=10, prompt_tokens=4, turns=4)
    assert [len(each.turns) for each in conversations(plan)] == [4, 4, 2]


def test_arrivals_are_those_of_a_poisson_process() -> None:
    times = arrival_times(LoadPlan(rate=50.0), 20_000)
    gaps = [b - a for a, b in zip([0.0, *times], times, strict=False)]
    assert times == arrival_times(LoadPlan(rate=50.0), 20_000) and times == sorted(times)
    mean = sum(gaps) / len(gaps)
    assert mean == pytest.approx(0.02, rel=0.03)
    # Times between arrivals are exponential: as much spread as mean, and 1/e of them longer than it.
    assert (sum((gap - mean) ** 2 for gap in gaps) / len(gaps)) ** 0.5 == pytest.approx(mean, rel=0.05)
    assert sum(gap > mean for gap in gaps) / len(gaps) == pytest.approx(0.368, abs=0.02)


@pytest.mark.parametrize(
    ("given", "field"),
    [
        ({"workload": "odd"}, "workload"),
        ({"requests": 0}, "requests"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"clients": 0}, "clients"),
        ({"clients": 1, "rate": 1.0}, "rate"),
        ({"rate": 0.0}, "rate"),
        ({"rate": float("nan")}, "rate"),
    ],
)
def test_shapes_that_mean_nothing_are_refused_by_name(given: dict[str, Any], field: str) -> None:
    with pytest.raises(ParamError) as caught:
        LoadPlan(**given)
    assert caught.value.field == field


@pytest.mark.parametrize("url", ["127.0.0.1:8000", "ftp://x", "http://", ""])
def test_addresses_that_are_none_are_refused(url: str) -> None:
    with pytest.raises(ParamError, match="url"):
        ServerTarget(url, True)


def test_v1_is_added_where_it_is_missing() -> None:
    paths = {ServerTarget(f"http://h{base}", True).path("/models") for base in ("", "/", "/v1", "/v1/")}
    assert paths == {"/v1/models"}
    assert ServerTarget("http://h/proxy", False).path("/completions") == "/proxy/v1/completions"


# Against the fake server.


def test_clients_of_a_closed_loop_are_as_many_as_asked_for() -> None:
    fake = FakeOpenAI(gather=3)  # which answers nobody until three wait
    run = measured(fake, LoadPlan(requests=12, clients=3, prompt_tokens=5))
    assert len(run.traces) == 12 and all(trace.error is None for trace in run.traces)
    assert fake.most_in_flight == 3
    assert run.model == "fake" and run.left_out == []


def test_requests_of_an_open_loop_do_not_wait_for_answers() -> None:
    fake = FakeOpenAI(gather=10)  # which answers nobody until all are there
    run = measured(fake, LoadPlan(requests=10, rate=2000.0, prompt_tokens=5))
    assert fake.most_in_flight == 10 and len(run.traces) == 10


@pytest.mark.parametrize("chunked", [True, False])
@pytest.mark.parametrize("chat", [True, False])
def test_a_stream_is_read_however_it_is_cut(chat: bool, chunked: bool) -> None:
    fake = FakeOpenAI(lambda _: Answer(("Hel", "lo é", "!"), chunked=chunked))
    run = measured(fake, LoadPlan(requests=1, max_tokens=9, prompt_tokens=3), chat, "mine")
    (trace,) = run.traces
    assert (trace.text, len(trace.stamps_s), trace.error) == ("Hello é!", 3, None)
    assert (trace.prompt_tokens, trace.output_tokens, trace.cached_tokens) == (7, 6, 5)
    assert trace.started_s <= trace.stamps_s[0] <= trace.stamps_s[-1] <= trace.ended_s
    warm, body = fake.bodies
    assert warm["max_tokens"] == 2 and body["max_tokens"] == 9
    assert body["model"] == "mine" and body["ignore_eos"] is True and body["stream_options"] == {"include_usage": True}
    assert ("messages" in body) is chat and ("prompt" in body) is not chat
    assert fake.heads[-1].startswith(f"POST /v1/{'chat/' if chat else ''}completions HTTP/1.1")


def test_turns_carry_the_answers_before_them() -> None:
    fake = FakeOpenAI(lambda body: Answer((f"answer {len(body['messages'])}",)))
    measured(fake, LoadPlan("multi-turn", requests=3, turns=3, prompt_tokens=2))
    last = fake.bodies[-1]["messages"]
    assert [message["role"] for message in last] == ["user", "assistant", "user", "assistant", "user"]
    assert [message["content"] for message in last[1::2]] == ["answer 1", "answer 3"]
    assert fake.bodies[-2]["messages"] == last[:3]


def test_turns_of_completions_go_on_behind_the_text() -> None:
    fake = FakeOpenAI(lambda _: Answer((" yes",)))
    measured(fake, LoadPlan("multi-turn", requests=2, turns=2, prompt_tokens=2), chat=False)
    first, second = (body["prompt"] for body in fake.bodies[1:])
    assert second.startswith(f"{first} yes\n") and len(second.split()) == 2 + 1 + 2


@pytest.mark.parametrize(
    ("answer", "kind", "message"),
    [
        (Answer(status=429, message="later"), "HTTP 429", "later"),
        (Answer(done=False), "broken stream", ""),
        (Answer(fault="out of pages"), "error in stream", "out of pages"),
        (Answer((), usage=False), "empty answer", "empty answer"),
    ],
)
def test_failures_are_counted_by_kind(answer: Answer, kind: str, message: str) -> None:
    trace = asked(FakeOpenAI(lambda _: answer), {"max_tokens": 2, "messages": []})
    assert trace.error == kind and message in trace.message
    assert summary([trace, FAST], SLO()).errors == {kind: 1}


def test_a_server_that_is_not_there_and_one_that_never_answers() -> None:
    assert asked(FakeOpenAI(), {"max_tokens": 2}, url="http://127.0.0.1:1").error == "no connection"
    silent = FakeOpenAI(gather=2)
    assert asked(silent, {"max_tokens": 9}, timeout_s=0.05).error == "timeout"


def test_a_turn_that_fails_ends_its_conversation_alone() -> None:
    def script(body: dict[str, Any]) -> Answer:
        return Answer(status=500, message="boom") if len(body.get("messages", ())) == 3 else Answer()

    run = measured(FakeOpenAI(script), LoadPlan("multi-turn", requests=8, turns=4, prompt_tokens=2))
    assert run.skipped == 4 and [trace.error for trace in run.traces] == [None, "HTTP 500"] * 2
    found = summary(run.traces, SLO(), run.skipped)
    assert found.requests + found.skipped == 8
    assert any("4 turns" in line for line in _lines(run, SLO(), found))


def test_fields_that_a_server_refuses_are_left_out_and_that_is_said() -> None:
    def script(body: dict[str, Any]) -> Answer:
        return Answer(status=400, message="unknown field: ignore_eos") if "ignore_eos" in body else Answer()

    fake = FakeOpenAI(script)
    run = measured(fake, LoadPlan(requests=2, prompt_tokens=2))
    assert run.left_out == ["ignore_eos"] and all(trace.error is None for trace in run.traces)
    assert "ignore_eos" not in fake.bodies[-1] and "stream_options" in fake.bodies[-1]
    found = summary(run.traces, SLO())
    assert any("refuses it: ignore_eos" in line for line in _lines(run, SLO(), found))


def test_a_server_that_refuses_everything_is_told_as_it_says() -> None:
    with pytest.raises(ServerUnusable, match="wrong key"):
        measured(FakeOpenAI(lambda _: Answer(status=401, message="wrong key")), LoadPlan(requests=1))
    with pytest.raises(ServerUnusable, match="no chat template"):
        measured(FakeOpenAI(lambda _: Answer(status=400, message="no chat template")), LoadPlan(requests=1))


def test_the_key_is_sent() -> None:
    fake = FakeOpenAI()
    asked(fake, {"max_tokens": 2}, api_key="secret")
    assert "Authorization: Bearer secret\r\n" in fake.heads[0]


# The command.


@contextmanager
def in_a_thread(fake: FakeOpenAI) -> Iterator[str]:
    """The fake on a loop of its own, for commands that have theirs."""
    loop, ready = asyncio.new_event_loop(), threading.Event()
    stop = asyncio.Event()

    async def go() -> None:
        async with serving(fake):
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(go()))
    thread.start()
    ready.wait()
    try:
        yield fake.url
    finally:
        loop.call_soon_threadsafe(stop.set)
        thread.join()
        loop.close()


def test_the_command_prints_a_table_and_json() -> None:
    given = ["bench", "serve", "--requests", "4", "--clients", "2", "--prompt-tokens", "3", "--slo-ttft-ms", "60000"]
    with in_a_thread(FakeOpenAI()) as url:
        shown = CliRunner().invoke(app, [*given, "--url", url])
        machine = CliRunner().invoke(app, [*given, "--url", url, "--json", "--completions"])
    assert shown.exit_code == 0, shown.output
    assert "time to first token" in shown.output and "4 of 4 within TTFT 60000 ms" in shown.output
    report = json.loads(machine.stdout)
    assert report["result"]["answered"] == 4 and report["result"]["output_tokens"] == 24
    assert report["shape"]["clients"] == 2 and report["chat"] is False
    assert set(report["result"]["ttft_ms"]) == set(Percentiles.__slots__)


def test_the_command_says_what_is_wrong_in_a_sentence() -> None:
    nobody = CliRunner().invoke(app, ["bench", "serve", "--url", "http://127.0.0.1:1"])
    assert nobody.exit_code == 1 and "is a server running there?" in nobody.output
    both = CliRunner().invoke(app, ["bench", "serve", "--rate", "1", "--clients", "2"])
    assert both.exit_code == 2 and "rate" in both.output


def test_the_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    path = tmp_path / "out.png"
    with in_a_thread(FakeOpenAI()) as url:
        done = CliRunner().invoke(app, ["bench", "serve", "--url", url, "--requests", "3", "--plot", str(path)])
    assert done.exit_code == 0, done.output
    assert path.read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_nothing_is_measured_and_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("matplotlib"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", without)
    fake = FakeOpenAI()
    with in_a_thread(fake) as url:
        done = CliRunner().invoke(app, ["bench", "serve", "--url", url, "--plot", "x.png"])
    assert done.exit_code == 1 and "pip install 'kvilt[plot]'" in done.output
    assert fake.bodies == []
