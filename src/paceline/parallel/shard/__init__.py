"""Implement the `shard` axis: FSDP2 for ZeRO-2 and ZeRO-3, updates that ranks share out for ZeRO-1."""
