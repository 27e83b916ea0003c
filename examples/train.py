"""README's example: a workload, and a loop of your own."""

import torch

import paceline


def loss(model, batch):  # (sum, weight): the mean does not depend on how the batch is split
    x, y = batch
    return torch.nn.functional.cross_entropy(model(x), y, reduction="sum"), len(y)


torch.manual_seed(0)  # every rank makes the same data
x = torch.randn(4096, 20)
workload = paceline.Workload(
    model=lambda: torch.nn.Sequential(torch.nn.Linear(20, 64), torch.nn.ReLU(), torch.nn.Linear(64, 2)),
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
    data=torch.utils.data.TensorDataset(x, (x.sum(1) > 0).long()),
    batch_size=64,  # over all ranks
    epochs=3,
)

if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        mean = job.step(batch)
        if job.rank == 0 and job.step_number % 64 == 0:
            print(f"step {job.step_number}  loss {mean:.4f}")
    job.save("out")
