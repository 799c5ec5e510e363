"""HTTP without knowledge of any API: connections, admission, bodies, errors, responses."""
