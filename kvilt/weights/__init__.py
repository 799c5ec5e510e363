"""Checkpoints on disk: where they come from, what they hold, and whether it is what they claim."""
