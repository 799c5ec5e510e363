"""The engine: many requests through shared steps of one executor.

Read `engine.py` first: its spine is one step. Before a step `planner.py` applies the plan of `scheduling/`. The step
itself is in `step_runner.py` (rows, forward, commit); `active.py` has what happens to requests; `admission.py` makes
jobs of them. `features/` plug in by one protocol, `handles/` keep named KV, and `driver.py` is a thread that steps.
"""
