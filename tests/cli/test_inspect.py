"""`kvilt inspect` on real files: numbers against independent readings, and one sentence for everything else."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import commands
import gguf
import numpy as np
import pytest
from commands import Done
from fake_hub import serving
from tiny import write_tiny, write_tiny_mixed

from kvilt.cli.inspect import cache_facts, checkpoint_facts
from kvilt.cli.inspect_view import count, plain, size
from kvilt.config import RunConfig
from kvilt.errors import BlobError
from kvilt.executor.load import load_executor
from kvilt.executor.protocol import Executor
from kvilt.ops.reference import ReferenceOps

kvilt = partial(commands.kvilt, "inspect")
kvilt_process = partial(commands.kvilt_process, "inspect")


def refused(done: Done, *says: str) -> None:
    assert done.returncode in (1, 2), done
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    for words in says:
        assert words in done.stderr


# Checkpoints.


def test_smollm2_is_shown_on_one_screen(smollm2_path: Path) -> None:
    done = kvilt_process(str(smollm2_path))
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.splitlines()) <= 24
    for words in (
        *("llama", "30 · hidden 576", "KV heads 3", "8,192 tokens", "theta 100,000", "49,152", "134.5M", "tied head"),
        *(
            "byte-level BPE (smollm)",
            "chat template",
            "45.0 KiB per token",
            "Q4_1",
            "Q8_0",
            "native",
        ),
    ):
        assert words in done.stdout, words


def test_smollm2_in_json_agrees_with_the_gguf_package(smollm2_path: Path) -> None:
    done = kvilt("--json", "--tensors", str(smollm2_path))
    assert done.returncode == 0, done.stderr
    facts: dict[str, Any] = json.loads(done.stdout)
    theirs = gguf.GGUFReader(smollm2_path).tensors
    assert facts["parameters"] == sum(int(tensor.n_elements) for tensor in theirs)
    assert facts["nbytes"] == sum(int(tensor.n_bytes) for tensor in theirs)
    assert {f["format"]: f["tensors"] for f in facts["formats"]} == {"Q4_1": 210, "Q8_0": 1, "F32": 61}
    assert [(t["name"], t["format"], t["nbytes"]) for t in facts["tensors"]] == [
        (tensor.name, tensor.tensor_type.name, int(tensor.n_bytes)) for tensor in theirs
    ]
    assert facts["model"]["context"] == 8192
    assert facts["tokenizer"] == {
        "kind": "byte-level BPE (smollm)",
        "tokens": 49152,
        "chat_template": True,
        "problem": None,
    }
    assert [(kv["dtype"], kv["token_bytes"]) for kv in facts["kv"]] == [
        ("float32", 30 * 3 * 64 * 2 * 4),
        ("float16", 30 * 3 * 64 * 2 * 2),
        ("bfloat16", 30 * 3 * 64 * 2 * 2),
        ("int8", 30 * 3 * 2 * (64 + 4)),  # and a scale for the keys and the values of each head
        ("float8_e4m3fn", 30 * 3 * 2 * (64 + 4)),
        ("k8v4", 30 * 3 * (64 + 4 + 32 + 4)),
    ]


def test_the_tensors_are_listed_only_when_asked_for(smollm2_path: Path) -> None:
    listed = kvilt("--tensors", str(smollm2_path)).stdout
    assert "blk.29.ffn_down.weight" in listed
    assert "576 × 1536" in listed
    assert "tensors" not in json.loads(kvilt("--json", str(smollm2_path)).stdout)


def test_tokens_per_gib_is_what_the_executor_reserves(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    (facts, *_) = checkpoint_facts(folder).kv
    executor = load_executor(folder, RunConfig(kv_memory=1 << 26, kv_dtype=facts.dtype))
    pages = executor.pool.pages * executor.pool.layout.page_tokens
    assert pages == facts.tokens_per_gib // 16 // 32 * 32
    assert facts.context_bytes == 256 * facts.token_bytes


def test_tokens_per_gib_of_a_model_with_windows(tmp_path: Path) -> None:
    """Window layers get fewer pages, so more tokens fit than equal groups would hold."""
    (facts, *_) = checkpoint_facts(write_tiny_mixed(tmp_path / "tiny", window=40, context=1 << 16)).kv
    assert 2 * (1 << 30) < facts.tokens_per_gib * facts.token_bytes < 3 * (1 << 30)


def test_a_folder_of_safetensors_without_a_tokenizer(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny", sliding_window=9)
    facts = checkpoint_facts(folder)
    assert (facts.container, facts.architecture) == ("safetensors", "MistralForCausalLM")
    assert facts.model is not None
    assert facts.model.attention == "window of 9"
    assert facts.kv[0].context_bytes == 8 * facts.kv[0].token_bytes
    assert [(f.format, f.backend) for f in facts.formats] == [("F32", "native")]
    assert facts.tokenizer.problem is not None
    shown = kvilt(str(folder)).stdout
    assert "window of 9" in shown
    assert "none that kvilt reads" in shown


def test_a_split_model_and_a_format_that_no_backend_runs(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv9", split_max_tensors=1)
    writer.add_name("\x1b[31mred\n[bold]")
    writer.add_tensor("plain", np.zeros((2, 256), dtype=np.float32))
    raw = np.zeros((2, 82), dtype=np.uint8)
    writer.add_tensor("packed", raw, raw_dtype=gguf.GGMLQuantizationType.IQ2_S)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    done = kvilt(str(tmp_path / "m-00002-of-00002.gguf"))
    assert done.returncode == 0, done.stderr
    assert "\x1b" not in done.stdout
    for words in ("GGUF in 2 parts", "rwkv9", "is not supported", "cannot be unpacked yet", "[bold]", "IQ2_S"):
        assert words in done.stdout, words


def test_a_format_says_its_kernel_or_what_it_takes_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "rwkv9")
    for name, bytes_ in (("Q3_K", 110), ("Q4_K", 144)):
        raw = np.zeros((8, bytes_), dtype=np.uint8)
        writer.add_tensor(name, raw, raw_dtype=gguf.GGMLQuantizationType[name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    facts = checkpoint_facts(tmp_path / "m.gguf")
    assert {one.format: (one.backend, one.expanded, one.kernel) for one in facts.formats} == {
        "Q3_K": ("native", False, "q3_k tiles"),
        "Q4_K": ("native", False, "q4_k tiles"),
    }
    shown = kvilt(str(tmp_path / "m.gguf")).stdout
    assert "native, q3_k tiles" in shown and "as float32" not in shown
    monkeypatch.setattr("kvilt.cli.inspect.select", lambda threads: ReferenceOps())
    facts = checkpoint_facts(tmp_path / "m.gguf")
    assert {one.format: (one.backend, one.expanded) for one in facts.formats} == {
        "Q3_K": ("reference", True),
        "Q4_K": ("reference", True),
    }
    shown = kvilt(str(tmp_path / "m.gguf")).stdout
    assert shown.count("as float32: 8.0 KiB") == 2


def test_a_model_of_the_hub(tmp_path: Path) -> None:
    folder = write_tiny(tmp_path / "tiny")
    with serving() as hub:
        hub.repositories["org/tiny"] = {file.name: file.read_bytes() for file in folder.iterdir()}
        env = {"HF_ENDPOINT": hub.endpoint, "HF_HOME": str(tmp_path / "hf"), "NO_PROXY": "127.0.0.1"}
        done = kvilt_process("--json", "hf:org/tiny", **env)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["model"]["layers"] == 3


# Saved caches.


@pytest.fixture
def saved(tiny: Executor, tmp_path: Path) -> Path:
    with tiny.create_kv_cache(2) as kv:
        tiny.prefill([[1, 2, 3, 4, 5], list(range(6, 27))], kv)
        kv.save(tmp_path / "two.kv")
    return tmp_path / "two.kv"


def test_a_saved_cache_is_described_without_its_model(saved: Path, tiny: Executor) -> None:
    facts = cache_facts(saved)
    assert [row.length for row in facts.rows] == [5, 21]
    assert facts.rows[0].tokens == (1, 2, 3, 4, 5)
    assert facts.rows[1].tokens == tuple(range(6, 22))
    assert facts.nbytes == saved.stat().st_size
    assert facts.identity["numerics"] == tiny.pool.ops.numerics
    assert facts.token_bytes * 32 == tiny.pool.layout.page_bytes
    done = kvilt(str(saved))
    assert done.returncode == 0, done.stderr
    for words in (
        "saved KV cache",
        "checksum ok",
        "6 7 8",
        "...",
        "2 KV heads",
        tiny.pool.ops.name,
        facts.identity["model"],
    ):
        assert words in done.stdout, words
    assert json.loads(kvilt("--json", str(saved)).stdout) == json.loads(json.dumps(asdict(facts)))


def test_a_damaged_cache_is_refused_by_field(saved: Path) -> None:
    raw = bytearray(saved.read_bytes())
    raw[-100] ^= 1
    saved.write_bytes(raw)
    with pytest.raises(BlobError) as caught:
        cache_facts(saved)
    assert caught.value.field == "checksum"
    refused(kvilt(str(saved)), "checksum", "damaged")
    saved.write_bytes(raw[:8])
    refused(kvilt(str(saved)), "too few")


# Everything else.


def test_wrong_files_get_one_sentence(tmp_path: Path) -> None:
    letter = tmp_path / "letter.gguf"
    letter.write_text("Dear reader, this is not a model. " * 100)
    refused(kvilt(str(letter)), "not a GGUF file")
    refused(kvilt(str(tmp_path / "absent.gguf")), "no file is there")
    (tmp_path / "empty").mkdir()
    refused(kvilt(str(tmp_path / "empty")), "neither a GGUF file nor")


@pytest.mark.parametrize(
    ("nbytes", "shown"),
    [(0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (3 << 20, "3.0 MiB"), (5 << 30, "5.0 GiB"), (2 << 40, "2.0 TiB")],
)
def test_sizes_are_written_for_people(nbytes: int, shown: str) -> None:
    assert size(nbytes) == shown


def test_counts_and_foreign_text_are_written_for_people() -> None:
    assert [count(n) for n in (7, 1500, 134_515_008, 7_000_000_000)] == ["7", "1.5K", "134.5M", "7.0B"]
    assert plain("a\x1b[2Jb\r\nc") == "a\ufffd[2Jb\ufffd\ufffdc"
    assert len(plain("x" * 5000)) == 200
