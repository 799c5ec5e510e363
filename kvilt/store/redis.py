"""The shared tier: records in Redis or Valkey, with time to live, budgets and an index that the server keeps.

A server that is down, slow or sends garbage causes a StoreError within the time limits, nothing else. Refuses to know
what the bytes mean, except whose quota they count against.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from ..errors import BlobError, StoreError, Unsupported
from .codecs import Data
from .record import FIRST_READ_BYTES, RecordInfo, peek
from .redis_scripts import SCRIPTS
from .tier import Budget, TierUsage

try:
    import redis
    from redis.backoff import NoBackoff
    from redis.retry import Retry
except ImportError:  # the extra is not installed; reported when the tier is asked for
    redis = None  # type: ignore[assignment]

_IDLE = 16  # connections that wait for the next reader
_MAX_VALUE_BYTES = (512 << 20) - 1  # what the server takes as one value


@contextmanager
def explained() -> Iterator[None]:
    """Turn any failure of a server into a StoreError with its reason."""
    try:
        yield
    except (StoreError, BlobError):
        raise
    except redis.exceptions.TimeoutError as error:
        raise StoreError("timeout", "the Redis tier did not answer in time") from error
    except redis.exceptions.ResponseError as error:
        raise _answered(error) from error
    except redis.exceptions.InvalidResponse as error:
        raise StoreError("garbage", "the Redis tier answered something that is not its protocol") from error
    except (redis.exceptions.ConnectionError, OSError) as error:
        raise StoreError("down", "the Redis tier cannot be reached") from error
    except Exception as error:  # what a parser may do with nonsense is not listed anywhere
        raise StoreError("garbage", "the Redis tier answered something that cannot be read") from error


def _answered(error: Exception) -> StoreError | BlobError:
    """What a server's refusal means; the client takes the first word of some off and makes it a class."""
    text = f"{type(error).__name__} {error}"
    if "WRONGTYPE" in text:
        return BlobError("type", "something else is stored under this key")
    reasons = {"OutOfMemory": "disk_full", "OOM": "disk_full", "ReadOnly": "read_only", "READONLY": "read_only"}
    reasons |= {"NOAUTH": "down", "WRONGPASS": "down", "NOPERM": "down", "LOADING": "down"}
    reason = next((reason for word, reason in reasons.items() if word in text), "garbage")
    return StoreError(reason, f"the Redis tier refused: {text[:100]}")


class RedisReader:
    """A record on the server, read in ranges over a connection of its own, which `abort` can cut."""

    def __init__(self, line: _Line, name: str) -> None:
        self._line = line
        self._name = name
        self._connection: Any = None
        self._start = b""
        self._nbytes = -1
        self._asked = False
        self._aborted = False

    @property
    def nbytes(self) -> int:
        if not self._asked:
            self._start, self._nbytes = self._ask(
                [("GETRANGE", self._name, 0, FIRST_READ_BYTES - 1), ("STRLEN", self._name)], (bytes, int)
            )
            self._asked = True
            if self._nbytes == 0:
                self._nbytes = -1  # the server knows no empty records
        return self._nbytes

    def read(self, offset: int, size: int) -> Data:
        if offset + size <= len(self._start):
            return self._start[offset : offset + size]
        if size == 0:
            return b""
        (data,) = self._ask([("GETRANGE", self._name, offset, offset + size - 1)], (bytes,))
        if len(data) > size:
            raise StoreError("garbage", "the Redis tier sent more than it was asked for")
        return bytearray(data)

    def _ask(self, commands: list[tuple[object, ...]], kinds: tuple[type, ...]) -> list[Any]:
        with explained():
            try:
                if self._connection is None:
                    self._connection = self._line.take()
                self._check()
                for command in commands:
                    self._connection.send_command(*command)
                self._check()  # sending connects: an abort just before had nothing to cut
                answers = [self._connection.read_response() for _ in commands]
            except BaseException:
                self._drop()
                raise
            if any(type(one) is not kind for one, kind in zip(answers, kinds, strict=True)):
                self._drop()
                raise StoreError("garbage", "the Redis tier answered something else than was asked")
            return answers

    def abort(self) -> None:
        self._aborted = True
        self._cut()

    def _check(self) -> None:
        if self._aborted:
            raise StoreError("cancelled", "the caller no longer waits for this record")

    def _cut(self) -> None:
        if (connection := self._connection) is not None:
            with suppress(Exception):
                connection.disconnect()

    def close(self) -> None:
        if self._connection is not None:
            connection, self._connection = self._connection, None
            self._line.give(connection)

    def _drop(self) -> None:
        """After an error it is not known what the next bytes belong to."""
        self._cut()
        self._connection = None


