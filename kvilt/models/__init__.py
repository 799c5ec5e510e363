"""Decoder-only models as data: specs, one decoder for all of them, and a file per family."""
