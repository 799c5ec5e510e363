"""The Anthropic SDK: a streamed answer over the Messages API, and the tokens that came from the cache."""

import os

from anthropic import Anthropic

client = Anthropic(base_url=os.environ.get("KVILT_URL", "http://127.0.0.1:8000"), api_key="any")
MODEL = client.models.list().data[0].id
SYSTEM = "You answer questions about rivers in one short sentence. " * 8

for question in ("Where does the Elbe end?", "Where does the Danube end?"):
    messages = [{"role": "user", "content": question}]
    with client.messages.stream(model=MODEL, system=SYSTEM, messages=messages, max_tokens=24) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        usage = stream.get_final_message().usage
    print(f" [{usage.cache_read_input_tokens} tokens reused, {usage.input_tokens} computed]")
