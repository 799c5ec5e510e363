"""An agent's side of `kvilt mcp`: compute a long context once, fork it, and ask about documents."""

import asyncio
import sys

from mcp import Client, StdioServerParameters

CONTEXT = "The Elbe rises in the Giant Mountains, flows through Dresden and Hamburg, and ends in the North Sea. " * 4
DOCUMENTS = ["The tower is 330 metres tall and stands in Paris.", "Berlin has 3.8 million inhabitants."]


async def main() -> None:
    async with Client(StdioServerParameters(command=sys.executable, args=["-m", "kvilt", "mcp"])) as client:

        async def call(name: str, **arguments: object) -> dict:
            result = await client.call_tool(name, arguments)
            assert not result.is_error, result.content
            return result.structured_content

        kv = await call("kv_create", prompt=CONTEXT)
        for question in ("Where does it rise?", "Where does it end?"):
            fork = await call("kv_fork", kv=kv["id"])
            prompt = f"\nQ: {question}\nA: The Elbe"
            answer = await call("generate", prompt=prompt, kv=fork["id"], max_tokens=16, stop=["\n"])
            print(f"{question} The Elbe{answer['text']} ({answer['cached_tokens']} tokens reused)")
        answer = await call("blend", documents=DOCUMENTS, question="How tall is the tower?", max_tokens=16)
        print(answer["text"])


asyncio.run(main())
