"""Run parameter servers: workers push gradients, servers average and update, workers pull (Li et al., OSDI 2014).

The protocol is made of state machines: messages and the time go in, messages come out, without I/O. The same classes
run between processes and in a simulator that drops, duplicates and reorders messages and kills processes.

`paceline run --plan server=2` starts servers for a workload; `handle.connect` joins them from your own loop.
"""
