"""The table of formats in which families write calls and reasoning, and how a chat template shows which one it is.

Adding a format is adding a row. Knows markers and texts; refuses to know streams.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from enum import Enum


class CallSyntax(Enum):
    """The syntax of calls after an opening marker."""

    JSON = "an object with a name and arguments, or a list of them"
    JSON_OR_TAGS = "the same, or <function=name> with a <parameter=name> for each argument"
    JSON_OR_KEYS = "the same, or a name with <arg_key> and <arg_value> for each argument"
    TAGS = "<function=name> with a <parameter=name> for each argument"
    MISTRAL = "a name, [ARGS] and arguments; or JSON"
    DEEPSEEK = "a name, its separator and arguments; or JSON"
    KIMI = "a name with a number, its separator and arguments; or JSON"
    GEMMA = "call:name{key:value}, with tokens for quotes"
    DSML = "an invoke tag with a parameter tag for each argument"
    NAME_LINE = "a name, and arguments on the next line"
    PYTHON = "calls in Python, one after the other"
    PYTHON_LIST = "calls in Python, in brackets"
    LIST = "a list of calls, in JSON or in Python"


@dataclass(frozen=True, slots=True)
class CallMarker:
    """Opens tool calls; a `bare` one is itself part of the call, and counts only where an answer begins."""

    text: str
    inside: CallSyntax
    closes: tuple[str, ...] = ()  # what may stand after them, in this order
    bare: bool = False

    @property
    def strict(self) -> bool:
        """Whether ordinary text may begin like this too: then only text that parses as a call to its end is one."""
        return self.bare or self.text == _FENCE


_FENCE = "```json\n"
OBJECT = CallMarker("{", CallSyntax.JSON, bare=True)
LIST = CallMarker("[", CallSyntax.JSON, bare=True)
PYTHON_LIST = CallMarker("[", CallSyntax.PYTHON_LIST, bare=True)
EITHER_LIST = CallMarker("[", CallSyntax.LIST, bare=True)


@dataclass(frozen=True, slots=True)
class CallFormat:
    """How calls are written, how a template shows this format, and how a forced call is written.

    `forced` has the texts before, between and after calls; markers that are special tokens are left out of it, since
    a grammar describes text, and the reader takes calls without them where an answer begins.
    """

    name: str
    openings: tuple[CallMarker, ...]
    signs: tuple[str, ...] = ()
    families: tuple[str, ...] = ()
    forced: tuple[str, str, str] = ("[", ", ", "]")
    arguments_key: str = "arguments"
    lone: bool = False  # a single call is written without the texts around it
    inner: tuple[str, ...] = ()  # markers that stand inside others
    by_name: tuple[str, ...] | None = None  # a line with a tool's name opens a call too; what may stand after it
    channels: bool = False  # answers are messages with headers (harmony), which tell reasoning, content and calls apart

    def openings_for(self, tools: Iterable[str]) -> tuple[CallMarker, ...]:
        """The openings of calls of these tools."""
        if self.by_name is None:
            return self.openings
        lines = (CallMarker(f"{name}\n", CallSyntax.NAME_LINE, self.by_name, bare=True) for name in tools)
        return (*lines, *self.openings)

    @property
    def markers(self) -> tuple[str, ...]:
        """Every marker, one by one, that may be a special token."""
        marked = [each for each in self.openings if not each.bare]
        texts = [text for each in marked for text in (each.text, *each.closes)]
        return tuple(dict.fromkeys((*texts, *self.inner)))


@dataclass(frozen=True, slots=True)
class Thinking:
    """The markers around reasoning, which stands before the answer; `opened` if prompts end with the first one."""

    open: str
    close: str
    opened: bool = False


THINK = Thinking("<think>", "</think>")
BRACKETS = Thinking("[THINK]", "[/THINK]")
GEMMA_THOUGHT = Thinking("<|channel>thought\n", "<channel|>")
ANALYSIS = Thinking("<|channel|>analysis<|message|>", "<|end|>")  # of harmony, whose reader knows it by itself
COHERE_THOUGHT = Thinking("<|START_THINKING|>", "<|END_THINKING|>")
THINKINGS = (BRACKETS, GEMMA_THOUGHT, COHERE_THOUGHT, THINK)

HERMES = CallFormat(
    "hermes",
    (
        CallMarker("<tool_call>", CallSyntax.JSON_OR_TAGS, ("</tool_call>",)),
        CallMarker("<function=", CallSyntax.TAGS, ("</tool_call>",), bare=True),  # Qwen3-Coder forgets the marker
    ),
    signs=("<tool_call>",),
    families=("qwen2", "qwen3", "hermes", "smollm3", "ernie"),
    forced=("<tool_call>\n", "\n</tool_call>\n<tool_call>\n", "\n</tool_call>"),
)
GLM45 = CallFormat(
    "glm45",
    (CallMarker("<tool_call>", CallSyntax.JSON_OR_KEYS, ("</tool_call>",)), LIST),
    signs=("<arg_key>",),
    families=("glm4_moe", "glm_moe"),
    inner=("<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"),
)
GLM4 = CallFormat(
    "glm4",
    (LIST,),
    signs=("<|observation|>",),
    families=("glm", "chatglm"),
    by_name=("<|assistant|>",),
    inner=("<|assistant|>",),
)
_KIMI_CLOSES = ("<|tool_call_end|>", "<|tool_calls_section_end|>")
KIMI_K2 = CallFormat(
    "kimi_k2",
    (
        CallMarker("<|tool_calls_section_begin|><|tool_call_begin|>", CallSyntax.KIMI, _KIMI_CLOSES),
        CallMarker("<|tool_call_begin|>", CallSyntax.KIMI, _KIMI_CLOSES),
        LIST,
    ),
    signs=("<|tool_calls_section_begin|>",),
    families=("kimi",),
    inner=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
)
HARMONY = CallFormat(
    "harmony",
    (LIST,),
    signs=("<|channel|>",),
    families=("gpt_oss", "gpt-oss"),
    inner=("<|start|>", "<|channel|>", "<|message|>", "<|constrain|>", "<|end|>", "<|return|>", "<|call|>"),
    channels=True,
)
GEMMA4 = CallFormat(
    "gemma4",
    (
        CallMarker("<|tool_call>", CallSyntax.GEMMA, ("<tool_call|>",)),
        CallMarker("<start_function_call>", CallSyntax.GEMMA, ("<end_function_call>",)),
        LIST,
    ),
    signs=("<|tool_call>", "<start_function_call>"),
    families=("gemma4",),
    inner=('<|"|>', "<escape>", "<|channel>", "<channel|>"),
)
MISTRAL = CallFormat(
    "mistral",
    (CallMarker("[TOOL_CALLS]", CallSyntax.MISTRAL), LIST),
    signs=("[TOOL_CALLS]",),
    families=("mistral", "mixtral", "ministral"),
    inner=("[ARGS]", "[CALL_ID]"),
)
PHI4 = CallFormat(
    "phi4",
    (CallMarker("<|tool_call|>", CallSyntax.JSON, ("<|/tool_call|>",)), CallMarker("functools", CallSyntax.JSON), LIST),
    signs=("<|tool_call|>", "<|/tool|>", "functools["),
    families=("phi",),
)
LFM2 = CallFormat(
    "lfm2",
    (CallMarker("<|tool_call_start|>", CallSyntax.LIST, ("<|tool_call_end|>",)), EITHER_LIST),
    signs=("<|tool_call_start|>", "<|tool_list_start|>"),
    families=("lfm2",),
)
PYTHONIC = CallFormat(
    "pythonic",
    (CallMarker("<|python_start|>", CallSyntax.LIST, ("<|python_end|>",)), EITHER_LIST, OBJECT),
    signs=("[func_name1(", "<|python_start|>"),
    families=("llama4",),
)
LLAMA3 = CallFormat(
    "llama3",
    (CallMarker("<|python_tag|>", CallSyntax.JSON), OBJECT, EITHER_LIST),
    signs=("<|python_tag|>", "dictionary of argument name", "Environment: ipython"),
    families=("llama",),
    forced=("", "; ", ""),
    arguments_key="parameters",
)
GEMMA = CallFormat(
    "gemma",
    (
        CallMarker("```tool_code\n", CallSyntax.PYTHON, ("```",)),
        CallMarker("```tool_call\n", CallSyntax.JSON, ("```",)),
        CallMarker(_FENCE, CallSyntax.JSON, ("```",)),
        EITHER_LIST,
        OBJECT,
    ),
    signs=("tool_code", "<start_of_turn>"),
    families=("gemma",),
    lone=True,
)
_DEEPSEEK_CLOSES = ("```", "<｜tool▁call▁end｜>", "<｜tool▁calls▁end｜>")
DEEPSEEK = CallFormat(
    "deepseek",
    (
        CallMarker("<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>", CallSyntax.DEEPSEEK, _DEEPSEEK_CLOSES),
        CallMarker("<｜tool▁call▁begin｜>", CallSyntax.DEEPSEEK, _DEEPSEEK_CLOSES),
        OBJECT,
        LIST,
    ),
    signs=("<｜tool▁calls▁begin｜>",),
    families=("deepseek",),
    inner=("<｜tool▁calls▁begin｜>", "<｜tool▁sep｜>"),
)
DSML = CallFormat(
    "deepseek_v32",
    (
        CallMarker("<｜DSML｜function_calls>", CallSyntax.DSML, ("</｜DSML｜function_calls>",)),
        CallMarker("<｜DSML｜tool_calls>", CallSyntax.DSML, ("</｜DSML｜tool_calls>",)),  # of V4
        CallMarker("<｜DSML｜invoke", CallSyntax.DSML, ("</｜DSML｜function_calls>", "</｜DSML｜tool_calls>")),
        OBJECT,
        LIST,
    ),
    signs=("｜DSML｜",),
    families=("deepseek_v32", "deepseekv32", "deepseek_v4", "deepseekv4"),
    inner=("｜DSML｜",),
)
COHERE = CallFormat(
    "cohere",
    (
        CallMarker("<|START_ACTION|>", CallSyntax.JSON, ("<|END_ACTION|>",)),
        CallMarker("Action: " + _FENCE, CallSyntax.JSON, ("```",)),  # Command R, before it had tokens for it
        LIST,
    ),
    signs=("<|START_ACTION|>",),
    families=("cohere", "command"),
    arguments_key="parameters",
)
GRANITE = CallFormat(
    "granite",
    (
        CallMarker("<|tool_call|>", CallSyntax.JSON),
        CallMarker("<tool_call>", CallSyntax.JSON_OR_TAGS, ("</tool_call>",)),  # since Granite 3.3
        LIST,
    ),
    families=("granite",),
)
OLMO3 = CallFormat(
    "olmo3",
    (CallMarker("<function_calls>", CallSyntax.PYTHON, ("</function_calls>",)), EITHER_LIST),
    signs=("<function_calls>",),
    families=("olmo",),
)
JSON = CallFormat("json", (OBJECT, LIST), lone=True)
NONE = CallFormat("none", ())

# In the order in which templates are searched: what only one format writes comes first.
FORMATS: tuple[CallFormat, ...] = (
    HARMONY,
    MISTRAL,
    PHI4,
    LFM2,
    DSML,
    DEEPSEEK,
    KIMI_K2,
    GEMMA4,
    COHERE,
    OLMO3,
    GLM45,
    GLM4,
    HERMES,
    PYTHONIC,
    LLAMA3,
    GEMMA,
    GRANITE,
    JSON,
    NONE,
)

# What a server's option may name, beside the formats themselves: families whose parts are known.
NAMED: Mapping[str, tuple[CallFormat, Thinking | None]] = {
    **{each.name: (each, None) for each in FORMATS},
    "qwen2": (HERMES, None),
    "qwen3": (HERMES, THINK),
    "qwen3_coder": (HERMES, None),
    "smollm3": (HERMES, THINK),
    "glm45": (GLM45, THINK),
    "deepseek_v32": (DSML, THINK),
    "deepseek_v4": (DSML, THINK),
    "gemma4": (GEMMA4, GEMMA_THOUGHT),
    "harmony": (HARMONY, ANALYSIS),
    "cohere": (COHERE, COHERE_THOUGHT),
    "deepseek_r1": (DEEPSEEK, Thinking("<think>", "</think>", opened=True)),
    "magistral": (MISTRAL, BRACKETS),
    "think": (NONE, THINK),
}


def calls_in(template: str | None, family: str | None) -> tuple[CallFormat, str]:
    """The format of calls that a template or, where it shows none, a family uses, and what showed it."""
    for each in FORMATS:
        if template and (sign := next((sign for sign in each.signs if sign in template), None)) is not None:
            return each, f"calls as {each.name}: the chat template has {sign!r}"
    for each in FORMATS:
        if family and any(family.lower().startswith(prefix) for prefix in each.families):
            return each, f"calls as {each.name}: the family is {family}"
    return JSON, "calls as json: neither chat template nor family shows another format"


def thinking_in(template: str | None, calls: CallFormat) -> tuple[Thinking | None, str]:
    """The markers of reasoning that a template contains, and what showed them."""
    if calls.channels:
        return ANALYSIS, "reasoning on the channel analysis"
    for each in THINKINGS:
        if template and (each.open in template or each.close in template):
            _, _, after = template.rpartition("add_generation_prompt")
            opened = each.open in after and each.close not in after
            found = each.open if each.open in template else each.close
            how = "opens it in the prompt" if opened else f"has {found!r}"
            return Thinking(each.open, each.close, opened), f"reasoning in {each.open}: the chat template {how}"
    return None, "no reasoning: the chat template has no marker of it"
