"""The scheduler: which samples get rows and pages. Counts tokens, rows and pages, and knows nothing else."""
