"""The text of a file that becomes a document."""

from __future__ import annotations

import base64
from typing import Annotated, Any

from fastapi import APIRouter, Response
from pydantic import Field

from ..http.errors import HTTPError
from ..http.responses import json_response
from ..http.routing import BODY_ERRORS, ServiceDep, StrictRoute
from ..http.schema import RequestModel, ResponseModel

router = APIRouter(route_class=StrictRoute, tags=["documents"])


class ReadDocumentRequest(RequestModel):
    """A file."""

    data: Annotated[str, Field(min_length=1)] = Field(description="The bytes of a PDF, in base64.")


class DocumentText(ResponseModel):
    """What a file says."""

    text: str
    pages: int


_READ: dict[int | str, dict[str, Any]] = {200: {"model": DocumentText}, **BODY_ERRORS}


@router.post("/v1/documents/text", response_model=None, responses=_READ)
async def text(body: ReadDocumentRequest, service: ServiceDep) -> Response:
    """The text of a PDF. Nothing of it is kept."""
    try:
        data = base64.b64decode(body.data, validate=True)
    except ValueError:  # binascii.Error is one, and letters that are not ASCII are another
        raise HTTPError(400, "data: this is no base64", param="data", code="bad_base64") from None
    if b"%PDF-" not in data[:1024]:
        raise HTTPError(400, "data: this is no PDF", param="data", code="pdf_unreadable")
    found = await service.pdf.read(data)
    return json_response({"text": found.text, "pages": found.pages})
