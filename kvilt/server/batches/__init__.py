"""Batches: many requests in a file, answered together."""
