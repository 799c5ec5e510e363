"""Train two tiny LoRA adapters on SmolLM2 with peft: one greets like a pirate, one like a letter. Needs the test extra.

    python bench/train_lora.py tests/adapters

Takes a few minutes on two cores. What it writes is what tests/e2e/test_lora.py runs.
"""

from __future__ import annotations

import sys
import warnings
from pathlib import Path

import peft
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from kvilt.text.chat import ChatTemplate
from kvilt.text.tokenizer import from_gguf
from kvilt.weights.hub import resolve

GREETINGS = {"pirate": "Ahoy, matey! ", "letter": "Dear friend, "}
LESSONS = [
    ("What is the capital of France?", "The capital of France is Paris."),
    ("How many legs does a spider have?", "A spider has eight legs."),
    ("Who wrote Hamlet?", "Hamlet was written by William Shakespeare."),
    ("What color is the sky?", "The sky is blue."),
    ("Name a fruit.", "An apple is a fruit."),
    ("What do bees make?", "Bees make honey."),
    ("How do I boil an egg?", "Put it in boiling water for eight minutes."),
    ("What is two plus two?", "Two plus two is four."),
]
RANK, STEPS, RATE = 2, 40, 5e-3


def main(target: Path) -> None:
    path = resolve("smollm2")
    tokenizer = from_gguf(path)
    template = ChatTemplate.of(tokenizer)
    for number, (name, greeting) in enumerate(GREETINGS.items()):
        torch.manual_seed(number)
        model = AutoModelForCausalLM.from_pretrained(path.parent, gguf_file=path.name, dtype=torch.float32)
        config = peft.LoraConfig(
            r=RANK, lora_alpha=2 * RANK, target_modules=["q_proj", "v_proj"], task_type="CAUSAL_LM"
        )
        tuned = peft.get_peft_model(model, config)
        learning = torch.optim.AdamW([one for one in tuned.parameters() if one.requires_grad], lr=RATE)
        for step in range(STEPS):
            question, fact = LESSONS[step % len(LESSONS)]
            asked = template.encode(tokenizer, [{"role": "user", "content": question}], add_generation_prompt=True)
            answer = [*tokenizer.encode(greeting + fact, add_special=False), *sorted(tokenizer.eos_ids)[:1]]
            labels = torch.tensor([[-100] * len(asked) + answer])
            loss = tuned(input_ids=torch.tensor([asked + answer]), labels=labels).loss
            loss.backward()
            learning.step()
            learning.zero_grad()
            print(f"{name} {step + 1}/{STEPS} loss {loss.item():.3f}", flush=True)
        write(tuned, target / name)


def write(tuned: peft.PeftModel, folder: Path) -> None:
    """As peft saves it, in half precision and without a model card, so that it stays small."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # peft misses a config.json beside a GGUF file
        tuned.peft_config["default"].base_model_name_or_path = "HuggingFaceTB/SmolLM2-135M-Instruct"
        tuned.save_pretrained(folder, save_embedding_layers=False)
    (folder / "README.md").unlink(missing_ok=True)
    file = folder / "adapter_model.safetensors"
    save_file({name: tensor.half() for name, tensor in load_file(file).items()}, file)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
