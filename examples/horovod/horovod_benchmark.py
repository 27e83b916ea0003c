"""Images per second of a small convolutional network on drawn data, in Horovod's names.

paceline horovodrun -np 2 python horovod_benchmark.py --num-iters 5
"""

import argparse
import timeit

import horovod.torch as hvd
import torch
from torch.nn import functional

parser = argparse.ArgumentParser(description="synthetic benchmark")
parser.add_argument("--fp16-allreduce", action="store_true", help="send gradients in 16 bits")
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--num-warmup-batches", type=int, default=2)
parser.add_argument("--num-batches-per-iter", type=int, default=3)
parser.add_argument("--num-iters", type=int, default=3)
parser.add_argument("--use-adasum", action="store_true", help="reduce gradients by Adasum")
args = parser.parse_args()

hvd.init()
model = torch.nn.Sequential(
    torch.nn.Conv2d(3, 16, 3, stride=2),
    torch.nn.BatchNorm2d(16),
    torch.nn.ReLU(),
    torch.nn.Conv2d(16, 32, 3, stride=2),
    torch.nn.AdaptiveAvgPool2d(1),
    torch.nn.Flatten(),
    torch.nn.Linear(32, 10),
)
lr_scaler = 1 if args.use_adasum else hvd.size()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01 * lr_scaler)
optimizer = hvd.DistributedOptimizer(
    optimizer,
    named_parameters=model.named_parameters(),
    compression=hvd.Compression.fp16 if args.fp16_allreduce else hvd.Compression.none,
    op=hvd.Adasum if args.use_adasum else hvd.Average,
)
hvd.broadcast_parameters(model.state_dict(), root_rank=0)
hvd.broadcast_optimizer_state(optimizer, root_rank=0)
data = torch.randn(args.batch_size, 3, 32, 32)
target = torch.randint(10, (args.batch_size,))


def benchmark_step():
    optimizer.zero_grad()
    functional.cross_entropy(model(data), target).backward()
    optimizer.step()


def log(text):
    if hvd.rank() == 0:
        print(text)


log(f"batch size: {args.batch_size}, ranks: {hvd.size()}")
timeit.timeit(benchmark_step, number=args.num_warmup_batches)
rates = []
for number in range(args.num_iters):
    time = timeit.timeit(benchmark_step, number=args.num_batches_per_iter)
    rates.append(args.batch_size * args.num_batches_per_iter / time)
    log(f"iter {number}: {rates[-1]:.1f} images/s per rank")
mean = sum(rates) / len(rates)
log(f"total images/s on {hvd.size()} ranks: {hvd.size() * mean:.1f}")
