"""Holds a plan against its promise: the distributed step is the single-process step, on the person's own model.

The reference runs in a process of its own, by the person's plain code, and imports nothing of `parallel/` or `comm/`.
"""
