"""The HTTP server: requests as clients already write them, on one `AsyncLLM`. Needs the extra `server`."""
