"""The terminal as people use it: what is printed where, and with which exit code."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from commands import ONE_THREAD, Done, kvilt, kvilt_process
from gguf import GGUFWriter

from kvilt import load
from kvilt.cli.template_options import read_template_options
from kvilt.errors import ParamError

KVILT = [sys.executable, "-m", "kvilt"]


GREEDY = ("--temperature", "0")


def refused(done: Done, *says: str) -> None:
    """One clear sentence, exit code 1 or 2, nothing on stdout, no traceback."""
    assert done.returncode in (1, 2), done
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for words in says:
        assert words in done.stderr


@pytest.fixture(scope="module")
def model(smollm2_path: Path) -> str:
    return str(smollm2_path)


def test_run_streams_text_to_stdout_and_numbers_to_stderr(model: str) -> None:
    done = kvilt_process("run", "--raw", "The capital of France is", "--model", model, "--max-tokens", "3", *GREEDY)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(" Paris")
    assert len(done.stderr.strip().splitlines()) == 1
    assert "5 prompt tokens" in done.stderr
    assert "3 generated" in done.stderr
    assert "tok/s" in done.stderr


def test_run_reads_a_pipe_and_answers_in_json(model: str) -> None:
    asked = ("run", "--json", "--model", model, "--max-tokens", "40", *GREEDY)
    done = kvilt_process(*asked, stdin="What is the capital of Germany?\n")
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert "Berlin" in answer["text"]
    assert answer["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == len(answer["token_ids"])
    assert set(answer["timing"]) == {"first_token_s", "total_s", "load_s", "tokens_per_s"}
    assert answer["seed"] is None


SAMPLED = ("--temperature", "1.5", "--seed", "3", "--max-tokens", "4", "--min-tokens", "4")


def test_several_samples_are_numbered_blocks_or_a_list(model: str) -> None:
    asked = ("run", "--raw", "Once upon a time", "--model", model, "-n", "3", *SAMPLED)
    as_json = kvilt(*asked, "--json", "--logprobs", "2", "--typical-p", "0.95")
    assert as_json.returncode == 0, as_json.stderr
    answer = json.loads(as_json.stdout)
    assert len(set(answer["texts"])) == 3
    assert answer["texts"] == [answer["text"], *(other["text"] for other in answer["alternatives"])]
    for sample in (answer, *answer["alternatives"]):
        assert [entry["token"] for entry in sample["logprobs"]] == sample["token_ids"]
        assert all(len(entry["top_ids"]) == len(entry["top_logprobs"]) == 2 for entry in sample["logprobs"])
        assert len(sample["token_ids"]) == 4
    plain = kvilt(*asked, "--typical-p", "0.95", "--presence-penalty", "0", "--frequency-penalty", "0")
    assert plain.stdout == "\n\n".join(f"[{i}]\n{text}" for i, text in enumerate(answer["texts"], start=1)) + "\n"
    assert "12 generated" in plain.stderr


def test_an_answer_follows_a_schema_a_pattern_or_a_choice(model: str, tmp_path: Path) -> None:
    schema = tmp_path / "schema.json"
    digit = {"type": "integer", "minimum": 0, "maximum": 9}  # so that every answer is short, whatever is drawn
    schema.write_text(
        json.dumps({"type": "object", "properties": {"n": digit}, "required": ["n"], "additionalProperties": False})
    )
    asked = ("run", "--model", model, "--max-tokens", "60", "Two and two?")
    done = kvilt(*asked, "--json-schema", str(schema))
    assert isinstance(json.loads(done.stdout)["n"], int), done.stderr
    schema.write_text(json.dumps({"type": "object", "properties": {"n": digit}, "required": ["n"], "x-order": 1}))
    closed = kvilt(*asked, "--json-schema", str(schema), "--close-objects")
    assert json.loads(closed.stdout).keys() == {"n"}, closed.stderr
    assert "note: the keyword 'x-order' is not known and has no effect at #" in closed.stderr
    assert kvilt(*asked, "--regex", "[0-9]").stdout.strip().isdigit()
    assert kvilt(*asked, "--choice", "four", "--choice", "five").stdout.strip() in ("four", "five")
    grammar = tmp_path / "answer.gbnf"
    grammar.write_text('root ::= "f" ("our" | "ive")')
    assert kvilt(*asked, "--gbnf", str(grammar)).stdout.strip() in ("four", "five")


def test_a_grammar_that_cannot_be_is_refused(model: str, tmp_path: Path) -> None:
    odd = tmp_path / "schema.json"
    odd.write_text('{"contains": {}}')
    refused(kvilt("run", "hi", "--model", model, "--json-schema", str(odd)), "the keyword 'contains' is not supported")
    refused(kvilt("run", "hi", "--json-schema", str(tmp_path / "absent.json")), "json_schema", "absent.json")
    refused(kvilt("run", "hi", "--regex", "a", "--json-object"), "second grammar")
    refused(kvilt("run", "hi", "--close-objects"), "--json-schema")


def test_verbose_names_the_model_and_the_backend(model: str) -> None:
    done = kvilt("run", "Hi", "--model", model, "--max-tokens", "2", "-v", "--system", "Be brief.")
    assert done.returncode == 0, done.stderr
    assert "llama, 30 layers" in done.stderr
    assert "native" in done.stderr


def test_a_reader_that_leaves_is_no_traceback(model: str) -> None:
    with subprocess.Popen(
        [*KVILT, "run", "Tell me a story.", "--model", model, "--max-tokens", "40"],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **ONE_THREAD},
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.read(1)
        process.stdout.close()
        assert "Traceback" not in process.stderr.read()


def test_missing_file() -> None:
    refused(kvilt_process("run", "Hi", "--model", "./nothing-here.gguf"), "nothing-here.gguf")


def test_an_unknown_name() -> None:
    refused(kvilt("run", "Hi", "--model", "llama9"), "llama9", "smollm2")


def test_not_a_gguf(tmp_path: Path) -> None:
    path = tmp_path / "letter.gguf"
    path.write_text("Dear reader, this is not a model. " * 100)
    refused(kvilt("run", "Hi", "--model", str(path)), "magic")


def test_a_truncated_gguf(tmp_path: Path, model: str) -> None:
    path = tmp_path / "half.gguf"
    with Path(model).open("rb") as whole:
        path.write_bytes(whole.read(50_000_000))
    refused(kvilt("run", "Hi", "--model", str(path)), "cut short")


def test_a_wrong_architecture(tmp_path: Path) -> None:
    writer = GGUFWriter(tmp_path / "other.gguf", "rwkv9")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    refused(kvilt("run", "Hi", "--model", str(tmp_path / "other.gguf")), "rwkv9", "nearest that is known")


def test_a_prompt_longer_than_the_context(model: str) -> None:
    done = kvilt("run", "--model", model, "--max-context", "64", stdin="word " * 200)
    refused(done, "tokens is needed and the context holds 64", "shorten the prompt")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("--temperature", "nan"),
        ("--top-p", "2"),
        ("--top-k", "-1"),
        ("--max-tokens", "0"),
        ("--stop", ""),
        ("--typical-p", "0"),
        ("--min-tokens", "9999"),
        ("--presence-penalty", "3"),
        ("--frequency-penalty", "-3"),
        ("--logprobs", "2"),
        ("-n", "0"),
    ],
)
def test_a_bad_sampling_value_is_refused_before_the_model_is_loaded(option: str, value: str) -> None:
    done = kvilt("run", "Hi", option, value, "--model", "./never-opened.gguf")
    refused(done, option.strip("-").replace("-", "_"))
    assert "never-opened" not in done.stderr


def test_a_bad_number_of_threads_is_named(model: str) -> None:
    refused(kvilt("run", "Hi", "--model", model, KVILT_THREADS="many"), "KVILT_THREADS")


def test_an_empty_pipe() -> None:
    refused(kvilt("run", stdin="  \n"), "empty")


def test_offline_and_not_there(tmp_path: Path) -> None:
    refused(kvilt("pull", "smollm2", KVILT_HOME=str(tmp_path), KVILT_OFFLINE="1"), "KVILT_OFFLINE")


def test_pull_prints_where_the_model_is(model: str) -> None:
    done = kvilt("pull", "smollm2")
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).samefile(model)


# Drawing.


def test_run_draws_with_a_seed_that_repeats_the_answer(model: str) -> None:
    asked = ("run", "--raw", "Once upon a time", "--model", model, "--max-tokens", "16", "--temperature", "3")
    answers = [json.loads(kvilt(*asked, "--json").stdout) for _ in range(2)]
    assert answers[0]["seed"] != answers[1]["seed"]
    assert answers[0]["text"] != answers[1]["text"]
    again = kvilt(*asked, "-v", "--seed", str(answers[0]["seed"]))
    assert again.stdout == answers[0]["text"] + "\n"
    assert f"seed {answers[0]['seed']}" in again.stderr


def test_run_says_how_it_draws_by_default(model: str) -> None:
    done = kvilt("run", "Hi", "--model", model, "--max-tokens", "1", "-v")
    assert re.search(r"^sampling: temperature .* \(kvilt's defaults\) · seed \d+$", done.stderr, re.MULTILINE)


def test_temperature_0_is_what_the_library_says_without_settings(model: str) -> None:
    done = kvilt("run", "--raw", "Count: 1, 2, 3,", "--model", model, "--max-tokens", "12", *GREEDY, KVILT_THREADS="1")
    with load(model, kv_memory="64M", threads=1) as llm:
        assert done.stdout == llm.generate("Count: 1, 2, 3,", max_tokens=12).text + "\n"


@pytest.mark.parametrize(
    ("given", "found"),
    [
        ([], {}),
        (["enable_thinking=false", "reasoning_effort=high"], {"enable_thinking": False, "reasoning_effort": "high"}),
        (["a=1", 'b="1"', "c={}", "d=x=y", "e="], {"a": 1, "b": "1", "c": {}, "d": "x=y", "e": ""}),
    ],
)
def test_template_options_are_json_or_text(given: list[str], found: dict[str, object]) -> None:
    assert read_template_options(given) == found


@pytest.mark.parametrize("given", [["x"], ["=1"], ["a b=1"], ["a=1", "a=2"]])
def test_bad_template_options_are_refused(given: list[str]) -> None:
    with pytest.raises(ParamError, match="template_option"):
        read_template_options(given)


def test_template_options_reach_the_template(model: str) -> None:
    asked = ("run", "Hi", "--model", model, "--max-tokens", "1")
    done = kvilt_process(*asked, "--template-option", "enable_thinking=false")
    assert done.returncode == 0, done.stderr
    refused(kvilt_process(*asked, "--template-option", "messages=[]"), "messages", "set by kvilt")
    refused(kvilt_process(*asked, "--raw", "--template-option", "a=1"), "chat template")


def test_quantize_writes_a_model_that_answers(smollm2_path: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text("The lighthouse stands on a rock. Its keeper writes letters to his sister. " * 4)
    out = tmp_path / "small.gguf"
    done = kvilt("quantize", str(smollm2_path), str(out), "--type", "Q4_0", "--imatrix", str(text))
    assert done.returncode == 0, done.stderr
    assert "210 Q4_0" in done.stdout
    assert "quantized already (Q4_1, Q8_0)" in done.stderr
    answer = kvilt("run", "-m", str(out), "What is the capital of France?", "--max-tokens", "12", "--temperature", "0")
    assert "Paris" in answer.stdout
    refused = kvilt("quantize", str(smollm2_path), str(tmp_path), "--type", "Q4_0")
    assert "is a folder" in refused.stderr
    itself = kvilt("quantize", str(out), str(out), "--type", "Q8_0")
    assert "must not be the file that is read" in itself.stderr
