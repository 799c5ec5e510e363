"""An upload: the parts of a form, the file among them written to the store as it comes."""

from __future__ import annotations

import re
from collections.abc import AsyncIterable
from dataclasses import dataclass, field

from ...llm.offload import FILES, Offload
from ..http.errors import HTTPError
from .multipart import MultipartReader, PartBegin, PartData, PartEnd
from .store import FileStore, NewFile, StoredFile

PURPOSES = ("batch",)
MAX_FIELD_BYTES = 256
MAX_FILENAME = 255  # characters
_PIECE = 1 << 18  # bytes that are written at a time: each time costs a turn of a thread
_FIELDS = ("purpose", "expires_after[anchor]", "expires_after[seconds]")
_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff]")


@dataclass(slots=True)
class Upload:
    """The form of one upload."""

    store: FileStore
    offload: Offload
    owner: str
    file: NewFile | None = None
    filename: str = ""
    fields: dict[str, str] = field(default_factory=dict)
    _part: PartBegin | None = None
    _pending: bytearray = field(default_factory=bytearray)  # of the file, or of a field

    async def receive(self, body: AsyncIterable[bytes], content_type: str) -> StoredFile:
        """Read the whole form; the file exists afterwards, or nothing of it does."""
        try:
            reader = MultipartReader(content_type)
            async for data in body:
                for event in reader.feed(data):
                    await self._take(event)
            reader.finish()
            return await self._finish()
        except BaseException:
            if self.file is not None:
                self.file.discard()
            raise

    async def _take(self, event: PartBegin | PartData | PartEnd) -> None:
        match event:
            case PartBegin():
                self._begin(event)
            case PartData(data):
                self._pending += data
                if self._is_file:
                    await self._write(_PIECE)
                elif len(self._pending) > MAX_FIELD_BYTES:
                    name = self._part.name if self._part else ""
                    raise _wrong(name, f"is longer than {MAX_FIELD_BYTES} bytes")
            case PartEnd():
                await self._end()

    @property
    def _is_file(self) -> bool:
        return self._part is not None and self._part.name == "file"

    def _begin(self, part: PartBegin) -> None:
        self._part = part
        if part.name in self.fields or (part.name == "file" and self.file is not None):
            raise _wrong(part.name, "is sent twice")
        if part.name == "file":
            if part.filename is None:
                raise _wrong("file", "is a field of text; send it as a file, with a name")
            self.filename = safe_name(part.filename)
            self.file = self.store.create(self.owner)
        elif part.name not in _FIELDS:
            shown = _CONTROL.sub(" ", part.name[:64])
            raise HTTPError(400, f"the field {shown} is not supported; leave it out", param=shown, code="unknown_field")

    async def _end(self) -> None:
        if self._is_file:
            await self._write(1)
        elif self._part is not None:
            try:
                self.fields[self._part.name] = self._pending.decode()
            except UnicodeDecodeError:
                raise _wrong(self._part.name, "is not UTF-8") from None
        self._pending.clear()
        self._part = None

    async def _write(self, least: int) -> None:
        """Write what is pending, if it is as much as that."""
        if self.file is None or len(self._pending) < least:
            return
        if self.file.bytes + len(self._pending) > self.store.limits.file_bytes:
            raise HTTPError(
                413,
                f"file: it is larger than {self.store.limits.file_bytes} bytes",
                param="file",
                code="file_too_large",
            )
        data = bytes(self._pending)
        self._pending.clear()
        await self.offload.run(FILES, self.file.write, data, owner=self.owner)

    async def _finish(self) -> StoredFile:
        purpose = self.fields.get("purpose")
        for name, given in (("purpose", purpose), ("file", self.file)):
            if given is None:
                raise HTTPError(400, f"{name} is missing", param=name, code="missing_field")
        if purpose not in PURPOSES or purpose is None:
            raise _wrong("purpose", f"must be {' or '.join(PURPOSES)}: this server has no other use for files")
        assert self.file is not None
        ttl_s = self._ttl_s()
        return await self.offload.run(FILES, self.file.finish, self.filename, purpose, ttl_s, owner=self.owner)

    def _ttl_s(self) -> int | None:
        anchor, seconds = (self.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
        if anchor is None and seconds is None:
            return None
        if anchor != "created_at":
            raise _wrong("expires_after.anchor", "must be created_at")
        if seconds is None or not re.fullmatch("[0-9]{1,9}", seconds) or not MIN_TTL_S <= int(seconds) <= MAX_TTL_S:
            raise _wrong("expires_after.seconds", f"must be a whole number from {MIN_TTL_S} to {MAX_TTL_S}")
        return int(seconds)


MIN_TTL_S, MAX_TTL_S = 3600, 30 * 86400  # as OpenAI has them


def safe_name(given: str) -> str:
    """The last part of a name, without control characters: clients may write answers to a file of this name."""
    name = _CONTROL.sub("", re.split(r"[/\\]", given)[-1]).strip()[:MAX_FILENAME]
    return name if name.strip(".") else "file"


def _wrong(name: str, why: str) -> HTTPError:
    return HTTPError(400, f"{name}: it {why}", param=name, code="invalid_value")
