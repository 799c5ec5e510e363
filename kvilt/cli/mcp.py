"""`kvilt mcp`: a model as tools for agents, on stdin and stdout or over HTTP on this machine."""

from __future__ import annotations

import asyncio
import logging
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..errors import Unsupported
from ..llm import AsyncLLM, load_async
from .progress import bars
from .store import context_prefix, open_store

if TYPE_CHECKING:
    from mcp.server import Server


def mcp(model: str, port: int | None, kv_dir: str | None, store: dict[str, Any], config: dict[str, Any]) -> None:
    """Load a model and offer its tools until the client leaves or a signal comes. No port: on stdin and stdout."""
    try:
        from ..mcp.server import make_server
    except ImportError as error:
        raise Unsupported(f"MCP needs {error.name}; install it with: pip install 'kvilt[mcp]'") from None
    # The protocol has stdout for itself.
    logging.basicConfig(level=logging.WARNING, stream=sys.stderr, format="%(levelname)s %(name)s: %(message)s")
    with open_store(store) as kept:
        with bars() as shown:
            llm = load_async(model, on_fetch=shown.fetching, store=kept, context_prefix=context_prefix(store), **config)
        server = make_server(llm, __version__, None if kv_dir is None else Path(kv_dir).expanduser())
        asyncio.run(_serve(llm, server, port))


async def _serve(llm: AsyncLLM, server: Server[Any], port: int | None) -> None:
    from ..mcp.server import HOST, PATH, serve_http, serve_stdio

    def ready(actual: int) -> None:
        print(f"MCP is served at http://{HOST}:{actual}{PATH}", file=sys.stderr, flush=True)

    async with llm:
        if port is None:
            await serve_stdio(server)
        else:
            await serve_http(server, port, ready)
