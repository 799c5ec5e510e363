"""What plugs into the engine: drafts, blending, prefixes in a store and quality checks."""
