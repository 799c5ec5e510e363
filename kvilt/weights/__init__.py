"""Checkpoints on disk: fetched, opened, and checked field by field."""
