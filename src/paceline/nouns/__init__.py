"""Values that every other package uses: errors, clock, mesh, plan, workload, data order, step record.

Values over the standard library, without torch, sockets or clock reads. Whatever stands here can be
built in a test in one line.
"""
