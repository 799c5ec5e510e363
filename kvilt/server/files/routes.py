"""POST, GET and DELETE /v1/files, and the content of a file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, Protocol, TypeVar

from fastapi import APIRouter, Depends, Query, Request, Response
from starlette.types import Receive, Scope, Send

from ...llm.offload import FILES, Offload
from ..batches.queue import BatchQueue
from ..http.errors import HTTPError
from ..http.middleware import HEAD_ONLY
from ..http.responses import json_response
from ..http.routing import CallerDep, ServiceDep, StreamingRoute, StrictRoute, error_responses
from .schema import UPLOAD, DeletedFile, FileList, FileObject
from .upload import Upload

uploads = APIRouter(route_class=StreamingRoute, tags=["files"])
router = APIRouter(route_class=StrictRoute, tags=["files"])


async def _batches(request: Request) -> BatchQueue:
    queue: BatchQueue = request.app.state.batches
    return queue


BatchesDep = Annotated[BatchQueue, Depends(_batches)]
UPLOAD_PATH = "/v1/files"
_MADE: dict[int | str, dict[str, Any]] = {
    200: {"model": FileObject},
    **error_responses(400, 408, 409, 413, 415, 429),
}
_PIECE = 1 << 18  # bytes of a file that are read and sent at a time


@uploads.post(UPLOAD_PATH, response_model=None, responses=_MADE, openapi_extra=UPLOAD)
async def upload(request: Request, service: ServiceDep, batches: BatchesDep, caller: CallerDep) -> Response:
    """Store a file."""
    form = Upload(batches.files, service.llm.offload, caller.tenant)
    made = await form.receive(request.stream(), request.headers.get("content-type", ""))
    return json_response(made.shown())


class Listed(Protocol):
    """What lists are made of."""

    @property
    def id(self) -> str:
        """The id that `after` names."""


One = TypeVar("One", bound=Listed)
Limit = Annotated[int, Query(ge=1, le=10_000)]


def page_of(found: Sequence[One], after: str | None, limit: int) -> tuple[list[One], bool]:
    """The part of a list behind an id, and whether more follows."""
    ids = [one.id for one in found]
    if after is not None and after not in ids:
        raise HTTPError(404, "after: the list has no such id", param="after", code="unknown_cursor")
    begin = 0 if after is None else ids.index(after) + 1
    return list(found[begin : begin + limit]), begin + limit < len(found)


def list_json(shown: list[dict[str, Any]], more: bool) -> dict[str, Any]:
    """A list with its cursors."""
    ends = {"first_id": shown[0]["id"] if shown else None, "last_id": shown[-1]["id"] if shown else None}
    return {"object": "list", "data": shown, **ends, "has_more": more}


@router.get("/v1/files", response_model=None, responses={200: {"model": FileList}, **error_responses(400, 404)})
async def files(
    batches: BatchesDep,
    caller: CallerDep,
    purpose: str | None = None,
    after: str | None = None,
    limit: Limit = 10_000,
    order: Literal["asc", "desc"] = "desc",
) -> Response:
    """The files of the caller's key."""
    found = [one for one in batches.files.files(caller.tenant) if purpose in (None, one.purpose)]
    found.sort(key=lambda one: one.created_at)
    if order == "desc":
        found.reverse()
    page, more = page_of(found, after, limit)
    return json_response(list_json([one.shown() for one in page], more))


@router.get(
    "/v1/files/{name}", response_model=None, responses={200: {"model": FileObject}, **error_responses(400, 404)}
)
async def retrieve(name: str, batches: BatchesDep, caller: CallerDep) -> Response:
    """A file without its content."""
    return json_response(batches.files.find(name, caller.tenant).shown())


@router.delete(
    "/v1/files/{name}", response_model=None, responses={200: {"model": DeletedFile}, **error_responses(400, 404, 409)}
)
async def delete(name: str, service: ServiceDep, batches: BatchesDep, caller: CallerDep) -> Response:
    """Remove a file."""
    batches.files.find(name, caller.tenant)
    if batches.reads(name):
        raise HTTPError(409, "a batch reads this file; cancel it, or wait for its end", code="file_in_use")
    await service.llm.offload.run(FILES, batches.files.delete, name, caller.tenant, owner=caller.tenant)
    return json_response({"id": name, "object": "file", "deleted": True})


_CONTENT: dict[int | str, dict[str, Any]] = {
    200: {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}},
    **error_responses(400, 404),
}


@router.get("/v1/files/{name}/content", response_class=Response, response_model=None, responses=_CONTENT)
async def content(name: str, service: ServiceDep, batches: BatchesDep, caller: CallerDep) -> Response:
    """The bytes of a file."""
    found = batches.files.find(name, caller.tenant)
    return FileContent(batches.files.data_path(found.id), found.bytes, service.llm.offload, caller.tenant)


class FileContent(Response):
    """A file, sent in pieces: no more than one of them is in memory."""

    def __init__(self, path: Path, size: int, offload: Offload, owner: str) -> None:
        headers = {"content-length": str(size), "cache-control": "no-store", "content-disposition": "attachment"}
        super().__init__(None, 200, headers, "application/octet-stream")
        self._path, self._size = path, size
        self._offload, self._owner = offload, owner

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002  (ASGI has it)
        """Send it."""
        file: BinaryIO = await self._offload.run(
            FILES, self._path.open, "rb", owner=self._owner, discard=lambda file: file.close()
        )
        try:
            await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
            left = 0 if scope.get(HEAD_ONLY) else self._size
            while left > 0:
                data: bytes = await self._offload.run(FILES, file.read, min(_PIECE, left), owner=self._owner)
                left -= len(data) or left
                await send({"type": "http.response.body", "body": data, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            file.close()
