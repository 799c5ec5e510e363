"""Named handles on KV."""
