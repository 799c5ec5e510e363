"""Several replicas of one server behind one address, and the router that sends requests where their KV is."""
