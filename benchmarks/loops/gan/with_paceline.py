"""A GAN with gradient penalty (WGAN-GP): two models, two optimizers, a gradient inside the loss."""

import torch
from torch import nn
from torch.utils.data import DataLoader

import paceline

EPOCHS = 3
torch.manual_seed(0)
points = torch.randn(250, 2) * torch.tensor([1.0, 0.2]) + 2

generator = nn.Sequential(nn.Linear(4, 32), nn.Tanh(), nn.Linear(32, 2))
critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
adam_g = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
adam_c = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
loader = DataLoader(points, batch_size=32, shuffle=True)
job, generator, critic, adam_g, adam_c, loader = paceline.prepare(generator, critic, adam_g, adam_c, loader)

for _ in job.epochs(EPOCHS):
    for real in loader:
        noise = torch.randn(len(real), 4)
        share = torch.rand(len(real), 1)

        adam_c.zero_grad()
        fake = generator(noise).detach()
        between = (share * real + (1 - share) * fake).requires_grad_()
        (slope,) = torch.autograd.grad(critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(dim=1) - 1).square().mean()
        critic_loss = critic(fake).mean() - critic(real).mean() + 10 * penalty
        job.backward(critic_loss)
        adam_c.step()

        adam_g.zero_grad()
        generator_loss = -critic(generator(noise)).mean()
        job.backward(generator_loss)
        adam_g.step()