class _Line:
    """Connections for readers. They are handed out before they connect, so that even a greeting can be cut short."""

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self._idle: deque[Any] = deque(maxlen=_IDLE)

    def take(self) -> Any:
        """A connection that was of use and is still there, or a new one, not yet connected."""
        while self._idle:
            with suppress(IndexError, redis.exceptions.RedisError, OSError):
                connection = self._idle.pop()
                if connection.can_read():  # an end, or an answer to nothing
                    connection.disconnect()
                    continue
                return connection
        return self._pool.connection_class(**self._pool.connection_kwargs)

    def give(self, connection: Any) -> None:
        if len(self._idle) < _IDLE:
            self._idle.append(connection)
        else:
            connection.disconnect()

    def close(self) -> None:
        while self._idle:
            with suppress(Exception):
                self._idle.pop().disconnect()


class RedisNotes:
    """Notes as plain values beside the records, which expire by themselves."""

    def __init__(self, client: Any, prefix: str) -> None:
        self._client, self._prefix = client, f"{prefix}n:"

    def names(self, suffix: str) -> list[str]:
        with explained():
            pattern = f"{_literal(self._prefix)}*{_literal(suffix)}"
            found = self._client.scan_iter(match=pattern, count=1000)
            return sorted(name[len(self._prefix) :].decode("utf-8", "replace") for name in found)

    def read(self, name: str, most_bytes: int) -> bytes | None:
        with explained():
            data = self._client.get(self._prefix + name)
            if data is not None and (not isinstance(data, bytes) or len(data) > most_bytes):
                raise BlobError("size", "longer than all notes together may be")
            return data

    def write(self, name: str, pieces: Sequence[bytes], life_s: float) -> None:
        with explained():
            self._client.set(self._prefix + name, b"".join(pieces), px=max(1, min(int(life_s * 1000), 1 << 50)))

    def remove(self, name: str) -> None:
        with explained():
            self._client.delete(self._prefix + name)


