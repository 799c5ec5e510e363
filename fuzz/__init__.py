"""Fuzzers: one module for each kind of bytes that kvilt reads from others. See `docs/security.md`."""
