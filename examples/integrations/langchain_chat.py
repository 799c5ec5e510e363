"""LangChain: `ChatOpenAI` in a chain, with retrieved documents in `extra_body` instead of in the prompt."""

import os

from langchain_core.documents import Document
from langchain_core.output_parsers import StrOutputParser
from langchain_core.prompts import ChatPromptTemplate
from langchain_openai import ChatOpenAI

llm = ChatOpenAI(
    base_url=os.environ.get("KVILT_URL", "http://127.0.0.1:8000") + "/v1",
    api_key="any",
    model="smollm2",
    max_tokens=24,
    temperature=0,
)
FOUND = [  # what a retriever returns
    Document("The Elbe flows through Hamburg and ends in the North Sea.", metadata={"title": "Elbe"}),
    Document("The Danube flows through Vienna and ends in the Black Sea.", metadata={"title": "Danube"}),
]

prompt = ChatPromptTemplate.from_messages([("user", "{question}")])
for found in (FOUND, FOUND[::-1]):
    documents = [{"title": one.metadata["title"], "text": one.page_content} for one in found]
    chain = prompt | llm.bind(extra_body={"documents": documents}) | StrOutputParser()
    for text in chain.stream({"question": "Which river flows through Vienna?"}):
        print(text, end="", flush=True)
    print()
