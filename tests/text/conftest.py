"""Real vocabularies and independent oracles: transformers and sentencepiece."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from model_results import Shows

from kvilt.text.tokenizer import Tokenizer, from_metadata
from kvilt.weights.gguf import GGUFFile


def read_metadata(path: Path) -> dict[str, Any]:
    """The tokenizer's part of a GGUF file."""
    with GGUFFile.open(path) as file:
        return {name: value for name, value in file.metadata.items() if name.startswith("tokenizer.")}


@pytest.fixture(autouse=True)
def shown(request: pytest.FixtureRequest, shows: Shows) -> None:
    """Tests of known texts show that the calls of a format are read."""
    if request.node.originalname == "test_known_texts_whole_and_character_by_character":
        shows("tools", request.node.callspec.params["name"])


@pytest.fixture(scope="session")
def smollm2_metadata(smollm2_path: Path) -> dict[str, Any]:
    return read_metadata(smollm2_path)


@pytest.fixture(scope="session")
def smollm2(smollm2_metadata: dict[str, Any]) -> Tokenizer:
    return from_metadata(smollm2_metadata)


@pytest.fixture(scope="session")
def smollm2_oracle(smollm2_metadata: dict[str, Any]) -> Any:
    """transformers on the published settings of SmolLM2: digits one by one, then GPT-2's byte level.

    Not `AutoTokenizer(gguf_file=...)`: that path ignores `tokenizer.ggml.pre` and leaves the digit rule out, so a space
    before an Arabic digit joins the first byte of the digit.
    """
    from tokenizers import AddedToken, decoders, models, pre_tokenizers
    from tokenizers import Tokenizer as Core
    from transformers import PreTrainedTokenizerFast

    data = smollm2_metadata
    tokens, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split()) for merge in data["tokenizer.ggml.merges"]]
    core = Core(models.BPE({token: i for i, token in enumerate(tokens)}, merges))
    core.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    core.decoder = decoders.ByteLevel()
    core.add_special_tokens(
        [
            AddedToken(token, special=True, normalized=False)
            for token, kind in zip(tokens, types, strict=True)
            if kind == 3
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=core,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        unk_token="<|endoftext|>",
        chat_template=data["tokenizer.chat_template"],
    )


@pytest.fixture(scope="session")
def qwen2_metadata(qwen2_path: Path) -> dict[str, Any]:
    return read_metadata(qwen2_path)


@pytest.fixture(scope="session")
def qwen2(qwen2_metadata: dict[str, Any]) -> Tokenizer:
    return from_metadata(qwen2_metadata)


@pytest.fixture(scope="session")
def qwen2_oracle(qwen2_metadata: dict[str, Any]) -> Any:
    """transformers' own Qwen2 tokenizer on this vocabulary."""
    from tokenizers import AddedToken
    from transformers import Qwen2TokenizerFast

    data = qwen2_metadata
    tokens, types = data["tokenizer.ggml.tokens"], data["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split()) for merge in data["tokenizer.ggml.merges"]]
    vocab = {token: i for i, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind != 5}
    oracle = Qwen2TokenizerFast(vocab=vocab, merges=merges, chat_template=data["tokenizer.chat_template"])
    added = [
        AddedToken(token, special=kind == 3, normalized=False)
        for token, kind in zip(tokens, types, strict=True)
        if kind in (3, 4)
    ]
    oracle.add_tokens(added)
    return oracle


@pytest.fixture(scope="session")
def gemma3_metadata(gemma3_path: Path) -> dict[str, Any]:
    return read_metadata(gemma3_path)


@pytest.fixture(scope="session")
def gemma3(gemma3_metadata: dict[str, Any]) -> Tokenizer:
    return from_metadata(gemma3_metadata)


@pytest.fixture(scope="session")
def small_spm() -> tuple[Any, dict[str, Any]]:
    """A SentencePiece BPE model trained here, with byte fallback, and the GGUF metadata that describes it."""
    import io

    import sentencepiece

    corpus = [
        "the quick brown fox jumps over the lazy dog and the other dogs jump over the fox",
        "hello world, hello there, this is a small corpus for a small model of text",
        "def function(argument): return argument + 1",
        "Привет мир, как дела сегодня в этом мире",
        "été naïve café déjà vu, über größe straße",
    ] * 20
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus),
        model_writer=model,
        vocab_size=520,
        model_type="bpe",
        byte_fallback=True,
        character_coverage=1.0,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        control_symbols=["<|turn|>"],
        user_defined_symbols=["<tool>"],
        hard_vocab_limit=False,
        minloglevel=2,
    )
    oracle = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    return oracle, spm_metadata(model.getvalue())


def spm_metadata(serialized: bytes) -> dict[str, Any]:
    """GGUF metadata of a SentencePiece model; the token types have the same numbers in both."""
    from sentencepiece import sentencepiece_model_pb2 as proto

    model = proto.ModelProto.FromString(serialized)
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": [piece.piece for piece in model.pieces],
        "tokenizer.ggml.scores": [piece.score for piece in model.pieces],
        "tokenizer.ggml.token_type": [piece.type for piece in model.pieces],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.add_space_prefix": model.normalizer_spec.add_dummy_prefix,
    }
