"""LlamaIndex: kvilt as an `OpenAILike` model, with the texts of nodes as documents whose KV is reused."""

import os

from llama_index.core.llms import ChatMessage
from llama_index.core.schema import TextNode
from llama_index.llms.openai_like import OpenAILike

llm = OpenAILike(
    api_base=os.environ.get("KVILT_URL", "http://127.0.0.1:8000") + "/v1",
    api_key="any",
    model="smollm2",
    context_window=8192,
    is_chat_model=True,
    max_tokens=24,
    temperature=0,
)
NODES = [  # what an index retrieves
    TextNode(text="The Elbe flows through Hamburg and ends in the North Sea."),
    TextNode(text="The Danube flows through Vienna and ends in the Black Sea."),
]

print(llm.complete("What is the capital of France?"))
question = [ChatMessage(role="user", content="Which river flows through Vienna?")]
for chunk in llm.stream_chat(question, extra_body={"documents": [node.get_content() for node in NODES]}):
    print(chunk.delta, end="", flush=True)
print()
