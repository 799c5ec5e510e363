"""The MCP server over the tools: the official SDK speaks the protocol, on stdin and stdout or over HTTP."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn
from mcp import types
from mcp.server import Server, ServerRequestContext
from mcp.server.stdio import stdio_server
from pydantic import ValidationError

from ..errors import KviltError
from ..llm import AsyncLLM
from .tools import ModelTool, Result, model_tools

HOST = "127.0.0.1"  # there are no keys, so no other machine may ask
PATH = "/mcp"
_INSTRUCTIONS = (
    "A local language model whose KV cache is a value. kv_create computes a long context once; generate and chat "
    "continue it by its id; kv_fork copies it for nothing. blend answers questions about documents."
)
_log = logging.getLogger(__name__)


def make_server(llm: AsyncLLM, version: str, kv_dir: Path | None = None) -> Server[Any]:
    """A model as an MCP server. `kv_dir` is the folder that KV is saved in; without one nothing is saved."""
    tools = model_tools(llm, kv_dir)

    async def list_tools(
        _context: ServerRequestContext[Any], _given: types.PaginatedRequestParams | None
    ) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[_shown(tool) for tool in tools.values()])

    async def call_tool(
        _context: ServerRequestContext[Any], given: types.CallToolRequestParams
    ) -> types.CallToolResult:
        found = tools.get(given.name)
        if found is None:
            return _failed(f"there is no tool {given.name[:64]!r}; the tools are {', '.join(tools)}")
        return await _called(found, given.arguments or {})

    return Server(
        "kvilt", version=version, instructions=_INSTRUCTIONS, on_list_tools=list_tools, on_call_tool=call_tool
    )


def _shown(tool: ModelTool) -> types.Tool:
    hints = types.ToolAnnotations(
        read_only_hint=tool.read_only, destructive_hint=tool.destructive, open_world_hint=False
    )
    schema = tool.arguments.model_json_schema()
    return types.Tool(name=tool.name, description=tool.description, input_schema=schema, annotations=hints)


async def _called(tool: ModelTool, given: dict[str, Any]) -> types.CallToolResult:
    try:
        result: Result = await tool.run(tool.arguments.model_validate(given))
    except ValidationError as error:
        return _failed(_wrong(error))
    except KviltError as error:
        return _failed(str(error))
    except OSError as error:
        return _failed(f"the file cannot be read or written: {error.strerror}")
    except Exception:
        _log.exception("the tool %s failed", tool.name)
        return _failed(f"kvilt failed in {tool.name}; its log says where")
    text = types.TextContent(text=json.dumps(result, ensure_ascii=False))
    return types.CallToolResult(content=[text], structured_content=result)


def _failed(sentence: str) -> types.CallToolResult:
    return types.CallToolResult(content=[types.TextContent(text=sentence)], is_error=True)


def _wrong(error: ValidationError) -> str:
    """What is wrong with arguments, each by its name."""
    return "; ".join(
        f"{'.'.join(map(str, one['loc'])) or 'arguments'}: {one['msg']}" for one in error.errors(include_url=False)
    )


async def serve_stdio(server: Server[Any]) -> None:
    """Serve the process that started this one, until it closes the pipe."""
    async with stdio_server() as (reading, writing):
        await server.run(reading, writing, server.create_initialization_options())


async def serve_http(server: Server[Any], port: int, ready: Callable[[int], None]) -> None:
    """Serve clients of this machine over streamable HTTP until a signal comes; `ready` gets the port."""
    await LocalHTTPServer(server, port, ready).serve()


class LocalHTTPServer(uvicorn.Server):
    """An HTTP server for this machine. The SDK checks Host and Origin, so that no web page can ask."""

    def __init__(self, server: Server[Any], port: int, ready: Callable[[int], None]) -> None:
        """`ready` gets the port when the server listens."""
        app = server.streamable_http_app(streamable_http_path=PATH, host=HOST)
        super().__init__(
            uvicorn.Config(app, host=HOST, port=port, log_config=None, access_log=False, server_header=False, ws="none")
        )
        self._ready = ready

    async def startup(self, sockets: Any = None) -> None:
        """Begin to listen."""
        await super().startup(sockets)
        if self.started:
            self._ready(self.servers[0].sockets[0].getsockname()[1])
