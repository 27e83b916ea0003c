"""The policy and the value of a state."""

from __future__ import annotations

import torch
from torch import nn


class Policy(nn.Module):
    """An actor and a critic.

    Args:
        observations: numbers that are observed.
        actions: how many there are.
        width: of the two hidden layers of each.
    """

    def __init__(self, observations: int, actions: int, width: int) -> None:
        super().__init__()
        self.actor = self._layers(observations, width, actions, gain=0.01)  # at first all actions are as likely
        self.critic = self._layers(observations, width, 1, gain=1.0)

    @staticmethod
    def _layers(inputs: int, width: int, outputs: int, gain: float) -> nn.Sequential:
        layers = [nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh(), nn.Linear(width, outputs)]
        for layer in layers[::2]:
            nn.init.orthogonal_(layer.weight, 2**0.5)
            nn.init.zeros_(layer.bias)
        nn.init.orthogonal_(layers[-1].weight, gain)
        return nn.Sequential(*layers)

    def forward(self, seen: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the logits of the actions (N, actions) and the values (N,) of what is observed (N, observations)."""
        return self.actor(seen), self.critic(seen)[:, 0]
