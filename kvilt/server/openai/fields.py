"""Fields that several requests share: sampling, response formats, documents, messages, tools."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BeforeValidator, Discriminator, Field, Tag, model_validator

from ...errors import warn_renamed
from ...sampling.constraint import MAX_CHOICES, MAX_TEXT_BYTES
from ...sampling.params import (
    MAX_BAD_WORDS,
    MAX_BIASED_TOKENS,
    MAX_DRAFT_TOKENS,
    MAX_LOGPROBS,
    MAX_NGRAM,
    MAX_SAMPLES,
    MAX_STOP_CHARS,
    MAX_STOP_TOKEN_IDS,
    MAX_STOPS,
    MAX_TEMPERATURE,
    MAX_TOKENS,
)
from ..http.schema import RequestModel
from ..sessions.fields import SessionField

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
HandleId = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$", description="The id of a KV handle.")]
SafeName = Annotated[
    str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9_-]{0,99}$", description="A name of letters, digits, - and _.")
]
TtlS = Annotated[float, Field(gt=0, le=10 * 365 * 86400, description="Seconds until a handle expires.")]
LoraScale = Annotated[float, Field(ge=-100, le=100)]
Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Text = Annotated[str, Field(min_length=1, max_length=MAX_TEXT_BYTES)]


def _few(value: object) -> object:
    """Refuse a mapping that is too large as a whole, before its entries are validated one by one."""
    if isinstance(value, dict) and len(value) > MAX_BIASED_TOKENS:
        raise ValueError(f"at most {MAX_BIASED_TOKENS} entries are allowed, not {len(value)}")
    return value


Salt = Annotated[
    str,
    Field(min_length=1, max_length=256, description="KV is reused, and handles are visible, only with the same salt."),
]


class JsonSchemaSpec(RequestModel):
    """A schema with a name."""

    name: Annotated[str, Field(max_length=64)] | None = None
    description: str | None = None
    json_schema: Annotated[dict[str, Any] | bool, Field(alias="schema")]
    strict: bool | None = Field(None, description="Accepted without effect: a schema is always enforced.")
    close_objects: bool | None = Field(
        None, description="Objects whose schema names properties and says nothing of others have no others."
    )


class TextFormat(RequestModel):
    """Any text."""

    type: Literal["text"]


class JsonObjectFormat(RequestModel):
    """Any JSON object, or one that a schema accepts, as llama.cpp's server takes it."""

    type: Literal["json_object"]
    json_schema: Annotated[dict[str, Any] | None, Field(alias="schema")] = None


class JsonSchemaFormat(RequestModel):
    """JSON that a schema accepts."""

    type: Literal["json_schema"]
    json_schema: JsonSchemaSpec


class RegexFormat(RequestModel):
    """Text that a regular expression matches as a whole."""

    type: Literal["regex"]
    regex: Text


class ChoiceFormat(RequestModel):
    """One of some strings."""

    type: Literal["choice"]
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)]


class LarkFormat(RequestModel):
    """Text that a Lark grammar derives."""

    type: Literal["lark"]
    lark: Text


class GbnfFormat(RequestModel):
    """Text that a grammar in llama.cpp's GBNF derives."""

    type: Literal["gbnf"]
    gbnf: Text


ResponseFormat = Annotated[
    TextFormat | JsonObjectFormat | JsonSchemaFormat | RegexFormat | ChoiceFormat | LarkFormat | GbnfFormat,
    Field(discriminator="type"),
]


class StructuredOutputs(RequestModel):
    """The same as `response_format` under vLLM's names; exactly one of them."""

    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    regex: Text | None = None
    choice: Annotated[list[Text], Field(min_length=1, max_length=MAX_CHOICES, fail_fast=True)] | None = None
    grammar: Annotated[Text | None, Field(description="A Lark grammar, or one in GBNF.")] = None
    json_object: bool | None = None


class StreamOptionsParam(RequestModel):
    """What a stream reports besides text."""

    include_usage: bool | None = Field(None, description="Send a last chunk with the token counts.")
    continuous_usage_stats: bool | None = Field(None, description="Send the token counts so far in every chunk.")


