"""Instructor: an answer as a pydantic model. The server's grammar makes sure that it follows the schema."""

import os
from typing import Literal

import instructor
from openai import OpenAI
from pydantic import BaseModel, Field


class Review(BaseModel):
    feeling: Literal["good", "bad"]
    stars: int = Field(ge=1, le=5)


client = instructor.from_openai(
    OpenAI(base_url=os.environ.get("KVILT_URL", "http://127.0.0.1:8000") + "/v1", api_key="any"),
    mode=instructor.Mode.JSON_SCHEMA,
)
review = client.create(
    model="smollm2",
    response_model=Review,
    messages=[{"role": "user", "content": "The food was wonderful, and the staff were kind."}],
    max_tokens=60,
    temperature=0,
)
print(repr(review))
