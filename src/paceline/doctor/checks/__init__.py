"""Findings on the facts: of one host, of its network and its torch, and between hosts."""
