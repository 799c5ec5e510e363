"""Many callers on one model: their requests share steps, and a document's KV has a name that each of them can use."""

import asyncio

import kvilt

DOCUMENT = "The Elbe rises in the Giant Mountains, flows through Dresden and Hamburg, and ends in the North Sea. " * 4


async def main() -> None:
    async with kvilt.load_async() as llm:
        document = await llm.kv.create(DOCUMENT)  # computed once
        questions = ["Where does it rise?", "Which cities does it pass?", "Where does it end?"]
        answers = await asyncio.gather(
            *(llm.generate(f"\nQ: {text}\nA: The Elbe", kv=document.id, max_tokens=24, stop="\n") for text in questions)
        )
        for text, answer in zip(questions, answers, strict=True):
            print(f"{text} The Elbe{answer.text} ({answer.usage.cached_tokens} of {answer.usage.prompt_tokens} reused)")


asyncio.run(main())
