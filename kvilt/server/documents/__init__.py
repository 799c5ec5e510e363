"""Texts of files that become documents."""
