"""Adapters over HTTP: named as models, listed, loaded and unloaded by the owner, and never a way to other files."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from lora_files import lora_tensors, write_lora
from running import QUESTION, Running
from safetensors.torch import save_file

from kvilt import LLM
from kvilt.executor.protocol import Executor
from kvilt.text.tokenizer import Tokenizer

Start = Callable[..., Any]
ADMIN = "sk-admin-0123456789"
ASK = {"messages": QUESTION, "max_tokens": 6, "temperature": 0}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for seed, name in enumerate(("french", "legal")):
        write_lora(tmp_path / "adapters" / name, 4, ("self_attn.q_proj", "mlp.up_proj"), seed)
    write_lora(tmp_path / "elsewhere")
    (tmp_path / "adapters" / "link").symlink_to(tmp_path / "elsewhere")
    return tmp_path / "adapters"


@pytest.fixture
def owned(start: Start, folder: Path, executor: Executor) -> Iterator[Running]:
    with start(lora_dir=folder, admin_key=ADMIN) as one:
        yield one
    for info in executor.adapters.all():
        executor.unload_lora(info.id)


def admin(server: Running, route: str, key: str = ADMIN, **body: Any) -> Any:
    with server.http() as client:
        return client.post(f"/v1/{route}_lora_adapter", json=body, headers={"authorization": f"Bearer {key}"})


def said(answer: Any) -> str:
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["message"]["content"])


def test_an_adapter_is_a_model(owned: Running, executor: Executor, tokenizer: Tokenizer) -> None:
    loaded = admin(owned, "load", lora_name="french", lora_path="french").json()
    assert (loaded["id"], loaded["rank"], loaded["targets"]) == ("french", 4, ["q", "up"])
    with owned.http() as client:
        cards = {card["id"]: card for card in client.get("/v1/models").json()["data"]}
        assert cards["french"]["parent"] == owned.service.model
        assert client.get("/v1/models/french").json() == cards["french"]
        answer = client.post("/v1/chat/completions", json={**ASK, "model": "french"})
        assert answer.json()["model"] == "french"
        plain = client.post("/v1/chat/completions", json=ASK)
        none = client.post("/v1/chat/completions", json={**ASK, "model": "french", "lora_scale": 0})
        legal = client.post("/v1/chat/completions", json={**ASK, "model": "legal"})
    assert legal.status_code == 404
    assert legal.json()["error"]["code"] == "model_not_found"
    wanted = LLM(executor, tokenizer).chat(QUESTION, max_tokens=6, lora="french")
    assert said(answer) == wanted.text
    assert said(none) == said(plain) != said(answer)


def test_streams_and_completions_run_on_adapters_too(owned: Running, executor: Executor, tokenizer: Tokenizer) -> None:
    admin(owned, "load", lora_name="legal", lora_path="legal")
    wanted = LLM(executor, tokenizer).generate("Once upon a time", max_tokens=6, lora="legal").text
    client = owned.openai()
    made = client.completions.create(model="legal", prompt="Once upon a time", max_tokens=6, temperature=0)
    assert made.choices[0].text == wanted
    pieces = client.completions.create(
        model="legal", prompt="Once upon a time", max_tokens=6, temperature=0, stream=True
    )
    chunks = list(pieces)
    assert "".join(chunk.choices[0].text for chunk in chunks if chunk.choices) == wanted
    assert {chunk.model for chunk in chunks} == {"legal"}


def test_unloading(owned: Running) -> None:
    number = admin(owned, "load", lora_name="french", lora_path="french").json()["lora_int_id"]
    assert admin(owned, "unload", lora_name="french", lora_int_id=number + 1).status_code == 404
    assert admin(owned, "unload", lora_name="french").json()["deleted"] is True
    assert admin(owned, "unload", lora_name="french").status_code == 404
    with owned.http() as client:
        assert client.post("/v1/chat/completions", json={**ASK, "model": "french"}).status_code == 404
        assert [card["id"] for card in client.get("/v1/models").json()["data"]] == list(owned.service.config.names)


@pytest.mark.parametrize(
    "path",
    ["../elsewhere", "/etc", "link", "french/../../elsewhere", "nul\0", "nowhere", ".", "french/adapter_config.json"],
)
def test_no_path_leads_out_of_the_folder(owned: Running, path: str, tmp_path: Path) -> None:
    answer = admin(owned, "load", lora_name="x", lora_path=path)
    assert answer.status_code in (400, 404)
    assert str(tmp_path) not in answer.text
    assert owned.llm.executor.lora_metrics_snapshot()["loaded"] == 0


def test_only_the_owner_loads(start: Start, owned: Running, folder: Path) -> None:
    body = {"lora_name": "french", "lora_path": "french"}
    assert admin(owned, "load", key="sk-somebody", **body).status_code in (401, 403)
    assert admin(owned, "unload", key="sk-somebody", lora_name="french").status_code in (401, 403)
    with start(admin_key=ADMIN) as closed:
        answer = admin(closed, "load", lora_name="french", lora_path="french")
    assert answer.json()["error"]["code"] == "lora_dir_off"


def test_bad_adapters_and_names_are_refused_by_name(owned: Running, folder: Path) -> None:
    tensors = lora_tensors(4)
    next(iter(tensors.values()))[0, 0] = torch.nan
    save_file(tensors, write_lora(folder / "nan") / "adapter_model.safetensors")
    answer = admin(owned, "load", lora_name="nan", lora_path="nan")
    assert answer.json()["error"]["code"] == "lora_refused"
    assert "NaN" in answer.json()["error"]["message"]
    write_lora(folder / "biased", bias="lora_only")
    assert "bias" in admin(owned, "load", lora_name="biased", lora_path="biased").text
    own = owned.service.model
    assert admin(owned, "load", lora_name=own, lora_path="french").json()["error"]["code"] == "bad_name"
    admin(owned, "load", lora_name="french", lora_path="french")
    assert admin(owned, "load", lora_name="french", lora_path="legal").status_code == 400
    with owned.http() as client:
        answer = client.post("/v1/chat/completions", json={**ASK, "lora_scale": 0.5})
    assert answer.json()["error"]["param"] == "lora_scale"


def test_kv_handles_of_an_adapter_serve_its_requests_alone(owned: Running) -> None:
    admin(owned, "load", lora_name="french", lora_path="french")
    with owned.http() as client:
        made = client.post("/v1/kv", json={"prompt": "Once upon a time", "model": "french"}).json()
        assert made["maker"].endswith("@1.0")
        ask = {"prompt": " there was", "max_tokens": 3, "temperature": 0, "kv": made["id"]}
        assert client.post("/v1/completions", json={**ask, "model": "french"}).status_code == 200
        for other in ({}, {"model": "french", "lora_scale": 0.5}):
            answer = client.post("/v1/completions", json={**ask, **other})
            assert answer.status_code == 400
            assert "made with" in answer.text or "holds KV of" in answer.text
        client.delete(f"/v1/kv/{made['id']}")
