"""Tools are Python functions: the model calls them, and answers with their results."""

import kvilt


def weather(city: str) -> str:
    """The weather in a city today."""
    return {"Paris": "17 degrees and rain", "Rome": "25 degrees and sun"}.get(city, "unknown")


def opening(day: str) -> str:
    """Whether the shop is open on a day of the week."""
    return f"The shop is {'closed' if day == 'Sunday' else 'open'} on {day}."


TOOLS = [weather, opening]

with kvilt.load() as llm:
    for question, tool in (("What is the weather in Paris?", "weather"), ("Is the shop open on Sunday?", "opening")):
        messages = [{"role": "user", "content": question}]
        # The default model is too small to decide when to call, so it must. Larger ones do with tool_choice="auto":
        # while (done := llm.chat(messages, tools=TOOLS)).tool_calls: messages += done.run_tools(TOOLS)
        done = llm.chat(messages, tools=TOOLS, tool_choice=tool, max_tokens=60)
        messages += done.run_tools(TOOLS)
        call = done.tool_calls[0]
        print(f"{question}\n  {call.name}({call.arguments}) = {messages[-1]['content']}")
        print(f"  {llm.chat(messages, max_tokens=40).text}")
