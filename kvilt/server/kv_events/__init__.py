"""KV events: what the prefix index has, published in the schema that routers of vLLM replicas read."""
