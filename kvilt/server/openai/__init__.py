"""The OpenAI API, with the extensions of vLLM that clients know."""
