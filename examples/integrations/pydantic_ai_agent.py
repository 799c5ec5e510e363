"""pydantic-ai: an agent whose answer is a pydantic model, by a call that the server's grammar enforces."""

import os
from typing import Literal

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.openai import OpenAIChatModel
from pydantic_ai.providers.openai import OpenAIProvider


class Route(BaseModel):
    department: Literal["billing", "shipping", "technical"]
    urgent: bool


provider = OpenAIProvider(base_url=os.environ.get("KVILT_URL", "http://127.0.0.1:8000") + "/v1", api_key="any")
agent = Agent(
    OpenAIChatModel("smollm2", provider=provider),
    output_type=Route,
    instructions="Route the message of a customer to a department.",
    model_settings={"max_tokens": 60, "temperature": 0.0},
)
result = agent.run_sync("I was charged twice for my order. Please refund me today!")
print(repr(result.output))