class Document(RequestModel):
    """A text that is part of the prompt; a title becomes its first line."""

    text: Annotated[str, Field(min_length=1)] | None = None
    content: Annotated[str, Field(min_length=1)] | None = Field(None, description="Another name for text.")
    title: Annotated[str, Field(min_length=1, max_length=4096)] | None = None

    @model_validator(mode="after")
    def _has_one_text(self) -> Self:
        if (self.text is None) == (self.content is None):
            raise ValueError("a document has a text, or a content; give one of them")
        return self


def _kind(value: object) -> str:
    return "text" if isinstance(value, str) else "document"


# The server's own limit is lower; this one stops validation early.
Documents = Annotated[
    list[
        Annotated[
            Annotated[str, Field(min_length=1), Tag("text")] | Annotated[Document, Tag("document")],
            Discriminator(_kind),
        ]
    ],
    Field(max_length=10_000, fail_fast=True),
]
Share = Annotated[float, Field(ge=0, le=1)]
Layer = Annotated[int, Field(ge=0, lt=2**16)]


class BlendOptions(RequestModel):
    """How documents are blended: whether to discover them, and the fields of a recipe. Every field has a default."""

    discover: bool | None = Field(
        None, description="Find stored documents in the prompt and blend them; the server sets the default."
    )
    ratio: Share | None = Field(None, description="Share of the documents' tokens to recompute.")
    strategy: Annotated[str, Field(min_length=1, max_length=256)] | None = Field(
        None, description="Which tokens: query, head, deviation, or a mix such as head:0.2+query:0.8."
    )
    first_tokens: Annotated[int, Field(ge=0, lt=2**31)] | None = None
    check_layer: Layer | None = None
    gradual: Annotated[list[Annotated[float, Field(ge=1, le=1000)]], Field(max_length=256, fail_fast=True)] | None = (
        None
    )
    mass_layers: Annotated[list[Layer], Field(max_length=1024, fail_fast=True)] | None = None
    repair: Share | None = Field(
        None, description="How strongly tokens between recomputed ones are repaired; 0 is off."
    )
    mend: Share | None = Field(None, description="The same, by its former name.", deprecated=True)
    min_gain: Share | None = None
    load_floor: Share | None = None
    gate: bool | None = Field(
        None, description="False: use exactly this recipe, even if quality checks ask for another ratio."
    )

    @model_validator(mode="after")
    def _warn_of_former_names(self) -> Self:
        if "mend" in self.model_fields_set:
            warn_renamed("blend.mend", "blend.repair")
        return self


class GenerationRequest(RequestModel):
    """The fields that chat and completions share: sampling, stop conditions, formats, streams, KV, documents."""

    model: Annotated[str, Field(max_length=512)] | None = None
    temperature: Annotated[float, Field(ge=0, le=MAX_TEMPERATURE)] | None = Field(None, description="1 by default.")
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=2**31)] | None = Field(None, description="0 and -1 are off.")
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    typical_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    no_repeat_ngram_size: Annotated[int, Field(ge=0, le=MAX_NGRAM)] | None = None
    bad_words: Annotated[list[Stop], Field(max_length=MAX_BAD_WORDS, fail_fast=True)] | None = None
    logit_bias: (
        Annotated[
            dict[Annotated[str, Field(pattern=r"^[0-9]{1,10}$")], Annotated[float, Field(ge=-100, le=100)]],
            Field(max_length=MAX_BIASED_TOKENS),
            BeforeValidator(_few),
        ]
        | None
    ) = Field(None, description="By token id.")
    min_tokens: Annotated[int, Field(ge=0, le=MAX_TOKENS)] | None = None
    n: Annotated[int, Field(ge=1, le=MAX_SAMPLES)] | None = Field(
        None, description="Number of answers; they share the prompt's KV."
    )
    seed: Annotated[int, Field(ge=-(2**63), lt=2**63)] | None = None
    stop: Stop | Annotated[list[Stop], Field(max_length=MAX_STOPS, fail_fast=True)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS, fail_fast=True)] | None = None
    ignore_eos: bool | None = None
    include_stop_str_in_output: bool | None = None
    draft_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = Field(
        None, description="Maximum number of draft tokens; 0 is off. Changes no token."
    )
    repetition_detection: bool | None = Field(None, description="End an answer that repeats itself; off by default.")
    lora_scale: LoraScale | None = Field(
        None, description="Scale of the adapter that is named as the model; 1 by default."
    )
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    grammar: Text | None = Field(None, description="A grammar in GBNF, under llama.cpp's name.")
    stream: bool | None = None
    stream_options: StreamOptionsParam | None = None
    return_progress: bool | None = Field(None, description="In a stream: send chunks with the progress of the prompt.")
    return_blended_tokens: bool | None = Field(
        None, description="Say in the usage which tokens of documents were computed again."
    )
    cache_salt: Salt | None = None
    kv: HandleId | None = Field(None, description="The KV handle that the prompt continues.")
    kv_out: bool | None = Field(None, description="Keep the KV of prompt and answer as a new handle.")
    session: SessionField | None = Field(None, description="The session whose KV is used, and which gets a turn.")
    documents: Documents | None = Field(
        None, description="Texts that are part of the prompt; their KV is reused at any position."
    )
    blend: BlendOptions | None = None
    user: Annotated[str, Field(max_length=512)] | None = Field(None, description="Accepted without effect.")
    metadata: Annotated[dict[str, Any], Field(max_length=64)] | None = Field(
        None, description="Accepted without effect."
    )
    store: Literal[False] | None = Field(None, description="Accepted without effect: nothing is ever stored.")
    service_tier: Literal["auto", "default"] | None = Field(None, description="Accepted without effect.")
    prompt_cache_key: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="Accepted without effect: prefixes are found by themselves."
    )
    safety_identifier: Annotated[str, Field(max_length=512)] | None = Field(
        None, description="Accepted without effect."
    )


