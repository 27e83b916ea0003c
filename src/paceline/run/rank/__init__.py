"""Run a rank's process, forked or started by another launcher; its watchdog, and a server's process."""
