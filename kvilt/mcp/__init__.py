"""A model as tools of the Model Context Protocol: generate, blend documents, and the verbs of KV.

Needs the extra `mcp`. Every tool is a translation onto `AsyncLLM`; refuses to know how a model is found and loaded.
"""
