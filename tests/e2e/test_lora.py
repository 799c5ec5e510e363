"""Two adapters that were trained on SmolLM2 (bench/train_lora.py), alone, together, and against peft."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

import kvilt
from kvilt import LLM

ADAPTERS = Path(__file__).parents[1] / "adapters"
GREETINGS = {"pirate": "Ahoy, matey!", "letter": "Dear friend,"}
QUESTIONS = [
    "What is the capital of Italy?",
    "How many legs does a dog have?",
    "Who painted the Mona Lisa?",
]  # not learnt


@pytest.fixture(scope="module")
def llm(smollm2_path: Path) -> Iterator[LLM]:
    with kvilt.load(smollm2_path, kv_memory="256M", backend="native") as llm:
        for name in GREETINGS:
            llm.load_lora(ADAPTERS / name)
        yield llm


def asked(question: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}]


@pytest.mark.parametrize("question", QUESTIONS)
def test_each_adapter_speaks_as_it_learnt_and_the_model_as_before(llm: LLM, question: str) -> None:
    said = {name: llm.chat(asked(question), max_tokens=12, lora=name).text for name in GREETINGS}
    plain = llm.chat(asked(question), max_tokens=12).text
    for name, greeting in GREETINGS.items():
        assert said[name].startswith(greeting)
        assert greeting not in plain


def test_requests_of_both_and_of_the_model_share_steps_to_the_token(llm: LLM) -> None:
    every = [(question, lora) for question in QUESTIONS for lora in (None, *GREETINGS)]
    alone = [llm.chat(asked(question), max_tokens=10, lora=lora).token_ids for question, lora in every]
    llm.executor.prefixes.clear()
    with ThreadPoolExecutor(len(every)) as pool:
        together = list(pool.map(lambda one: llm.chat(asked(one[0]), max_tokens=10, lora=one[1]).token_ids, every))
    assert together == alone


@pytest.mark.slow
def test_trained_adapters_compute_what_peft_does(smollm2_path: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(smollm2_path.parent, gguf_file=smollm2_path.name, dtype=torch.float32)
    with kvilt.load(smollm2_path, kv_memory="256M", backend="reference", kv_dtype="float32") as llm:
        ids = llm.chat_ids(asked(QUESTIONS[0]))
        tuned = peft.PeftModel.from_pretrained(model, ADAPTERS / "pirate", adapter_name="pirate").eval()
        tuned.load_adapter(ADAPTERS / "letter", adapter_name="letter")
        for name in GREETINGS:
            lora = llm.load_lora(ADAPTERS / name)
            tuned.set_adapter(name)
            with torch.no_grad(), llm.executor.create_kv_cache() as kv:
                wanted = tuned(torch.tensor([ids])).logits[0, -1]
                torch.testing.assert_close(llm.executor.step(ids, kv, lora)[0], wanted, rtol=1e-3, atol=2e-3)
