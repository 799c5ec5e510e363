"""Documents over HTTP: the answers of the library, what they cost, whose they are, and what is refused by name."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from gates import Gate
from lora_files import write_lora
from running import QUESTION, Running, until

from kvilt import LLM
from kvilt.blend.recipe import Recipe
from kvilt.config import EngineConfig, GateConfig
from kvilt.executor.protocol import Executor
from kvilt.server.openai.fields import BlendOptions
from kvilt.server.openai.params import blend_recipe
from kvilt.server.openai.schema import ChatRequest
from kvilt.text.tokenizer import Tokenizer

Start = Callable[..., Any]
ONE = "The Eiffel Tower is 330 metres tall. It stands in Paris and was finished in 1889. " * 3
TWO = "Mount Everest is 8849 metres high. It was first climbed in 1953 by two people. " * 3
SHORT = {"model": "tiny", "max_tokens": 6, "temperature": 0}
DOCUMENTS = {"documents": [ONE, TWO], "blend": {"ratio": 0.2, "min_gain": 0}}
LOOSE = Recipe(0.2, min_gain=0.0)
KEYS = ("sk-alice-0123", "sk-bob-45678")
COUNTS = ("computed", "prefix_hit", "blended_reused", "blended_recomputed")


@pytest.fixture(scope="module")
def llm(executor: Executor, tokenizer: Tokenizer) -> LLM:
    return LLM(executor, tokenizer)


@pytest.fixture
def http(server: Running) -> Iterator[httpx.Client]:
    with server.http() as client:
        yield client


def code(answer: httpx.Response) -> tuple[int, str, str | None]:
    error = answer.json()["error"]
    return answer.status_code, error["code"], error["param"]


def own(usage: Any) -> dict[str, Any]:
    """The extension of a usage, whose counts must add up."""
    assert usage is not None
    found: dict[str, Any] = usage.model_extra["kvilt"]
    assert sum(found[name] for name in COUNTS) == usage.prompt_tokens
    assert usage.prompt_tokens_details.cached_tokens == found["prefix_hit"] + found["blended_reused"]
    assert usage.prompt_tokens_details.model_extra["blended_tokens"] == found["blended_reused"]
    return found


def test_a_conversation_with_documents(server: Running, llm: LLM) -> None:
    expected = llm.chat(QUESTION, documents=[ONE, TWO], recipe=LOOSE, max_tokens=6, temperature=0)
    tokens = sum(len(llm.documents.ids(text)) for text in (ONE, TWO))
    mine = {**DOCUMENTS, "cache_salt": "nobody else's"}
    for made in (tokens, 0):  # computed, then found
        done = server.openai().chat.completions.create(**SHORT, messages=QUESTION, extra_body=mine)
        assert done.choices[0].message.content == expected.text
        used = own(done.usage)
        assert used["recipe"] == LOOSE.name
        assert used["documents_computed"] == made
        assert used["blended_reused"] == expected.usage.blended_reused > 0
        assert used["blended_recomputed"] == expected.usage.blended_recomputed > 0


@pytest.mark.parametrize("strategy", ["query", "head", "deviation"])
@pytest.mark.parametrize("stream", [False, True])
def test_the_usage_says_which_tokens_were_computed_again(
    server: Running, llm: LLM, strategy: str, stream: bool
) -> None:
    texts = [ONE, "Ä\U0001f600 — " * 12]
    recipe = {"ratio": 0.2, "min_gain": 0, "strategy": strategy, "check_layer": 0}
    more = {"documents": texts, "blend": recipe, "return_blended_tokens": True}
    fields: dict[str, Any] = {**SHORT, "messages": QUESTION, "extra_body": more, "stream": stream}
    if stream:
        chunks = list(server.openai().chat.completions.create(**fields, stream_options={"include_usage": True}))
        used = own(chunks[-1].usage)
    else:
        used = own(server.openai().chat.completions.create(**fields).usage)
    shown = used["documents"]
    assert ["".join(piece["text"] for piece in one["pieces"]) for one in shown] == texts
    assert [one["tokens"] for one in shown] == [len(llm.documents.ids(text)) for text in texts]
    again = [piece["tokens"] for one in shown for piece in one["pieces"] if piece["recomputed"]]
    assert sum(again) == used["blended_recomputed"] > 0
    assert sum(piece["tokens"] for one in shown for piece in one["pieces"]) == sum(one["tokens"] for one in shown)
    if strategy == "head":
        assert all(one["pieces"][0]["recomputed"] and len(one["pieces"]) == 2 for one in shown)
    quiet = server.openai().chat.completions.create(**{**fields, "stream": False, "extra_body": {"documents": texts}})
    assert "documents" not in own(quiet.usage)


def test_a_stream_says_the_same_and_counts_in_its_last_chunk(server: Running, llm: LLM) -> None:
    expected = llm.chat(QUESTION, documents=[TWO, ONE], recipe=LOOSE, max_tokens=6, temperature=0)
    options = {"include_usage": True}
    chunks = list(
        server.openai().chat.completions.create(
            **SHORT,
            messages=QUESTION,
            stream=True,
            stream_options=options,
            extra_body={**DOCUMENTS, "documents": [TWO, ONE]},
        )
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices) == expected.text
    assert own(chunks[-1].usage)["blended_reused"] == expected.usage.blended_reused


def test_counts_while_a_stream_runs_are_those_at_its_end(server: Running) -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    chunks = list(
        server.openai().completions.create(
            **SHORT,
            prompt="So",
            stream=True,
            stream_options=options,
            extra_body=DOCUMENTS,
        )
    )
    running, last = [chunk.usage for chunk in chunks if chunk.choices], chunks[-1].usage
    assert len(running) > 1
    assert {str(own(one)) for one in running} == {str(own(last))}
    assert own(last)["blended_reused"] > 0


def test_prompts_behind_documents(server: Running, llm: LLM) -> None:
    prompts = ["The tower is", " So"]
    expected = llm.generate(prompts, documents=[ONE], recipe=LOOSE, max_tokens=6, temperature=0, n=2)
    extra = {**DOCUMENTS, "documents": [ONE]}
    done = server.openai().completions.create(**SHORT, prompt=prompts, n=2, extra_body=extra)
    samples = [sample for one in expected for sample in (one, *one.alternatives)]
    assert [choice.text for choice in done.choices] == [sample.text for sample in samples]
    assert own(done.usage)["blended_reused"] == sum(one.usage.blended_reused for one in expected)
    ids = llm.tokenizer.encode("The tower is", add_special=False)
    again = server.openai().completions.create(**SHORT, prompt=ids, echo=True, extra_body=extra)
    assert again.choices[0].text == "The tower is" + expected[0].text


def test_every_way_to_write_a_document(server: Running) -> None:
    def text(*documents: Any) -> tuple[str, int]:
        extra = {**DOCUMENTS, "documents": list(documents)}
        done = server.openai().chat.completions.create(**SHORT, messages=QUESTION, extra_body=extra)
        assert done.usage is not None
        return done.choices[0].message.content or "", done.usage.prompt_tokens

    assert text(ONE, TWO) == text({"text": ONE}, {"content": TWO})
    assert text(f"Towers\n{ONE}", TWO) == text({"title": "Towers", "text": ONE}, TWO)


def test_no_documents_are_none(server: Running) -> None:
    done = server.openai().chat.completions.create(**SHORT, messages=QUESTION, extra_body={"documents": []})
    assert own(done.usage)["recipe"] == "exact"


def test_small_gain_is_a_plain_prompt(server: Running) -> None:
    done = server.openai().completions.create(**SHORT, prompt="a b c d " * 30, extra_body={"documents": ["Yes. "]})
    used = own(done.usage)
    assert used["recipe"] == "exact"
    assert used["blended_reused"] == used["blended_recomputed"] == 0


def test_tools_and_formats_go_on_working(server: Running) -> None:
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    done = server.openai().chat.completions.create(
        **{**SHORT, "max_tokens": 60},
        messages=QUESTION,
        tools=[tool],
        tool_choice="required",
        parallel_tool_calls=False,
        extra_body=DOCUMENTS,
    )
    calls = done.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.name == "look"
    assert own(done.usage)["blended_reused"] > 0
    chosen = server.openai().chat.completions.create(
        **SHORT,
        messages=QUESTION,
        extra_body={**DOCUMENTS, "response_format": {"type": "choice", "choice": ["Paris", "Rome"]}},
    )
    assert chosen.choices[0].message.content in ("Paris", "Rome")


def test_keys_do_not_find_each_others_documents(start: Start) -> None:
    with start(api_keys=KEYS) as server:
        looked: list[float] = []
        for key, salt in ((KEYS[0], None), (KEYS[0], None), (KEYS[1], None), (KEYS[0], "x"), (KEYS[0], "x")):
            extra = {**DOCUMENTS, **({"cache_salt": salt} if salt else {})}
            server.openai(key).chat.completions.create(**SHORT, messages=QUESTION, extra_body=extra)
            hits = server.llm.documents.chunks._store.metrics.snapshot()["kvilt_store_hits_total"]["series"]
            looked.append(sum(point["value"] for point in hits))
    found = [b - a for a, b in zip([0.0, *looked], looked, strict=False)]
    assert found == [0, 2, 0, 0, 2]


def test_an_adapter_reads_documents_its_own_way(
    start: Start, executor: Executor, tokenizer: Tokenizer, tmp_path: Path
) -> None:
    write_lora(tmp_path / "french")
    lora = executor.load_lora(tmp_path / "french", "french")
    try:
        expected = LLM(executor, tokenizer).chat(
            QUESTION, documents=[ONE, TWO], recipe=LOOSE, lora="french", max_tokens=6, temperature=0
        )
        with start() as server:
            asked = {**SHORT, "model": "french"}
            done = server.openai().chat.completions.create(**asked, messages=QUESTION, extra_body=DOCUMENTS)
            assert done.choices[0].message.content == expected.text
            assert own(done.usage)["blended_reused"] == expected.usage.blended_reused > 0
    finally:
        executor.unload_lora(lora)


def test_a_blended_answer_can_be_continued(server: Running, http: httpx.Client, llm: LLM) -> None:
    done = server.openai().completions.create(**SHORT, prompt="So", extra_body={**DOCUMENTS, "kv_out": True})
    kept = (done.choices[0].model_extra or {})["kv"]
    more = {**SHORT, "prompt": " And", "kv": kept["id"]}
    answer = http.post("/v1/completions", json=more).json()
    assert answer["usage"]["kvilt"]["prefix_hit"] == kept["tokens"]
    assert code(http.post("/v1/completions", json={**more, **DOCUMENTS})) == (400, "invalid_value", "kv")
    assert http.delete(f"/v1/kv/{kept['id']}").status_code == 200


def test_a_blended_answer_is_never_taken_for_exact(start: Start, executor: Executor, tmp_path: Path) -> None:
    """Neither its handle nor what was saved of it and restored lends its pages to other prompts."""
    with start(kv_dir=tmp_path) as server, server.http() as http:
        executor.prefixes.clear()
        asked = {**SHORT, "prompt": "So", **DOCUMENTS, "kv_out": True}
        kept = http.post("/v1/completions", json=asked).json()["choices"][0]["kv"]
        assert http.post(f"/v1/kv/{kept['id']}/save", json={"name": "mixed"}).status_code == 200
        back = http.post("/v1/kv/restore", json={"name": "mixed"}).json()
        tokens = server.llm.kv.tokens(kept["id"])
        for handle in (kept["id"], back["id"]):
            loan = server.llm._handles.lend("", handle)
            assert loan.kv is not None
            with loan.kv as kv:
                assert kv.origin == LOOSE.name
            more = {**SHORT, "prompt": " And" * 64, "kv": handle}
            used = http.post("/v1/completions", json=more).json()["usage"]["kvilt"]
            assert used["prefix_hit"] == kept["tokens"]
            plain = http.post("/v1/completions", json={**SHORT, "prompt": [*tokens, 5]}).json()["usage"]["kvilt"]
            assert plain["prefix_hit"] == 0
            executor.prefixes.clear()
            http.delete(f"/v1/kv/{handle}")


@pytest.mark.parametrize(
    ("fields", "why", "param"),
    [
        ({"documents": "text"}, "invalid_value", "documents"),
        ({"documents": [7]}, "invalid_value", "documents.0"),
        ({"documents": [""]}, "invalid_value", "documents.0"),
        ({"documents": [{}]}, "invalid_value", "documents.0"),
        ({"documents": [{"text": "a", "content": "b"}]}, "invalid_value", "documents.0"),
        ({"documents": [{"text": "a", "source": "b"}]}, "unknown_field", "documents.0.source"),
        ({"documents": ["a"], "blend": {"speed": 1}}, "unknown_field", "blend.speed"),
        ({"documents": ["a"], "blend": {"ratio": 2}}, "invalid_value", "blend.ratio"),
        ({"documents": ["a"], "blend": {"strategy": "best"}}, "invalid_value", "blend.strategy"),
        ({"documents": ["a"], "blend": {"gradual": [2.0], "strategy": "head"}}, "invalid_value", "blend.gradual"),
        ({"blend": {"ratio": 0.5}}, "invalid_value", "blend"),
        ({"documents": ["a"], "kv": "0" * 32}, "invalid_value", "kv"),
        ({"documents": ["a"] * 1025}, "too_many", "documents"),
    ],
)
def test_refusals_name_the_field(http: httpx.Client, fields: dict[str, Any], why: str, param: str) -> None:
    for route, question in (("chat/completions", {"messages": QUESTION}), ("completions", {"prompt": "So"})):
        assert code(http.post(f"/v1/{route}", json={**SHORT, **question, **fields})) == (400, why, param)


def warmed(http: httpx.Client, *documents: Any, **more: Any) -> list[dict[str, Any]]:
    answer = http.post("/v1/kv/chunks", json={"documents": documents, **more})
    assert answer.status_code == 200, answer.text
    data: list[dict[str, Any]] = answer.json()["data"]
    return data


def test_documents_that_were_warmed_are_found(start: Start, llm: LLM) -> None:
    with start() as server, server.http() as http:
        first = warmed(http, ONE, {"title": "Everest", "text": TWO}, ONE)
        assert [one["found"] for one in first] == [False, False, True]
        assert [one["tokens"] for one in first[:2]] == [
            len(llm.documents.ids(text)) for text in (ONE, f"Everest\n{TWO}")
        ]
        assert first[0]["id"] == first[2]["id"] != first[1]["id"]
        assert all(one["found"] for one in warmed(http, ONE, f"Everest\n{TWO}"))
        lines = http.get("/metrics").text.splitlines()
        written = 'kvilt_store_hits_total{tier="memory",kind="chunk"} '
        before = next(int(line.removeprefix(written)) for line in lines if line.startswith(written))
        extra = {**DOCUMENTS, "documents": [{"title": "Everest", "text": TWO}, ONE]}
        server.openai().chat.completions.create(**SHORT, messages=QUESTION, extra_body=extra)
        assert f"{written}{before + 2}" in http.get("/metrics").text.splitlines()


def test_warmed_documents_belong_to_a_key_and_a_salt(start: Start) -> None:
    with start(api_keys=KEYS) as server:
        clients = [server.http(headers={"authorization": f"Bearer {key}"}) for key in KEYS]
        assert not warmed(clients[0], ONE)[0]["found"]
        assert not warmed(clients[1], ONE)[0]["found"]
        assert warmed(clients[0], ONE)[0]["found"]
        salted = clients[0].post("/v1/kv/chunks?cache_salt=x", json={"documents": [ONE]}).json()
        assert not salted["data"][0]["found"]
        assert server.http().post("/v1/kv/chunks", json={"documents": [ONE]}).status_code == 401


def test_documents_are_warmed_for_an_adapter(start: Start, executor: Executor, tmp_path: Path) -> None:
    write_lora(tmp_path / "french")
    lora = executor.load_lora(tmp_path / "french", "french")
    try:
        with start() as server, server.http() as http:
            assert [warmed(http, ONE, model=name)[0]["found"] for name in ("tiny", "french", "french")] == [
                False,
                False,
                True,
            ]
            assert not warmed(http, ONE, model="french", lora_scale=0.5)[0]["found"]
    finally:
        executor.unload_lora(lora)


@pytest.mark.parametrize(
    ("body", "status", "why", "param"),
    [
        ({}, 400, "missing_field", "documents"),
        ({"documents": []}, 400, "invalid_value", "documents"),
        ({"documents": ["a"], "prompt": "b"}, 400, "unknown_field", "prompt"),
        ({"documents": ["a"] * 1025}, 400, "too_many", "documents"),
        ({"documents": ["a", "b" * 9000]}, 400, "invalid_value", "documents.1"),
        ({"documents": ["a"], "lora_scale": 0.5}, 400, "invalid_value", "lora_scale"),
        ({"documents": ["a"], "model": "other"}, 404, "model_not_found", "model"),
    ],
)
def test_what_cannot_be_warmed(http: httpx.Client, body: dict[str, Any], status: int, why: str, param: str) -> None:
    assert code(http.post("/v1/kv/chunks", json=body)) == (status, why, param)


def test_a_client_that_leaves_ends_the_warming(
    start: Start, executor: Executor, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(executor, monkeypatch)
    gate.last = 20
    many = [f"Document {i} is about the number {i}. " * 30 for i in range(400)]
    with start(EngineConfig(step_tokens=32, max_rows=8)) as server:
        aborted, honest = [], server.llm.engine.abort
        monkeypatch.setattr(server.llm.engine, "abort", lambda job: (honest(job), aborted.append(job)))
        with server.asking("/v1/kv/chunks", {"documents": many}):
            until(lambda: not gate.is_set(), "some steps")
        until(lambda: bool(aborted), "the server's notice")
        gate.set()
        until(lambda: server.llm.engine.requests == 0, "the end of its requests")
        with server.http() as http:
            assert not warmed(http, many[-1])[0]["found"]


def test_what_does_not_fit_or_cannot_be(server: Running, http: httpx.Client) -> None:
    long = {**SHORT, "messages": QUESTION, "documents": [ONE * 30]}
    assert code(http.post("/v1/chat/completions", json=long))[:2] == (400, "context_length_exceeded")
    scored = {**SHORT, "prompt": "So", "echo": True, "logprobs": 1, "documents": [ONE]}
    assert code(http.post("/v1/completions", json=scored)) == (400, "invalid_value", "echo")
    layer = {**DOCUMENTS["blend"], "strategy": "deviation", "check_layer": 99}
    body = {**SHORT, "messages": QUESTION, "documents": [ONE], "blend": layer}
    assert code(http.post("/v1/chat/completions", json=body))[:2] == (400, "invalid_value")
    alone = [{"role": "system", "content": "Be brief."}]
    with pytest.raises(openai.BadRequestError, match="last user"):
        server.openai().chat.completions.create(**SHORT, messages=alone, extra_body=DOCUMENTS)


def test_a_body_of_documents_is_limited_like_any_other(start: Start) -> None:
    with start(max_body_bytes=2000) as server, server.http() as http:
        refused = http.post("/v1/chat/completions", json={**SHORT, "messages": QUESTION, "documents": ["a" * 3000]})
        assert refused.status_code == 413


def test_the_fields_of_blend_are_those_of_a_recipe() -> None:
    assert set(BlendOptions.model_fields) - {"discover", "mend"} <= {field.name for field in dataclasses.fields(Recipe)}


def test_the_former_name_of_repair_is_taken_with_one_warning() -> None:
    body = {"model": "m", "messages": QUESTION, "blend": {"mend": 0.25, "ratio": 0.4}}
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        assert blend_recipe(ChatRequest.model_validate(body)) == Recipe(0.4, repair=0.25)
    (one,) = warned
    assert one.category is DeprecationWarning
    assert "blend.repair" in str(one.message)


def test_blend_options_without_former_names_warn_of_nothing() -> None:
    body = {"model": "m", "messages": QUESTION, "blend": {"repair": 0.25, "ratio": 0.4}}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert blend_recipe(ChatRequest.model_validate(body)) == Recipe(0.4, repair=0.25)


def test_certificates_are_those_of_the_library(start: Start) -> None:
    """Every key sees what the gate knows of all, and nothing of single prompts."""
    strict = {**DOCUMENTS, "blend": {"ratio": 0.2, "min_gain": 0, "gate": False}}
    with start(gate=GateConfig(every=1, act=False), api_keys=KEYS) as server:
        clients = [server.http(headers={"authorization": f"Bearer {key}"}) for key in KEYS]
        assert clients[0].get("/v1/kv/certificates").json() == {"object": "list", "data": []}
        seen = 0
        for count in range(1, 5):
            asked = {**SHORT, "messages": QUESTION, **DOCUMENTS}
            assert clients[0].post("/v1/chat/completions", json=asked).status_code == 200
            assert clients[0].post("/v1/chat/completions", json={**asked, **strict}).status_code == 200
            until(lambda count=count: server.llm.certificates()[0].count == count, "a comparison")  # type: ignore[misc]
            (known,) = server.llm.certificates()
            for client in clients:
                (shown,) = client.get("/v1/kv/certificates").json()["data"]
                for name in ("model", "adapter", "strategy", "asked", "asked_ratio", "ratio", "falls_back", "count"):
                    assert shown.pop(name) == getattr(known, name)
                bound = None if count < 3 else known.kl_bound
                assert shown == {
                    "compared": count,
                    "mean_kl": known.mean_kl,
                    "kl_bound": bound,
                    "agreement": known.agreement,
                }
                seen += bound is not None
        assert known.asked == LOOSE.name
        assert seen == 4
        assert server.http().get("/v1/kv/certificates").status_code == 401


def test_a_server_without_a_gate_has_no_certificates(server: Running, http: httpx.Client) -> None:
    server.openai().chat.completions.create(**SHORT, messages=QUESTION, extra_body=DOCUMENTS)
    assert http.get("/v1/kv/certificates").json() == {"object": "list", "data": []}


HELD = f"{ONE}\n{TWO}\nHow tall is the tower?"
FOUND = {"blend": {**DOCUMENTS["blend"], "discover": True}}


def asked_plainly(server: Running, route: str, **extra: Any) -> tuple[str, str]:
    """The answer to a prompt that holds documents and names none, and the recipe it was made with."""
    server.llm.executor.prefixes.clear()
    talk = server.openai()
    if route == "chat":
        messages = [{"role": "user", "content": HELD}]
        answer: Any = talk.chat.completions.create(**SHORT, messages=messages, extra_body=extra)
        return answer.choices[0].message.content, own(answer.usage)["recipe"]
    answer = talk.completions.create(**SHORT, prompt=HELD, extra_body=extra)
    return answer.choices[0].text, own(answer.usage)["recipe"]


@pytest.mark.parametrize("route", ["chat", "completions"])
@pytest.mark.parametrize("always", [False, True])
def test_a_request_says_whether_documents_in_its_prompt_are_found(
    start: Start, executor: Executor, tokenizer: Tokenizer, route: str, always: bool
) -> None:
    executor.prefixes.clear()
    library = LLM(executor, tokenizer)
    library.warm([f"{ONE}\n", TWO])
    given = {"discover": True, "recipe": LOOSE, "max_tokens": 6, "temperature": 0}
    messages = [{"role": "user", "content": HELD}]
    expected = library.chat(messages, **given) if route == "chat" else library.generate(HELD, **given)  # type: ignore[arg-type]
    assert expected.usage.blended_reused > 0
    with start(EngineConfig(discover=always)) as server, server.http() as http:
        warmed(http, f"{ONE}\n", TWO)
        assert asked_plainly(server, route, **FOUND) == (expected.text, LOOSE.name)
        text, recipe = asked_plainly(server, route, blend={"discover": False})
        assert recipe == "exact"
        assert asked_plainly(server, route)[1] == (recipe if not always else Recipe().name)
        if always:
            assert asked_plainly(server, route, blend=DOCUMENTS["blend"]) == (expected.text, LOOSE.name)
        else:
            assert asked_plainly(server, route) == (text, "exact")
        assert asked_plainly(server, route, **FOUND, cache_salt="x")[1] == "exact", "another tenant knows none"


def test_a_handle_says_the_same_whether_its_kv_is_here_or_not(start: Start, executor: Executor) -> None:
    """Also where the server finds documents in every prompt: computed again is computed as it was."""
    with start(EngineConfig(discover=True)) as server, server.http() as http:
        warmed(http, f"{ONE}\n", TWO)
        made = http.post("/v1/kv", json={"prompt": HELD}).json()
        said = []
        for resident in (True, False):
            assert http.get(f"/v1/kv/{made['id']}").json()["resident"] == resident
            answer = http.post("/v1/completions", json={**SHORT, "prompt": " So", "kv": made["id"]}).json()
            said.append((answer["choices"][0]["text"], answer["usage"]["kvilt"]["recipe"]))
            server.llm._handles.evict_one(True)
            executor.prefixes.clear()
        assert said == [(said[0][0], "exact")] * 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"blend": {"discover": "yes"}}, "blend.discover"),
        ({"blend": {"discover": 1}}, "blend.discover"),
        ({"blend": {"discover": [True]}}, "blend.discover"),
        ({"discover": True}, "discover"),
        ({"blend": {"discover": True}, "documents": ["a"]}, "blend.discover"),
        ({"blend": {"discover": True}, "kv": "0" * 32}, "blend.discover"),
        ({"blend": {"discover": True, "ratio": 2}}, "blend.ratio"),
        ({"blend": {"discover": True, "strategy": "best"}}, "blend.strategy"),
        ({"blend": {"discover": False, "ratio": 0.5}}, "blend"),
        ({"blend": {}}, "blend"),
    ],
)
def test_what_cannot_be_discovered_is_refused(http: httpx.Client, fields: dict[str, Any], param: str) -> None:
    for route, question in (("chat/completions", {"messages": QUESTION}), ("completions", {"prompt": "So"})):
        status, _, named = code(http.post(f"/v1/{route}", json={**SHORT, **question, **fields}))
        assert (status, named) == (400, param)


def test_a_prompt_that_is_scored_is_not_looked_at(http: httpx.Client) -> None:
    scored = {**SHORT, "prompt": "So", "echo": True, "logprobs": 1, "blend": {"discover": True}}
    assert code(http.post("/v1/completions", json=scored)) == (400, "invalid_value", "echo")
    assert http.post("/v1/completions", json={**scored, "blend": {"discover": False}}).status_code == 200
