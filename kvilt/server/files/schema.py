"""Files as the OpenAPI document lists them; routes write them by hand."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..http.schema import RequestModel, ResponseModel
from .upload import MAX_TTL_S, MIN_TTL_S, PURPOSES

FileId = Annotated[str, Field(pattern=r"^file-[0-9a-f]{32}$", description="The id of a file.")]


class ExpiresAfter(RequestModel):
    """When a file expires."""

    anchor: Literal["created_at"]
    seconds: Annotated[int, Field(ge=MIN_TTL_S, le=MAX_TTL_S)]


class FileObject(ResponseModel):
    """A file."""

    id: str
    object: Literal["file"]
    bytes: int
    created_at: int
    expires_at: int
    filename: str
    purpose: Literal["batch", "batch_output"]
    status: Literal["processed"]
    status_details: None


class FileList(ResponseModel):
    """Files of the caller's key."""

    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


class DeletedFile(ResponseModel):
    """A file that is gone."""

    id: str
    object: Literal["file"]
    deleted: Literal[True]


UPLOAD: dict[str, Any] = {
    "requestBody": {
        "required": True,
        "content": {
            "multipart/form-data": {
                "schema": {
                    "type": "object",
                    "required": ["file", "purpose"],
                    "additionalProperties": False,
                    "properties": {
                        "file": {"type": "string", "format": "binary"},
                        "purpose": {"type": "string", "enum": list(PURPOSES)},
                        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
                        "expires_after[seconds]": {"type": "integer", "minimum": MIN_TTL_S, "maximum": MAX_TTL_S},
                    },
                }
            }
        },
    }
}
