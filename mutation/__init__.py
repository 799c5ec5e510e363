"""The mutation run: do the fast tests notice a small change of the code? See `docs/testing.md`."""
