"""Implement the `context` axis: attention shared by ranks with other positions, and what they exchange."""
