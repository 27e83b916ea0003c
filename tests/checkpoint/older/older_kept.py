"""The workload with an average and objects that the loop keeps, run with two ranks and --checkpoint-every 6."""

import random

import torch
from older_workload import workload

import paceline

job = paceline.distribute(workload)
ema = job.ema(0.9)
stop = job.keep("stop", {"best": float("inf"), "seen": []})
own = job.keep("own", random.Random(job.rank), per_rank=True)
noise = job.keep("noise", torch.Generator().manual_seed(1))
for batch in job.batches():
    mean = job.step(batch)
    ema.update()
    stop["best"] = min(stop["best"], mean)
    stop["seen"].append(float(torch.rand((), generator=noise)))
    own.random()
with ema.applied():
    averaged = job.evaluate(workload.data)["loss"]
print(f"rank {job.rank} ends with {averaged:.9e} {stop['best']:.9e} {sum(stop['seen']):.9f} {own.random():.9f}")
