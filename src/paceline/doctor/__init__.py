"""Looks at the hosts of a job before it starts, and says what will stop it or slow it down, each with its fix."""
