"""Attacks on a running server, and what other keys notice of them. Run by `bench/server_hostile.py`."""
