"""The OpenAI SDK: a streamed answer, then documents whose KV is computed once and reused in any order."""

import os

from openai import OpenAI

client = OpenAI(base_url=os.environ.get("KVILT_URL", "http://127.0.0.1:8000") + "/v1", api_key="any")
MODEL = client.models.list().data[0].id
DOCUMENTS = [
    {
        "title": "Elbe",
        "text": "The Elbe rises in the Giant Mountains, flows through Hamburg, and ends in the North Sea.",
    },
    {
        "title": "Danube",
        "text": "The Danube rises in the Black Forest, flows through Vienna, and ends in the Black Sea.",
    },
]

question = [{"role": "user", "content": "What is the capital of Germany?"}]
for chunk in client.chat.completions.create(model=MODEL, messages=question, max_tokens=24, temperature=0, stream=True):
    print(chunk.choices[0].delta.content or "" if chunk.choices else "", end="")
print()

for documents in (DOCUMENTS, DOCUMENTS[::-1]):
    answer = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "Which river flows through Vienna?"}],
        max_tokens=24,
        temperature=0,
        extra_body={"documents": documents},
    )
    reused = answer.usage.model_extra["kvilt"]["blended_reused"]
    print(answer.choices[0].message.content, f"[{reused} tokens of documents reused]")
