"""A conversation as a value: exact ids, KV that is never computed twice, and files that tell the truth."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from tiny import write_tiny

import kvilt
from kvilt import LLM, SamplingParams
from kvilt.config import RunConfig
from kvilt.errors import BlobError, ContextOverflow, InputError, TemplateError
from kvilt.executor import step_executor as executor_module
from kvilt.executor.counters import TOKENS
from kvilt.executor.load import load_executor
from kvilt.llm import conversation as module
from kvilt.llm.chat_record import ChatTurn, chat_path, ids_of, read_record, saved_chats
from kvilt.llm.conversation import Conversation
from tests.text import templates

GERMANY, JAPAN = "What is the capital of Germany?", "And of Japan?"
SHORT = SamplingParams(max_tokens=12)
HIDING = (
    "{% for m in messages if m.role == 'user' %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with kvilt.load(str(smollm2_path), kv_memory="256M", max_context=4096) as model:
        yield model
        assert model.executor.pool.usage().used == 0  # nothing below leaks a page


@pytest.fixture(scope="module")
def small(llm: LLM, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., LLM]:
    """Tiny random models behind the real vocabulary: quick, and with whatever window or KV type is asked for."""

    def make(window: int | None = None, **config: Any) -> LLM:
        folder = tmp_path_factory.mktemp("tiny")
        write_tiny(folder, sliding_window=window, vocab_size=llm.tokenizer.vocab_size, max_position_embeddings=1024)
        return LLM(load_executor(folder, RunConfig(kv_memory=1 << 22, **config)), llm.tokenizer)

    return make


def computed(llm: LLM) -> int:
    return int(sum(point["value"] for point in llm.executor.metrics.snapshot()[TOKENS.name]["series"]))


def ask(conversation: Conversation, text: str, params: SamplingParams = SHORT) -> list[int]:
    """The generated ids of one more turn."""
    assert "".join(conversation.say(text, params)) == conversation.turns[-1].assistant
    assert conversation.last is not None
    return conversation.last.token_ids


def fresh(conversation: Conversation) -> Conversation:
    """The same past without any KV."""
    return Conversation(conversation.llm, conversation.system, conversation.turns)


def with_template(llm: LLM, source: str) -> LLM:
    return LLM(llm.executor, dataclasses.replace(llm.tokenizer, chat_template=source))


# Ids.


def test_the_first_turn_has_the_ids_of_the_template(llm: LLM) -> None:
    with Conversation(llm, "You answer briefly.") as chat:
        generated = ask(chat, GERMANY)
        messages = chat.messages[:-1]
        assert [message["role"] for message in messages] == ["system", "user"]
        assert chat.ids == [*llm.chat_template.encode(llm.tokenizer, messages), *generated]
        assert generated == llm.chat(messages, SHORT).token_ids


def test_a_later_turn_computes_only_what_is_new(llm: LLM) -> None:
    with Conversation(llm) as chat:
        ask(chat, GERMANY)
        before, past = computed(llm), chat.ids
        generated = ask(chat, JAPAN)
        assert chat.last is not None
        usage = chat.last.usage
        assert usage.cached_tokens == len(past) - 1
        assert chat.ids[: len(past)] == past
        # The last token of an answer is never an input.
        assert computed(llm) - before == usage.prompt_tokens - usage.cached_tokens + len(generated) - 1
        assert chat.missing == 1
        with fresh(chat) as other:
            other.undo()
            assert ask(other, JAPAN) == generated
            assert other.last is not None
            assert other.last.usage.cached_tokens == 0


STYLES = {name: getattr(templates, name) for name in ("LLAMA3", "GEMMA", "MISTRAL", "QWEN3")}


@pytest.mark.parametrize("style", ["own", *STYLES])
def test_all_turns_together_read_as_the_template_writes_them(llm: LLM, style: str) -> None:
    styled = llm if style == "own" else with_template(llm, STYLES[style])
    with Conversation(styled) as chat:
        for question in (GERMANY, "Say <|im_end|> twice.", JAPAN):
            ask(chat, question, SamplingParams(max_tokens=5))
        assert chat.last is not None
        assert chat.last.usage.cached_tokens > chat.last.usage.prompt_tokens / 2
        *said, last = chat.messages
        prompt = chat.ids[: -len(chat.last.token_ids)]
        shown = styled.tokenizer.decode(prompt, skip_special=False)
        expected = styled.chat_template.render(said)
        if style in ("own", "QWEN3"):  # the others add or trim spaces, and generated ids are kept as they are
            assert shown == expected
        assert "".join(shown.split()) == "".join(expected.split())
        assert last["content"] == chat.turns[-1].assistant


def test_generated_ids_are_kept_where_their_text_would_be_cut_another_way(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    prompt = llm.chat_template.encode(tokenizer, [{"role": "user", "content": GERMANY}])
    odd = [token for letter in "Berlin" for token in tokenizer.encode(letter, add_special=False)]
    assert odd != tokenizer.encode("Berlin", add_special=False)
    with Conversation(llm, turns=[ChatTurn(GERMANY, "Berlin", 0, (*prompt, *odd))]) as chat:
        ask(chat, JAPAN, SamplingParams(max_tokens=2))
        assert chat.ids[: len(prompt) + len(odd) + 1] == [*prompt, *odd, tokenizer.id_of("<|im_end|>")]


def test_a_turn_ends_with_the_token_that_the_template_writes(llm: LLM) -> None:
    tokenizer = llm.tokenizer
    prompt = llm.chat_template.encode(tokenizer, [{"role": "user", "content": GERMANY}])
    other, own = tokenizer.id_of("<|endoftext|>"), tokenizer.id_of("<|im_end|>")
    assert {other, own} <= llm.stop_ids
    for end in (other, own):
        with Conversation(llm, turns=[ChatTurn(GERMANY, "Rome", 0, (*prompt, 51, end))]) as chat:
            ask(chat, JAPAN, SamplingParams(max_tokens=2))
            assert other not in chat.ids
            assert chat.ids[len(prompt) : len(prompt) + 2] == [51, own]
            assert ids_of(chat.turns[:1])[-1] == end  # the past turn is as it was


def test_a_template_that_hides_answers_is_followed_by_the_longest_common_prefix(llm: LLM) -> None:
    hiding = with_template(llm, HIDING)
    with Conversation(hiding) as chat:
        ask(chat, GERMANY)
        first = chat.ids
        ask(chat, JAPAN)
        assert chat.last is not None
        prompt = hiding.chat_template.encode(hiding.tokenizer, [m for m in chat.messages if m["role"] == "user"])
        assert chat.ids == [*prompt, *chat.last.token_ids]
        shared = hiding.chat_template.encode(
            hiding.tokenizer, [{"role": "user", "content": GERMANY}], add_generation_prompt=False
        )
        assert chat.last.usage.cached_tokens == chat.turns[1].kept == len(shared) + 1  # and <|im_start|>
        chat.undo()
        assert chat.ids == first


# The verbs.


def test_undo_and_the_same_question_give_the_same_answer(llm: LLM) -> None:
    with Conversation(llm) as chat:
        ask(chat, GERMANY)
        past = chat.ids
        answer, all_ids = ask(chat, JAPAN), chat.ids
        before = computed(llm)
        assert chat.undo().user == JAPAN
        assert computed(llm) == before
        assert (chat.ids, chat.missing) == (past, 0)
        assert ask(chat, "Tell me a joke.") != answer
        chat.undo()
        assert ask(chat, JAPAN) == answer
        assert chat.ids == all_ids
        chat.undo()
        chat.undo()
        assert (chat.ids, chat.held, chat.messages) == ([], 0, [])
        with pytest.raises(InputError, match="nothing to undo"):
            chat.undo()


def test_forks_do_not_see_each_other(llm: LLM) -> None:
    with Conversation(llm) as chat:
        ask(chat, GERMANY)
        pages, before = llm.executor.pool.usage().used, computed(llm)
        with chat.fork() as other:
            assert llm.executor.pool.usage().used == pages
            assert computed(llm) == before
            there, here = ask(other, "Tell me a joke."), ask(chat, JAPAN)
            for one, answer in ((other, there), (chat, here)):
                with fresh(one) as alone:
                    alone.undo()
                    assert ask(alone, one.turns[-1].user) == answer
        assert [turn.user for turn in chat.turns] == [GERMANY, JAPAN]


def test_clear_and_restart_keep_nothing_that_was_said(llm: LLM) -> None:
    with Conversation(llm, "Be kind.") as chat:
        ask(chat, GERMANY)
        chat.clear()
        assert (chat.messages, chat.held) == ([{"role": "system", "content": "Be kind."}], 0)
        ask(chat, GERMANY)
        chat.restart("Be brief.")
        assert (chat.messages, chat.held) == ([{"role": "system", "content": "Be brief."}], 0)
        assert llm.executor.pool.usage().used == 0


# Interruptions and errors.


@pytest.mark.parametrize("pieces", [1, 4])
@pytest.mark.parametrize("how", ["close", "stop"])
def test_an_interrupted_answer_stays_and_the_chat_goes_on_from_it(llm: LLM, pieces: int, how: str) -> None:
    with Conversation(llm) as chat:
        answer = chat.say("Count from 1 to 20.", SamplingParams(max_tokens=60))
        shown = [next(answer) for _ in range(pieces)]
        if how == "close":
            answer.close()
        else:
            chat.stop()
            chat.stop()  # an impatient user
            assert list(answer) == []
        assert chat.last is not None
        assert chat.last.finish_reason == "cancelled"
        assert len(chat.last.token_ids) == pieces
        assert chat.turns[0].assistant == "".join(shown)
        assert chat.missing == 1
        went_on = ask(chat, JAPAN)
        with fresh(chat) as other:
            other.undo()
            assert ask(other, JAPAN) == went_on
            assert other.ids == chat.ids


def stop_at_layer(chat: Conversation, monkeypatch: pytest.MonkeyPatch, which: int) -> None:
    """Stop as Ctrl+C does: in the middle of a forward, before the `which`-th layer from here."""
    observe, seen = executor_module.observe, []

    def observed(stop: threading.Event) -> None:
        seen.append(stop)
        if len(seen) == which:
            chat.stop()
        observe(stop)

    monkeypatch.setattr(executor_module, "observe", observed)
    monkeypatch.setattr(chat.llm.executor._replay, "_recorder", None)  # a replayed step has no layers to be seen


@pytest.mark.parametrize("layer", [1, 3, 4, 6])
def test_a_question_without_one_token_of_answer_is_taken_back(
    small: Callable[..., LLM], monkeypatch: pytest.MonkeyPatch, layer: int
) -> None:
    """The stop comes while the prompt is computed, which takes two steps of three layers."""
    llm = small()
    with Conversation(llm) as chat:
        ask(chat, "one")
        past = chat.ids
        stop_at_layer(chat, monkeypatch, layer)
        assert list(chat.say("word " * 700, SHORT)) == []
        monkeypatch.undo()
        assert (chat.ids, chat.missing) == (past, 1)
        went_on = ask(chat, "two")
        with fresh(chat) as other:
            other.undo()
            assert ask(other, "two") == went_on
    assert llm.executor.pool.usage().used == 0


def test_a_step_that_is_cancelled_half_way_leaves_the_chat_whole(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    with Conversation(llm) as chat:
        whole = ask(chat, GERMANY)
        chat.undo()
        stop_at_layer(chat, monkeypatch, 3 * 30 + 11)
        list(chat.say(GERMANY, SHORT))
        monkeypatch.undo()
        assert chat.last is not None
        assert chat.last.finish_reason == "cancelled"
        assert chat.last.token_ids == whole[:3]
        went_on = ask(chat, JAPAN)
        with fresh(chat) as other:
            other.undo()
            assert ask(other, JAPAN) == went_on


def test_an_error_leaves_the_conversation_as_it_was(llm: LLM) -> None:
    with Conversation(llm) as chat:
        ask(chat, GERMANY)
        past = chat.ids
        with pytest.raises(ContextOverflow):
            list(chat.say("word " * 4100))
        assert (chat.ids, chat.missing) == (past, 1)
        ask(chat, JAPAN)
        assert chat.last is not None
        assert chat.last.usage.cached_tokens == len(past) - 1
    refusing = with_template(llm, "{{ raise_exception('No.') }}")
    with Conversation(refusing) as chat, pytest.raises(TemplateError, match="No"):
        list(chat.say(GERMANY))


def test_where_a_window_forgot_too_much_undo_says_so_and_the_next_answer_computes_again(
    small: Callable[..., LLM],
) -> None:
    llm = small(window=9)
    params = SamplingParams(max_tokens=80, ignore_eos=True)
    with Conversation(llm) as chat:
        first = ask(chat, "one", SamplingParams(max_tokens=20))
        answer = ask(chat, "two", params)
        chat.undo()
        assert (chat.held, chat.missing) == (0, len(chat.ids))
        assert ask(chat, "two", params) == answer
        chat.undo()
        chat.undo()
        assert ask(chat, "one", SamplingParams(max_tokens=20)) == first
    assert llm.executor.pool.usage().used == 0


# Files.


def test_a_saved_conversation_goes_on_where_it_was(llm: LLM, tmp_path: Path) -> None:
    path = chat_path(tmp_path, "one")
    with Conversation(llm, "You answer briefly.") as chat:
        ask(chat, GERMANY)
        written = chat.save(path, "a model")
        assert written == sum(file.stat().st_size for file in tmp_path.iterdir())
        loaded = Conversation.load(llm, path)
        with loaded.conversation as other:
            assert loaded.computed == 0
            assert (other.messages, other.ids, other.held) == (chat.messages, chat.ids, chat.held)
            assert ask(other, JAPAN) == ask(chat, JAPAN)
            assert other.last is not None
            assert other.last.usage.cached_tokens == len(ids_of(chat.turns[:1])) - 1
    assert saved_chats(tmp_path) == ["one"]
    assert read_record(path).label == "a model"


def test_saving_again_replaces_both_files_and_a_crash_between_them_neither(
    small: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, path = small(), chat_path(tmp_path, "one")
    with Conversation(llm) as chat:
        ask(chat, "one")
        chat.save(path)
        ask(chat, "two")
        monkeypatch.setattr(module, "write_record", _fail)
        with pytest.raises(OSError, match="disk is full"):
            chat.save(path)
        monkeypatch.undo()
        with Conversation.load(llm, path).conversation as old:
            assert [turn.user for turn in old.turns] == ["one"]
            assert old.missing == 1
        chat.save(path)
        chat.save(path)
        assert {found.name for found in tmp_path.iterdir()} == {"one.json", read_record(path).kv}
        with Conversation.load(llm, path).conversation as new:
            assert new.ids == chat.ids


def _fail(*_: object) -> None:
    raise OSError(28, "the disk is full")


def test_nothing_is_saved_before_anything_is_said(small: Callable[..., LLM], tmp_path: Path) -> None:
    with Conversation(small()) as chat, pytest.raises(InputError, match="nothing has been said"):
        chat.save(tmp_path / "one.json")
    assert list(tmp_path.iterdir()) == []


def test_kv_of_other_numerics_is_computed_again(
    small: Callable[..., LLM], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    llm, path = small(), tmp_path / "one.json"
    identity = llm.executor.pool.identity()
    with Conversation(llm) as chat:
        ask(chat, "one")
        with monkeypatch.context() as elsewhere:
            elsewhere.setattr(
                llm.executor.pool, "identity", lambda: dataclasses.replace(identity, numerics="another machine")
            )
            chat.save(path)
        before = computed(llm)
        loaded = Conversation.load(llm, path)
        with loaded.conversation as other:
            assert loaded.computed == computed(llm) - before == chat.held
            assert ask(other, "two") == ask(chat, "two")


def test_kv_of_another_type_is_a_miss_and_of_another_model_an_error(
    small: Callable[..., LLM], llm: LLM, tmp_path: Path
) -> None:
    path = tmp_path / "one.json"
    with Conversation(small()) as chat:
        ask(chat, "one")
        chat.save(path, "tiny")
        loaded = Conversation.load(small(kv_dtype="bfloat16"), path)
        with loaded.conversation as other:
            assert (other.ids, other.held, other.missing) == (chat.ids, 0, len(chat.ids))
            ask(other, "two")
    with pytest.raises(BlobError, match=r"'tiny'.*another model"):
        Conversation.load(llm, path)


Damage = Callable[[dict[str, Any], Path], None]
DAMAGES: dict[str, tuple[str, Damage]] = {
    "a format of tomorrow": ("format", lambda record, kv: record.update(format=2)),
    "no model": ("model", lambda record, kv: record.pop("model")),
    "a system that is a number": ("system", lambda record, kv: record.update(system=3)),
    "no turns": ("turns", lambda record, kv: record.update(turns=[])),
    "a turn that is a text": ("turns", lambda record, kv: record.update(turns=["hello"])),
    "a turn without a question": ("user", lambda record, kv: record["turns"][0].pop("user")),
    "a turn on nothing": ("turns.kept", lambda record, kv: record["turns"][0].update(kept=1)),
    "a negative id": ("turns.ids", lambda record, kv: record["turns"][0].update(ids=[-1])),
    "an id that is true": ("turns.ids", lambda record, kv: record["turns"][0].update(ids=[True])),
    "an id past the vocabulary": ("turns.ids", lambda record, kv: record["turns"][0]["ids"].append(1 << 40)),
    "other tokens": ("kv", lambda record, kv: record["turns"][0]["ids"].reverse()),
    "fewer tokens than KV": ("kv", lambda record, kv: record["turns"][0].update(ids=record["turns"][0]["ids"][:3])),
    "a path out of the folder": ("kv", lambda record, kv: record.update(kv="../one.0123456789abcdef.kv")),
    "the KV of another chat": ("kv", lambda record, kv: record.update(kv="two.0123456789abcdef.kv")),
    "KV that is gone": ("kv", lambda record, kv: kv.unlink()),
    "KV that is a link": ("kv", lambda record, kv: kv.rename(kv.with_name("x")) and kv.symlink_to(kv.with_name("x"))),
    "KV cut short": ("checksum", lambda record, kv: kv.write_bytes(kv.read_bytes()[:-1]) and None),
    "one flipped bit": ("checksum", lambda record, kv: _flip(kv)),
    "KV that is a letter": ("magic", lambda record, kv: kv.write_text("Dear reader, " * 20) and None),
}


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("what", DAMAGES)
def test_a_damaged_chat_is_refused_by_name(saved: tuple[LLM, Path], tmp_path: Path, what: str) -> None:
    llm, folder = saved
    for file in folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "one.json"
    record = json.loads(path.read_bytes())
    field, damage = DAMAGES[what]
    damage(record, tmp_path / record["kv"])
    path.write_text(json.dumps(record))
    with pytest.raises(BlobError) as caught:
        Conversation.load(llm, path)
    assert caught.value.field == field
    assert llm.executor.pool.usage().used == 0


@pytest.mark.parametrize("data", [b"", b"{", b"[]", b'{"format": 1, "format": 1}', b"\xff\xfe", b"[" * 100_000])
def test_a_file_that_is_no_record_is_refused(saved: tuple[LLM, Path], tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "one.json"
    path.write_bytes(data)
    with pytest.raises(BlobError, match=r"one\.json"):
        Conversation.load(saved[0], path)
    (tmp_path / "link.json").symlink_to(path)
    with pytest.raises(BlobError, match="link"):
        Conversation.load(saved[0], tmp_path / "link.json")
    with pytest.raises(InputError, match="no saved chat 'none'"):
        Conversation.load(saved[0], tmp_path / "none.json")


@pytest.fixture(scope="module")
def saved(small: Callable[..., LLM], tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, Path]:
    """A model and the folder of a sound chat with it."""
    llm, folder = small(), tmp_path_factory.mktemp("saved")
    with Conversation(llm) as chat:
        ask(chat, "one")
        chat.save(folder / "one.json")
    return llm, folder


@pytest.mark.parametrize(
    "name",
    ["", ".", "..", ".hidden", "a/b", "../a", "/etc/passwd", "a\\b", "a\0b", "a b", "a\n", "-x", "x" * 65, "a:b"],
)
def test_a_name_never_leads_out_of_the_folder(name: str, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no name for a chat"):
        chat_path(tmp_path, name)


@pytest.mark.parametrize("name", ["a", "draft-2", "été", "v1.0", "_x", "x" * 64])
def test_an_ordinary_name_is_a_file_of_that_name(name: str, tmp_path: Path) -> None:
    assert chat_path(tmp_path, name) == tmp_path / f"{name}.json"


# Another process.

CONTINUE = """
import json, sys
from pathlib import Path
import kvilt
from kvilt import SamplingParams
from kvilt.llm.conversation import Conversation
from kvilt.executor.counters import TOKENS
model, path, question = sys.argv[1:]
with kvilt.load(model, kv_memory="256M", max_context=4096) as llm:
    loaded = Conversation.load(llm, Path(path))
    with loaded.conversation as chat:
        for _ in chat.say(question, SamplingParams(max_tokens=12)):
            pass
        series = llm.executor.metrics.snapshot()[TOKENS.name]["series"]
        print(json.dumps({
            "tokens": chat.last.token_ids,
            "prompt": chat.last.usage.prompt_tokens,
            "cached": chat.last.usage.cached_tokens,
            "computed": sum(point["value"] for point in series),
        }))
