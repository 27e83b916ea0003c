"""Define the parameter server's protocol as state machines: messages and the time go in, messages come out, no I/O."""
