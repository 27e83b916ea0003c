"""Read the facts of one host: cores, memory, disks, network, accelerators, torch."""
