"""Implement the `shard` axis: FSDP2 for ZeRO 2 and 3, sharded optimizer state for ZeRO 1, per-parameter updates."""
