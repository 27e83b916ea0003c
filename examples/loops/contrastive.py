"""SimCLR: each view is compared with all others of the whole batch, those of the other ranks too.

`all_gather(..., grad=True)` gives every rank all views, and brings their gradients back to the ranks that made them.
"""

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader

import paceline

torch.manual_seed(0)
images = torch.randn(240, 24)
encoder = nn.Sequential(nn.Linear(24, 48), nn.ReLU(), nn.Linear(48, 8))
optimizer = torch.optim.AdamW(encoder.parameters(), lr=1e-3)


class TwoViews(torch.utils.data.Dataset):
    """Two noisy views of each image."""

    def __len__(self):
        return len(images)

    def __getitem__(self, index):
        return images[index] + 0.1 * torch.randn(24), images[index] + 0.1 * torch.randn(24)


# Without a short last batch: a rank without samples of its own would take part with a sample that does not count.
loader = DataLoader(TwoViews(), batch_size=32, shuffle=True, drop_last=True)
job, encoder, optimizer, loader = paceline.prepare(encoder, optimizer, loader)

for _ in job.epochs(3):
    for first, second in loader:
        left = F.normalize(encoder(first), dim=1)
        right = F.normalize(encoder(second), dim=1)
        all_right = job.all_gather(right, grad=True)
        # This rank's views stand together among all of them.
        before = job.all_gather(torch.tensor([len(left)]))[: job.data_rank].sum()
        labels = torch.arange(len(left)) + before
        loss = F.cross_entropy(left @ all_right.T / 0.2, labels)
        optimizer.zero_grad()
        job.backward(loss)
        optimizer.step()
