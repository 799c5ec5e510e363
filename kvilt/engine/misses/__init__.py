"""Why a prompt reused less KV than an earlier one left behind."""
