"""Asks `/health` every 10 ms from a process of its own and writes down how long each answer took.

python poll.py HOST PORT FILE    a line for each: when it was asked (monotonic seconds), seconds until the answer
"""

from __future__ import annotations

import http.client
import sys
import time
from pathlib import Path

EVERY_S = 0.01


def main() -> None:
    host, port, path = sys.argv[1], int(sys.argv[2]), Path(sys.argv[3])
    connection: http.client.HTTPConnection | None = None
    with path.open("w", buffering=1) as out:
        while True:
            began_s = time.monotonic()
            try:
                connection = connection or http.client.HTTPConnection(host, port, timeout=120)
                connection.request("GET", "/health")
                connection.getresponse().read()
            except (OSError, http.client.HTTPException):
                connection = None
            took_s = time.monotonic() - began_s
            out.write(f"{began_s:.4f} {took_s:.5f}\n")
            time.sleep(max(0.0, EVERY_S - took_s))


if __name__ == "__main__":
    main()
