"""KV from replica to replica: bit for bit what the other one computed, and nothing else is taken."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import httpx
import orjson
import pytest
import torch
from clusters import CLUSTER_KEY, OTHER, Cluster, cluster_of_two
from running import KEY

from kvilt.cluster.cluster_key import SEAL, ClusterKey
from kvilt.cluster.exchange import HOLDS, PAGES, PULL
from kvilt.cluster.page_transfer import PageSpan, PageTransfer
from kvilt.cluster.request_hints import named
from kvilt.errors import InputError
from kvilt.server.auth import tenant_of_key
from kvilt.text.tokenizer import Tokenizer

TENANT = tenant_of_key(KEY)


@pytest.fixture(scope="module")
def cluster(tokenizer: Tokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    with cluster_of_two(tokenizer, tmp_path_factory.mktemp("served")) as made:
        yield made


def _words(seed: int, count: int = 200) -> list[int]:
    return [(7 * seed + 13 * k + k * k) % 4000 + 10 for k in range(count)]


def _complete(client: httpx.Client, ids: list[int], **more: Any) -> dict[str, Any]:
    body = {"prompt": ids, "max_tokens": 4, "temperature": 0, **more}
    reply = client.post("/v1/completions", json=body)
    assert reply.status_code == 200, reply.text
    done: dict[str, Any] = reply.json()
    return done


def _direct(cluster: Cluster, name: str, key: str = KEY) -> httpx.Client:
    return cluster.replicas[name].http(headers={"authorization": f"Bearer {key}"})


def _transfer(cluster: Cluster, name: str, secret: bytes = CLUSTER_KEY.secret) -> PageTransfer:
    return PageTransfer(cluster.replicas[name].llm.executor, secret)


def _span(ids: list[int], salt: str = TENANT) -> PageSpan:
    return PageSpan(tuple(ids), salt=salt, first=0, stop=len(ids) // 32)


def _kv(cluster: Cluster, name: str, span: PageSpan) -> list[torch.Tensor]:
    prefixes = cluster.replicas[name].llm.executor.prefixes
    pages = list(prefixes.pages(_transfer(cluster, name)._keys(span), 0, span.stop))
    for page in pages:
        page.wait()
    return [part for page in pages for kv in page.kv if kv is not None for part in (kv.keys, kv.values)]


def test_the_door_moves_kv_to_the_replica_that_a_request_must_go_to(cluster: Cluster) -> None:
    ids = _words(1)
    with _direct(cluster, "a") as one, cluster.http() as http:
        there = _complete(one, ids)
        cluster.settled()
        router = cluster.door.router
        router._s_per_token[:] = 1.0  # as slow as it takes for moving to pay
        router.settle(named(TENANT, "sessions", "elsewhere"), "b")
        done = _complete(http, ids, session="elsewhere")
        assert done["usage"]["prompt_tokens_details"]["cached_tokens"] == 192
        assert done["choices"][0]["text"] == there["choices"][0]["text"]
        assert router.transfers.count == 1 and router.transfers.moved_bytes > 0
        span = _span(ids)
        ours, theirs = _kv(cluster, "a", span), _kv(cluster, "b", span)
        assert len(ours) == len(theirs) > 0
        assert all(torch.equal(left, right) for left, right in zip(ours, theirs, strict=True))
        assert http.delete("/v1/sessions/elsewhere").status_code == 200


def test_pages_of_another_tenant_are_not_sent(cluster: Cluster) -> None:
    ids = _words(2)
    with _direct(cluster, "a") as one:
        _complete(one, ids)
    source = _transfer(cluster, "a")
    assert len(list(source.records(_span(ids)))) == 6
    assert not list(source.records(_span(ids, tenant_of_key(OTHER))))
    assert not list(source.records(replace(_span(ids), adapter="other")))


def test_a_page_that_is_not_the_one_that_was_asked_for_is_refused(cluster: Cluster) -> None:
    ids = _words(3)
    with _direct(cluster, "a") as one:
        _complete(one, ids)
    span = _span(ids)
    records = list(_transfer(cluster, "a").records(span))
    target = _transfer(cluster, "b")
    known = len(cluster.replicas["b"].llm.executor.prefixes)
    changed = bytearray(records[0])
    changed[-1] ^= 1
    head = bytearray(records[0])
    head[20] ^= 1
    other_tenant = _span(ids, tenant_of_key(OTHER))
    for wrong, asked in (
        ([bytes(changed)], span),
        ([bytes(head)], span),
        ([records[0][:-5]], span),
        ([b""], span),
        ([records[1]], span),
        ([records[0]], other_tenant),
        ([records[0]], _span(_words(4))),
        ([records[0]] * 7, replace(span, first=0, stop=0)),
    ):
        assert not target.reader(asked).take(wrong)
    stranger = _transfer(cluster, "b", ClusterKey.new().secret)
    assert not stranger.reader(span).take(records[:1])
    assert len(cluster.replicas["b"].llm.executor.prefixes) == known
    reader = target.reader(span)
    assert reader.take([records[0]]) and not reader.take([bytes(changed)])
    assert reader.pages == 1  # what came before stays
    assert target.missing(span).first == 1


def test_the_exchange_answers_its_own_cluster_only(cluster: Cluster) -> None:
    url = cluster.infos["a"].exchange
    body = orjson.dumps({"names": []})
    good = CLUSTER_KEY.request_headers(HOLDS, body)
    with httpx.Client(base_url=url) as http:
        assert http.post(HOLDS, content=body, headers=good).json() == []
        assert http.post(HOLDS, content=body).status_code == 403
        assert http.post(HOLDS, content=body + b" ", headers=good).status_code == 403
        assert http.post(PAGES, content=body, headers=good).status_code == 403  # signed for another path
        other = ClusterKey.new().request_headers(HOLDS, body)
        assert http.post(HOLDS, content=body, headers=other).status_code == 403
        assert http.get("/alive").status_code == 403
        wrong = orjson.dumps({"source": "x"})
        assert http.post(PULL, content=wrong, headers=CLUSTER_KEY.request_headers(PULL, wrong)).status_code == 400
        reply = http.post(HOLDS, content=body, headers=good)
        CLUSTER_KEY.check_answer(HOLDS, good, reply.headers, reply.content)
        with pytest.raises(InputError):
            CLUSTER_KEY.check_answer(HOLDS, CLUSTER_KEY.request_headers(HOLDS, body), reply.headers, reply.content)
        with pytest.raises(InputError):
            CLUSTER_KEY.check_answer(HOLDS, good, {SEAL: "ä"}, reply.content)


def test_a_source_that_is_gone_costs_computing_and_nothing_else(cluster: Cluster) -> None:
    exchange = cluster.door._exchange
    span = _span(_words(5))

    def pull(target: str, source: str) -> Any:
        return asyncio.run_coroutine_threadsafe(exchange.pull(target, source, span, 1.0), cluster.loop).result(60)

    assert pull(cluster.infos["a"].exchange, "http://127.0.0.1:9").tokens == 0
    assert pull("http://127.0.0.1:9", cluster.infos["a"].exchange).tokens == 0
    assert pull(cluster.infos["a"].exchange, cluster.infos["b"].exchange).tokens == 0  # it has none of them


@pytest.mark.parametrize(
    "fields",
    [
        None,
        {},
        {"tokens": [1], "adapter": "base", "salt": "", "first": -1, "stop": 1},
        {"tokens": [True], "adapter": "base", "salt": "", "first": 0, "stop": 1},
        {"tokens": ["1"], "adapter": "base", "salt": "", "first": 0, "stop": 1},
    ],
)
def test_a_span_that_is_none_is_refused(fields: Any) -> None:
    with pytest.raises(InputError):
        PageSpan.of_fields(fields)
