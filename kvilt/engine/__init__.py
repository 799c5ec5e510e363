"""One step loop for many requests: the scheduler, the step itself, and the events for listeners."""
