"""The `kvilt` command. Plain command lines of `run` and `chat` start without typer, all others with it."""

from __future__ import annotations

import sys

from .plain_args import plain_start


def main() -> None:
    """The entry point."""
    if (start := plain_start(sys.argv[1:])) is not None:
        start()
        return
    from .app import app

    app()


if __name__ == "__main__":
    main()