Dimensions = Annotated[
    int, Field(ge=1, le=2**20, description="Keep this many values of an embedding, for models trained for it.")
]
TopLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS)]
MaxTokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
ToolName = Annotated[str, Field(pattern=r"^[a-zA-Z0-9_.-]{1,128}$")]
CallId = Annotated[str, Field(max_length=256)]


class TextPart(RequestModel):
    """A part of a message; only text is supported."""

    type: Literal["text"]
    text: str


Content = str | Annotated[list[TextPart], Field(min_length=1, max_length=1024, fail_fast=True)]


class SystemMessage(RequestModel):
    """Instructions; `developer` is another name for `system`."""

    role: Literal["system", "developer"]
    content: Content
    name: str | None = None


class UserMessage(RequestModel):
    """What a user says."""

    role: Literal["user"]
    content: Content
    name: str | None = None


class ToolCallFunctionParam(RequestModel):
    """A call that the model made."""

    name: ToolName
    arguments: str


class ToolCallParam(RequestModel):
    """A tool call of an earlier answer."""

    id: CallId
    type: Literal["function"] = "function"
    function: ToolCallFunctionParam
    index: int | None = Field(None, description="Accepted without effect: streams have it.")


class AssistantMessage(RequestModel):
    """An earlier answer."""

    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = None
    tool_calls: Annotated[list[ToolCallParam], Field(max_length=128, fail_fast=True)] | None = None
    name: str | None = None
    refusal: str | None = Field(None, description="Accepted without effect.")
    annotations: list[Any] | None = Field(None, description="Accepted without effect.")
    audio: None = None
    function_call: None = None


class ToolMessage(RequestModel):
    """What a tool answered."""

    role: Literal["tool"]
    content: Content
    tool_call_id: CallId | None = None
    name: str | None = None


ChatMessage = Annotated[SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")]
# The server's own limit is lower; this one stops validation early.
Messages = Annotated[list[ChatMessage], Field(min_length=1, max_length=10_000, fail_fast=True)]


class FunctionSpec(RequestModel):
    """A function that the model may call."""

    name: ToolName
    description: Annotated[str, Field(max_length=65536)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = Field(None, description="Accepted without effect: forced calls always follow their schema.")


class Tool(RequestModel):
    """A tool; all are functions."""

    type: Literal["function"]
    function: FunctionSpec


Ids = Annotated[list[TokenId], Field(min_length=1, fail_fast=True)]
TemplateKwargs = Annotated[
    dict[str, Any],
    Field(
        max_length=64, description="Variables of the chat template, like enable_thinking; others have no effect on it."
    ),
]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"]
