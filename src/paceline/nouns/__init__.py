"""Define the plain data types of every other package: errors, clock, mesh, plan, workload, data order, step record.

They need only the standard library: no torch, no sockets, no clock reads. A test can build each in one line.
"""
