"""LiteLLM: one function for all providers; kvilt is `openai/NAME` at an address of its own."""

import os

import litellm

DOCUMENTS = ["The Elbe ends in the North Sea.", "The Danube ends in the Black Sea."]

answer = litellm.completion(
    model="openai/smollm2",
    api_base=os.environ.get("KVILT_URL", "http://127.0.0.1:8000") + "/v1",
    api_key="any",
    messages=[{"role": "user", "content": "Where does the Elbe end?"}],
    max_tokens=24,
    temperature=0,
    extra_body={"documents": DOCUMENTS},
)
print(answer.choices[0].message.content)
print(f"[{answer.usage.prompt_tokens} tokens in, {answer.usage.completion_tokens} out]")
