"""The workload with complex parameters in the middle, and one of a single number."""

import torch
from older_workload import Numbers, loss

import paceline


class Net(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = torch.nn.Linear(4, 8), torch.nn.Linear(8, 1)
        self.spectrum = torch.nn.Parameter(torch.randn(5, dtype=torch.complex128))
        self.factor = torch.nn.Parameter(torch.tensor(1 + 1j, dtype=torch.complex128))

    def forward(self, x):
        frequencies = torch.fft.rfft(torch.tanh(self.first(x))) * self.spectrum * self.factor
        return self.last(torch.fft.irfft(frequencies, n=8))


torch.manual_seed(0)
workload = paceline.Workload(
    model=Net,
    loss=loss,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    data=Numbers(),
    batch_size=8,
    epochs=2,
    precision="float64",
    clip_norm=1.0,
)

if __name__ == "__main__":
    job = paceline.distribute(workload)
    for batch in job.batches():
        job.step(batch)
