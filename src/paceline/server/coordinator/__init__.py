"""The coordinator's process: its log, the state machine of `protocol/`, and who was left out of which step."""
