"""Batches as requests and answers have them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field

from ..files.schema import ExpiresAfter, FileId
from ..http.schema import RequestModel, ResponseModel
from .record import Status

Metadata = Annotated[
    dict[Annotated[str, Field(max_length=64)], Annotated[str, Field(max_length=512)]], Field(max_length=16)
]


class BatchRequest(RequestModel):
    """A batch to begin."""

    input_file_id: FileId
    endpoint: Literal["/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses"]
    completion_window: Literal["24h"]
    metadata: Metadata | None = None
    output_expires_after: ExpiresAfter | None = None


class BatchProblem(ResponseModel):
    """Why a batch failed."""

    code: str | None
    line: int | None
    message: str
    param: str | None


class BatchProblems(ResponseModel):
    """All reasons."""

    object: Literal["list"]
    data: list[BatchProblem]


class RequestCounts(ResponseModel):
    """How many requests were answered."""

    total: int
    completed: int
    failed: int


class BatchObject(ResponseModel):
    """A batch."""

    id: str
    object: Literal["batch"]
    endpoint: str
    model: str
    input_file_id: str
    completion_window: Literal["24h"]
    status: Status
    output_file_id: str | None
    error_file_id: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    errors: BatchProblems | None
    request_counts: RequestCounts
    usage: dict[str, Any]
    metadata: dict[str, str] | None


class BatchList(ResponseModel):
    """Batches of the caller's key, the newest first."""

    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: bool
