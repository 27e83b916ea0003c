"""Send messages between a job's processes: frames over TCP with mutual TLS, and who may connect."""