class Redis:
    """Records on one server, under a namespace."""

    name = "redis"

    def __init__(
        self,
        url: str,
        budget: Budget,
        ttl_s: float = 7 * 86400.0,
        namespace: str = "kvilt",
        read_timeout_s: float = 0.25,
        write_timeout_s: float = 5.0,
    ) -> None:
        if redis is None:
            raise Unsupported("the Redis tier needs the package redis; install kvilt[store]")
        self._prefix = f"{{{namespace}}}:"
        self.budget = budget
        self._ttl_ms = max(1, int(ttl_s * 1000))
        self._read_pool = _pool(url, read_timeout_s)
        self._line = _Line(self._read_pool)
        self._write_pool = _pool(url, write_timeout_s, connect_s=read_timeout_s)
        self._client = redis.Redis(connection_pool=self._write_pool)
        self.note_medium = RedisNotes(self._client, self._prefix)
        self._put, self._touch, self._note, self._forget, self._usage = map(self._client.register_script, SCRIPTS)

    def open(self, key: bytes) -> RedisReader:
        return RedisReader(self._line, self._name(key))

    def has(self, keys: Sequence[bytes]) -> list[bool]:
        with explained(), redis.Redis(connection_pool=self._read_pool).pipeline(transaction=False) as pipe:
            for key in keys:
                pipe.exists(self._name(key))
            return [answer == 1 for answer in pipe.execute()]

    def put(self, key: bytes, record: Sequence[bytes], info: RecordInfo) -> int:
        data, budget = b"".join(record), self.budget
        if len(data) > min(budget.record, _MAX_VALUE_BYTES):
            raise StoreError("too_large", f"{len(data)} bytes are more than a record here may have")
        limits = (budget.total_bytes, budget.tenant, budget.retain, self._ttl_ms)
        gone, known = self._numbers(
            lambda: self._put([self._prefix], [key.hex(), data, info.tenant, int(info.retain), *limits])
        )
        if gone < 0:
            raise StoreError("too_large", "the record does not fit what its tenant may have")
        if known == 1:  # the first record, or the index was lost
            self.rebuild()
        return gone

    def touch(self, keys: Sequence[bytes]) -> None:
        with explained():
            unknown = self._touch([self._prefix], [self._ttl_ms, *(key.hex() for key in keys)])
            self._know(unknown if isinstance(unknown, list) else [])

    def discard(self, key: bytes) -> None:
        with explained():
            self._forget([self._prefix], [key.hex()])

    def every_key(self) -> Iterator[bytes]:
        with explained():
            for text in self._texts():
                with suppress(ValueError):
                    yield bytes.fromhex(text.decode("ascii"))

    def usage(self) -> TierUsage:
        return TierUsage(*self._numbers(lambda: self._usage([self._prefix])))

    def probe(self) -> None:
        with explained():
            if redis.Redis(connection_pool=self._read_pool).ping() is not True:
                raise StoreError("garbage", "the Redis tier answered a ping with something else")

    def rebuild(self) -> None:
        """Rebuild the index from all records."""
        with explained():
            found: list[bytes] = []
            for text in self._texts():
                found.append(text)
                if len(found) == 256:
                    self._know(found)
                    found = []
            self._know(found)

    def close(self) -> None:
        self._line.close()
        for pool in (self._read_pool, self._write_pool):
            with suppress(Exception):
                pool.disconnect()

    def _texts(self) -> Iterator[bytes]:
        """The names of all records, without what they have in common."""
        for name in self._client.scan_iter(match=_literal(self._prefix) + "r:*", count=1000):
            yield name[len(self._prefix) + 2 :]

    def _know(self, keys: Sequence[bytes]) -> None:
        """Add records to the index; their headers name the owners."""
        pairs: list[str] = []
        facts = self._client.hmget(self._prefix + "facts", keys) if keys else []
        for text in [key for key, fact in zip(keys, facts, strict=True) if fact is None]:
            reader = RedisReader(self._line, self._prefix + "r:" + text.decode("ascii"))
            try:
                if reader.nbytes > 0:
                    pairs += [text.decode("ascii"), peek(reader.read, reader.nbytes).tenant]
            except BlobError:
                self._forget([self._prefix], [text])
            finally:
                reader.close()
        if pairs:
            self._note([self._prefix], pairs)

    def _numbers(self, ask: Callable[[], Any]) -> tuple[int, int]:
        with explained():
            match ask():
                case [int(first), int(second)]:
                    return first, second
                case _:
                    raise StoreError("garbage", "the Redis tier answered something else than was asked")

    def _name(self, key: bytes) -> str:
        return f"{self._prefix}r:{key.hex()}"


def _pool(url: str, timeout_s: float, connect_s: float | None = None) -> Any:
    """Connections that give up in time and try nothing twice: the breaker above decides when to try again."""
    return redis.ConnectionPool.from_url(
        url,
        max_connections=32,
        socket_timeout=timeout_s,
        socket_connect_timeout=connect_s or timeout_s,
        retry=Retry(NoBackoff(), 0),
        retry_on_timeout=False,
        health_check_interval=0,
        protocol=2,
        decode_responses=False,
    )


def _literal(text: str) -> str:
    """A text in a pattern of SCAN that means itself."""
    return "".join(f"\\{one}" if one in "*?[]^\\" else one for one in text)
