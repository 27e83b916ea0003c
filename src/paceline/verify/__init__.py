"""Check a plan's promise, that the distributed step is the single-process step, on the user's own model.

The reference runs in a process of its own, by the user's plain code, and imports nothing of `parallel/` or `comm/`.
"""
