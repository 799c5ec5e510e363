"""kvilt: an LLM runtime in which the KV cache is a value you hold."""
