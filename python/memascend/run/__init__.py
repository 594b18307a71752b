"""One training run: offload(), its session, the optimizer that users hold, state dicts and reports."""
