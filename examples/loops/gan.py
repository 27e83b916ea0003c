"""A GAN with gradient penalty (WGAN-GP): two models, two optimizers, a gradient inside the loss.

Noise is drawn in the data set's collate, so that it does not depend on how many ranks there are.
"""

import torch
from torch import nn
from torch.utils.data import DataLoader, default_collate

import paceline

CRITIC_STEPS = 2  # for one of the generator
torch.manual_seed(0)
points = torch.randn(256, 2) * torch.tensor([1.0, 0.2]) + 2
generator = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
update_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
update_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))


class WithNoise(torch.utils.data.Dataset):
    """Each sample with noise of its own."""

    def __len__(self):
        return len(points)

    def __getitem__(self, index):
        return points[index], torch.randn(4), torch.rand(1)


loader = DataLoader(WithNoise(), batch_size=32, shuffle=True, collate_fn=default_collate)
job, generator, critic, update_generator, update_critic, loader = paceline.prepare(
    generator, critic, update_generator, update_critic, loader
)

for _ in job.epochs(3):
    for real, noise, share in loader:
        update_critic.zero_grad()
        fake = generator(noise).detach()
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        job.backward(critic(fake).mean() - critic(real).mean() + 10 * penalty)
        update_critic.step()
        if job.step_number % CRITIC_STEPS == 0:
            update_generator.zero_grad()
            job.backward(-critic(generator(noise)).mean())
            update_generator.step()
