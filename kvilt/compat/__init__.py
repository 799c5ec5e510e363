"""Interfaces that other engines and schedulers call, over kvilt's own executor."""
