"""Requests and answers as pydantic models: what the OpenAPI document says, and all that is checked before any work."""
