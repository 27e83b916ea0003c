"""The transport of messages between a job's processes: frames over unix sockets or TCP with mutual TLS."""
