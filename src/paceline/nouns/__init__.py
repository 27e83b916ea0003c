"""Define the plain data types of every other package: errors, clock, mesh, plan, workload, data order, step record.

They need only the standard library, not torch. A test can build each in one line. Only `reading.py` reads files, and
only `clock.py` reads a clock.
"""
