"""How messages travel between a job's processes: frames over TCP with mutual TLS, and who may connect."""
