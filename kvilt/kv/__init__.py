"""KV as a value: layouts, the page pool, caches and their bytes. Knows no model and no store."""
