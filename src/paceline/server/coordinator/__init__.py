"""Run the coordinator's process: its log, the state machine of `protocol/`, and the workers missing from each step."""
