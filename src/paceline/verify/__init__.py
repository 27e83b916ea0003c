"""Check on the user's own model that a plan's distributed step is the single-process step.

The reference runs the user's plain code in a separate process, and imports nothing of `parallel/` or `comm/`.
"""
