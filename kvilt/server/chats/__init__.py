"""Conversations of the page, kept on the server."""
