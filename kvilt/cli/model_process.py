"""The process of one of several models: `kvilt serve` of one model on loopback, told by the router that started it.

Standard input has the configuration as one line of JSON, and stays open for as long as the router lives. One line of
JSON on standard output says where the model is served, or why it is not.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any

from ..errors import DeviceMemoryError, KviltError

if TYPE_CHECKING:
    from ..server.kv_events.publisher import KVEventPublisher
    from ..server.listener import HTTPServer

_LAST_S = 10.0  # after the time of grace, until the process ends whatever it does


def main() -> None:
    """Serve until the router ends, or ends this model."""
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer to the router
    asked = json.loads(sys.stdin.readline())
    threading.Thread(target=_end_with_router, args=(asked["options"]["grace_s"],), daemon=True).start()

    def ready(listener: HTTPServer, _events: KVEventPublisher | None) -> None:
        _tell(out, _ready_line(listener))

    try:
        from .serve import serve

        named = {**asked["options"], "served_model_name": asked["names"]}
        serve(asked["model"], named, asked["engine"], asked["store"], asked["config"], ready)
    except KviltError as error:
        _tell(out, {"error": str(error), "lacks_memory": isinstance(error, DeviceMemoryError)})
        raise SystemExit(1) from None


def _ready_line(listener: HTTPServer) -> dict[str, Any]:
    executor = listener.service.llm.executor
    on_cpu = executor.pool.device.type == "cpu"
    return {
        "url": f"http://{listener.service.config.host}:{listener.port}",
        "weight_bytes": executor.weight_bytes if on_cpu else 0,
        "kv_bytes": executor.pool.nbytes if on_cpu else 0,
    }


def _tell(out: Any, line: dict[str, Any]) -> None:
    out.write(json.dumps(line) + "\n")
    out.flush()


def _end_with_router(grace_s: float) -> None:
    """Wait until the router closes our input, on purpose or because it died; then end as on a signal."""
    while sys.stdin.read(1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    threading.Event().wait(grace_s + _LAST_S)
    os._exit(1)


if __name__ == "__main__":
    main()
