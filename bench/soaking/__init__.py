"""A long run of mixed requests, and what is sampled meanwhile. Run by `bench/soak.py`."""
