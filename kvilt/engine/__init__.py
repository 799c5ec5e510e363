"""One step loop for many requests: what to compute next, the step itself, and who hears of it."""
