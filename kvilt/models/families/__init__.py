"""One file per model family: how its checkpoints are configured and named."""
