"""The parameter server: workers push gradients, servers average and update, workers pull (Li et al., OSDI 2014).

The protocol is made of state machines: messages and the time go in, messages come out, nothing is sent from inside.
The same classes run between processes and in a simulator that loses, doubles, reorders and kills.

`paceline run --plan server=2` starts servers for a workload; `handle.connect` joins them from a loop of one's own.
"""
