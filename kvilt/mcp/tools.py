"""The tools: what each does with the model. Results are JSON objects; errors are those of kvilt."""

from __future__ import annotations

import dataclasses
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..blend.recipe import Recipe
from ..errors import InputError
from ..llm import AsyncLLM, Completion
from . import arguments as args

Result = dict[str, Any]
_ENDING = ".kvilt"


class ModelTools:
    """A model's tools. Handles belong to the process; files to the folder, if there is one."""

    def __init__(self, llm: AsyncLLM, kv_dir: Path | None = None) -> None:
        self._llm = llm
        self._kv_dir = kv_dir

    async def generate(self, given: args.GenerateArguments) -> Result:
        """Continue a text with the model. With kv, it continues the tokens of that KV, which are not computed again."""
        return await self._answer(await self._llm.generate(given.prompt, kv=given.kv, **given.fields()))

    async def chat(self, given: args.ChatArguments) -> Result:
        """Answer a conversation with the model. What an earlier call has computed of it is reused."""
        return await self._answer(await self._llm.chat(_messages(given.messages), kv=given.kv, **given.fields()))

    async def blend(self, given: args.BlendArguments) -> Result:
        """Answer a question about documents. The KV of a document is computed once and reused, in any order."""
        system = [] if given.system is None else [{"role": "system", "content": given.system}]
        changed = {"ratio": given.ratio, "strategy": given.strategy}
        recipe = Recipe.of(None, **{name: value for name, value in changed.items() if value is not None})
        done = await self._llm.chat(
            [*system, {"role": "user", "content": given.question}],
            documents=given.documents,
            recipe=recipe,
            **given.fields(),
        )
        return await self._answer(done)

    async def warm(self, given: args.WarmArguments) -> Result:
        """Compute and store the KV of documents in advance, for later questions with blend."""
        stored = await self._llm.warm(given.documents)
        return {"documents": [dataclasses.asdict(one) for one in stored]}

    async def kv_create(self, given: args.CreateArguments) -> Result:
        """Compute the KV of a prompt, or of the first messages of a conversation, and keep it as a handle."""
        messages = None if given.messages is None else _messages(given.messages)
        made = await self._llm.kv.create(given.prompt, messages=messages, ttl_s=given.ttl_s)
        return dataclasses.asdict(made)

    async def kv_list(self, _given: args.NoArguments) -> Result:
        """All KV handles, and the names of saved ones."""
        handles = [dataclasses.asdict(info) for info in await self._llm.kv.owned()]
        return {"handles": handles, "saved": [] if self._kv_dir is None else self._saved(self._kv_dir)}

    async def kv_info(self, given: args.HandleArguments) -> Result:
        """The state of a KV handle: its number of tokens, its memory, when it expires."""
        return dataclasses.asdict(await self._llm.kv.info(given.kv))

    async def kv_fork(self, given: args.ForkArguments) -> Result:
        """A second handle on the same KV. It costs no memory; the two can be truncated and used apart."""
        return dataclasses.asdict(await self._llm.kv.fork(given.kv, ttl_s=given.ttl_s))

    async def kv_truncate(self, given: args.TruncateArguments) -> Result:
        """Drop the tokens of a KV handle from a position on."""
        return dataclasses.asdict(await self._llm.kv.truncate(given.kv, given.length))

    async def kv_pin(self, given: args.PinArguments) -> Result:
        """Keep a KV handle longer, and its memory before that of others."""
        return dataclasses.asdict(await self._llm.kv.pin(given.kv, given.ttl_s))

    async def kv_delete(self, given: args.HandleArguments) -> Result:
        """Forget a KV handle."""
        await self._llm.kv.delete(given.kv)
        return {"id": given.kv, "deleted": True}

    async def kv_save(self, given: args.SaveArguments) -> Result:
        """Write the KV of a handle to a file, which outlives this process."""
        await self._llm.kv.info(given.kv)  # an unknown handle is refused before a folder is made
        folder = self._folder()
        folder.mkdir(parents=True, exist_ok=True)
        size = await self._llm.kv.save(given.kv, folder / f"{given.name}{_ENDING}")
        return {"name": given.name, "bytes": size}

    async def kv_restore(self, given: args.RestoreArguments) -> Result:
        """A KV handle from a file that kv_save wrote."""
        folder = self._folder()
        path = folder / f"{given.name}{_ENDING}"
        if not path.is_file():
            known = ", ".join(self._saved(folder)) or "nothing"
            raise InputError(f"name: there is no saved KV called {given.name!r}; saved are: {known}")
        return dataclasses.asdict(await self._llm.kv.restore(path, ttl_s=given.ttl_s))

    async def _answer(self, done: Completion) -> Result:
        """A completion as JSON; KV that it kept becomes a handle."""
        usage = done.usage
        made: Result = {
            "text": done.text,
            "finish_reason": done.finish_reason,
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "completion_tokens": len(done.token_ids),
        }
        if done.reasoning:
            made["reasoning"] = done.reasoning
        if usage.recipe:
            made |= {"blended_tokens": usage.blended_reused, "recipe": usage.recipe}
        if done.warnings:
            made["warnings"] = list(done.warnings)
        if done.kv is not None:
            made["kv"] = dataclasses.asdict(await self._llm.kv.keep(done.kv))
        return made

    def _folder(self) -> Path:
        if self._kv_dir is None:
            raise InputError("no KV is saved here; start kvilt mcp with --kv-dir to name a folder for it")
        return self._kv_dir

    def _saved(self, folder: Path) -> list[str]:
        return sorted(path.stem for path in folder.glob(f"*{_ENDING}") if path.is_file())


def _messages(turns: Sequence[args.ChatToolMessage]) -> list[dict[str, Any]]:
    return [turn.model_dump() for turn in turns]


@dataclass(frozen=True, slots=True)
class ModelTool:
    """A tool as clients see it."""

    name: str
    run: Callable[[Any], Awaitable[Result]]
    arguments: type[args.ToolArguments]
    read_only: bool = False
    destructive: bool = False

    @property
    def description(self) -> str:
        """What the tool does."""
        return self.run.__doc__ or ""


def model_tools(llm: AsyncLLM, kv_dir: Path | None = None) -> dict[str, ModelTool]:
    """All tools of a model, by name."""
    tools = ModelTools(llm, kv_dir)
    made = (
        ModelTool("generate", tools.generate, args.GenerateArguments),
        ModelTool("chat", tools.chat, args.ChatArguments),
        ModelTool("blend", tools.blend, args.BlendArguments),
        ModelTool("warm", tools.warm, args.WarmArguments),
        ModelTool("kv_create", tools.kv_create, args.CreateArguments),
        ModelTool("kv_list", tools.kv_list, args.NoArguments, read_only=True),
        ModelTool("kv_info", tools.kv_info, args.HandleArguments, read_only=True),
        ModelTool("kv_fork", tools.kv_fork, args.ForkArguments),
        ModelTool("kv_truncate", tools.kv_truncate, args.TruncateArguments, destructive=True),
        ModelTool("kv_pin", tools.kv_pin, args.PinArguments),
        ModelTool("kv_delete", tools.kv_delete, args.HandleArguments, destructive=True),
        ModelTool("kv_save", tools.kv_save, args.SaveArguments),
        ModelTool("kv_restore", tools.kv_restore, args.RestoreArguments),
    )
    return {tool.name: tool for tool in made}
