"""The other runtimes of `cpu_peers.py`: how each is asked, timed and fed with the same weights."""
