"""Derive findings from the facts: of one host, of its network and torch, and between hosts."""