"""


@pytest.mark.slow
def test_a_chat_of_2000_tokens_reopened_in_a_new_process_computes_only_what_is_new(
    llm: LLM, smollm2_path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = " ".join(f"The box number {i} holds {i % 7} red pens." for i in range(160))
    path = tmp_path / "long.json"
    with Conversation(llm) as chat:
        ask(chat, f"{words}\nHow many boxes are there?")
        held = len(chat.ids)
        chat.save(path)
        here = ask(chat, "What colour are the pens?")
    done = subprocess.run(
        [sys.executable, "-c", CONTINUE, str(smollm2_path), str(path), "What colour are the pens?"],
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "KVILT_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    there = json.loads(done.stdout)
    with capsys.disabled():
        sys.stdout.write(
            f"\na chat of {held} tokens, reopened: {there['cached']} reused, {there['prompt'] - there['cached']} new "
            f"in the prompt, {len(there['tokens'])} generated; {there['computed']} computed in all\n"
        )
    assert held >= 2000
    assert there["tokens"] == here
    assert there["cached"] == held - 1
    assert there["computed"] == there["prompt"] - there["cached"] + len(here) - 1 < 60


def test_variables_of_the_template_hold_for_every_turn(small: Callable[..., LLM]) -> None:
    plain = small()
    template = "{% for m in messages %}{{ m.content }}{% endfor %}{% if not thinks %}<|im_end|>{% endif %}"
    own = LLM(plain.executor, dataclasses.replace(plain.tokenizer, chat_template=template))
    end = own.tokenizer.id_of("<|im_end|>")
    with Conversation(own, template_kwargs={"thinks": True, "unread": 1}) as chat:
        list(chat.say("Hello", SHORT))
        assert chat.turns[0].ids[: len(own.tokenizer.encode("Hello"))] == tuple(own.tokenizer.encode("Hello"))
        with chat.fork() as other:
            assert other.template_kwargs == chat.template_kwargs
            assert end not in other._prompt("again")[-2:]
    own.close()
