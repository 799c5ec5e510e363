"""KV that outlives a process: chunks, handles and prefixes, found by content in memory, on disk and in Redis."""
