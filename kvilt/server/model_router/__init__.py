"""Several models behind one address. Each is a server process, started by the first request that names it."""
