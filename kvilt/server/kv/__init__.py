"""The KV API: handles, saved files, chunks of documents, and the state of the memory."""
