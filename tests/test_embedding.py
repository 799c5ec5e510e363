"""Embeddings in Python, and models that were trained for them: as transformers computes them, as their files say."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import write_tiny_of_bytes
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import Qwen3Config, Qwen3ForCausalLM, Qwen3Model

import kvilt
from kvilt import LLM, AsyncLLM
from kvilt.errors import ContextOverflow, InputError, ParamError, Unsupported, WeightError
from kvilt.llm.embedding_config import EmbeddingConfig, embedding_config
from kvilt.weights.source import GGUF, Checkpoint, open_checkpoint

EOS, CONTEXT = 256, 64
SIZES = {
    "vocab_size": 257,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,
}
TEXTS = ["a cat", "two dogs and a cat", "größe 大"]
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {"idx": 2, "name": "2", "path": "2_Normalize", "type": "sentence_transformers.models.Normalize"},
]
LAST = {"word_embedding_dimension": 32, "pooling_mode_mean_tokens": False, "pooling_mode_lasttoken": True}
LAST |= {"pooling_mode_cls_token": False, "pooling_mode_max_tokens": False, "include_prompt": True}
MEAN = LAST | {"pooling_mode_mean_tokens": True, "pooling_mode_lasttoken": False}
PROMPTS = {"prompts": {"query": "Query: ", "document": ""}, "default_prompt_name": None, "similarity_fn_name": "cosine"}


def write_tokenizer(folder: Path) -> None:
    """Tokens are bytes, and an end token follows each text, as in Qwen3-Embedding."""
    vocabulary = {char: i for i, char in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    core = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    core.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(["<|endoftext|>"])
    core.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(single="$A <|endoftext|>", special_tokens=[("<|endoftext|>", EOS)]),
        ]
    )
    core.save(str(folder / "tokenizer.json"))


def write(folder: Path, pooling: dict[str, Any] | None = None, modules: Any = MODULES, tied: bool = False) -> Path:
    torch.manual_seed(3)
    Qwen3Model(Qwen3Config(**SIZES, tie_word_embeddings=tied)).save_pretrained(folder)
    write_tokenizer(folder)
    if pooling is not None:
        (folder / "modules.json").write_text(json.dumps(modules))
        (folder / "1_Pooling").mkdir()
        (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "config_sentence_transformers.json").write_text(json.dumps(PROMPTS))
    return folder


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("embedding"), LAST)


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    with kvilt.load(folder, kv_memory=1 << 22, kv_dtype="float32") as one:
        yield one


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Qwen3Model:
    return Qwen3Model.from_pretrained(folder).eval()


def states(oracle: Any, text: str) -> torch.Tensor:
    """Of each token, the end token included."""
    with torch.no_grad():
        found: torch.Tensor = oracle(torch.tensor([[*ids_of(text), EOS]])).last_hidden_state[0]
    return found.double()


def ids_of(text: str) -> list[int]:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    shown = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False).pre_tokenize_str(text)[0][0]
    return [alphabet.index(char) for char in shown]


def close(found: Any, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(torch.tensor(found, dtype=torch.float64), wanted, atol=2e-5, rtol=2e-5)


# Qwen3-Embedding.


def test_an_embedding_model_is_the_oracles_last_state(llm: LLM, oracle: Qwen3Model) -> None:
    """Kept without its head, with names that have no prefix; the end token is what is pooled."""
    assert llm.embedding_config.pooling == "last"
    for one, text in zip(llm.embed(TEXTS), TEXTS, strict=True):
        last = states(oracle, text)[-1]
        close(one.values, last / last.norm())
        assert one.tokens == len(text.encode()) + 1


@pytest.mark.parametrize("dimensions", [1, 7, 32])
def test_fewer_dimensions_are_the_first_ones_at_length_one(llm: LLM, oracle: Qwen3Model, dimensions: int) -> None:
    last = states(oracle, "a cat")[-1][:dimensions]
    close(llm.embed("a cat", dimensions=dimensions).values, last / last.norm())


def test_a_prompt_stands_before_a_query(llm: LLM, oracle: Qwen3Model) -> None:
    last = states(oracle, "Query: a cat")[-1]
    close(llm.embed("a cat", prompt_name="query").values, last / last.norm())
    assert llm.embed("a cat", prompt_name="document") == llm.embed("a cat")
    with pytest.raises(ParamError, match="document, query"):
        llm.embed("a cat", prompt_name="passage")
    with pytest.raises(ParamError, match="prompt_name"):
        llm.embed([5, 6], prompt_name="query")


def test_a_cut_text_keeps_its_end_token(llm: LLM, oracle: Qwen3Model) -> None:
    long = "word " * 100
    with pytest.raises(ContextOverflow):
        llm.embed(long)
    last = states(oracle, long[: CONTEXT - 1])[-1]
    close(llm.embed(long, truncate=True).values, last / last.norm())


def test_pooling_can_be_asked_for(llm: LLM, oracle: Qwen3Model) -> None:
    mean = states(oracle, "a cat").mean(0)
    close(llm.embed("a cat", pooling="mean").values, mean / mean.norm())


def test_a_model_without_its_head_generates_nothing(llm: LLM) -> None:
    for ask in (lambda: llm.generate("a"), lambda: llm.stream("a"), lambda: llm.generate(["a", "b"])):
        with pytest.raises(InputError, match="without its head"):
            ask()


def test_a_tied_head_generates(tmp_path: Path) -> None:
    folder = write(tmp_path, LAST, tied=True)
    causal = Qwen3ForCausalLM(Qwen3Config(**SIZES, tie_word_embeddings=True)).eval()
    causal.model.load_state_dict(Qwen3Model.from_pretrained(folder).state_dict())
    causal.tie_weights()
    with kvilt.load(folder, kv_memory=1 << 22, kv_dtype="float32") as llm, torch.no_grad():
        ids = [*ids_of("a cat"), EOS]
        wanted = causal(torch.tensor([ids])).logits[0, -1].argmax()
        assert llm.generate(ids, max_tokens=1, temperature=0, ignore_eos=True).token_ids == [int(wanted)]


def test_async_and_python_agree(folder: Path, llm: LLM) -> None:
    async def embedded() -> list[Any]:
        async with kvilt.load_async(folder, kv_memory=1 << 22, kv_dtype="float32") as one:
            assert isinstance(one, AsyncLLM)
            return list(await asyncio.gather(*(one.embed(text, dimensions=9) for text in TEXTS)))

    assert asyncio.run(embedded()) == llm.embed(TEXTS, dimensions=9)


# What files say.


@pytest.mark.parametrize(
    ("pooling", "modules", "wanted"),
    [
        (MEAN, MODULES, {"pooling": "mean", "normalize": True}),
        (MEAN, MODULES[:2], {"pooling": "mean", "normalize": False}),
        ({"pooling_mode": "lasttoken"}, MODULES, {"pooling": "last", "normalize": True}),
        ({"pooling_mode": ["mean"]}, MODULES, {"pooling": "mean"}),
    ],
)
def test_modules_decide_pooling_and_length(tmp_path: Path, pooling: Any, modules: Any, wanted: dict[str, Any]) -> None:
    folder = write(tmp_path, pooling, modules)
    with open_checkpoint(folder).tensors, kvilt.load(folder, kv_memory=1 << 22, kv_dtype="float32") as llm:
        config = llm.embedding_config
        assert {name: getattr(config, name) for name in wanted} == wanted
        found = llm.embed("a cat")
        each = states(Qwen3Model.from_pretrained(folder).eval(), "a cat")
        pooled = each.mean(0) if wanted["pooling"] == "mean" else each[-1]
        close(found.values, pooled / pooled.norm() if config.normalize else pooled)
        assert found.similarity(found) == pytest.approx(1)


@pytest.mark.parametrize(
    ("pooling", "modules", "why"),
    [
        (LAST | {"pooling_mode_mean_tokens": True}, MODULES, "mean and lasttoken"),
        (LAST | {"pooling_mode_lasttoken": False, "pooling_mode_cls_token": True}, MODULES, "cls_token"),
        (LAST | {"pooling_mode_lasttoken": False}, MODULES, "nothing"),
        (LAST, [*MODULES, {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}], "Dense"),
    ],
)
def test_ways_that_are_not_computed_are_refused_by_name(tmp_path: Path, pooling: Any, modules: Any, why: str) -> None:
    folder = write(tmp_path, pooling, modules)
    with kvilt.load(folder, kv_memory=1 << 22, kv_dtype="float32") as llm:
        with pytest.raises(Unsupported, match=why):
            llm.embed("a cat")
        assert len(llm.embed("a cat", pooling="last").values) == 32, "what a caller asks for is served"


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("modules.json", "{}"),
        ("modules.json", "[1]"),
        ("modules.json", '[{"type": "x.Pooling", "path": "../1_Pooling"}]'),
        ("modules.json", '[{"type": "x.Pooling", "path": "/etc"}]'),
        ("modules.json", '[{"type": "x.Pooling"}]'),
        ("1_Pooling/config.json", "[]"),
        ("config_sentence_transformers.json", '{"prompts": ["a"]}'),
        ("config_sentence_transformers.json", '{"prompts": {"a": 5}}'),
        ("config_sentence_transformers.json", '{"default_prompt_name": "a"}'),
        ("config_sentence_transformers.json", '{"truncate_dim": "a"}'),
    ],
)
def test_files_that_are_not_what_they_should_be_are_refused(tmp_path: Path, file: str, text: str) -> None:
    folder = write(tmp_path, LAST)
    (folder / file).write_text(text)
    with open_checkpoint(folder).tensors, pytest.raises(WeightError):
        embedding_config(open_checkpoint(folder))


@pytest.mark.parametrize(
    ("said", "wanted"), [(None, "mean"), (0, "mean"), (1, "mean"), (3, "last"), (2, None), (4, None)]
)
def test_a_gguf_says_how_it_pools(said: int | None, wanted: str | None) -> None:
    metadata = {"general.architecture": "qwen3", **({} if said is None else {"qwen3.pooling_type": said})}
    found = embedding_config(Checkpoint(Path("x.gguf"), GGUF, metadata, {}, None))  # type: ignore[arg-type]
    if wanted is None:
        with pytest.raises(Unsupported, match=str(said)):
            found.pooled(None)
    else:
        assert found.pooled(None) == wanted
    assert found.pooled("last") == "last"


# Any model.


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    with kvilt.load(
        write_tiny_of_bytes(tmp_path_factory.mktemp("plain")), kv_memory=1 << 22, kv_dtype="float32"
    ) as llm:
        yield llm


def test_any_model_embeds_by_the_mean(plain: LLM) -> None:
    assert plain.embedding_config == EmbeddingConfig()
    one = plain.embed("a cat")
    assert math.hypot(*one.values) == pytest.approx(1)
    assert plain.embed(list(b"abc")) == plain.embed([list(b"abc")])[0]
    assert plain.embed([]) == []
    with pytest.raises(InputError):
        plain.embed("")


def test_scores_and_ranks_are_cosines(plain: LLM) -> None:
    query, *rest = plain.embed(["cats", *TEXTS])
    wanted = [query.similarity(one) for one in rest]
    assert plain.score("cats", TEXTS) == pytest.approx(wanted)
    found = plain.rerank("cats", TEXTS)
    assert [one.score for one in found] == pytest.approx(sorted(wanted, reverse=True))
    assert [TEXTS[one.index] for one in found] == [one.text for one in found]
    assert plain.rerank("cats", TEXTS, top_n=1) == found[:1]


def test_texts_share_steps_with_generation_and_leave_no_page(plain: LLM) -> None:
    before = plain.executor.pool.usage().used
    plain.embed([f"text {i}" for i in range(40)])
    assert plain.executor.pool.usage().used == before


@pytest.mark.parametrize("dimensions", [0, -1, 10_000])
def test_dimensions_that_are_none_are_refused(plain: LLM, dimensions: int) -> None:
    with pytest.raises(ParamError, match="dimensions"):
        plain.embed("a", dimensions=dimensions)
