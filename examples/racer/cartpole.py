"""gymnasium's CartPole-v1: several at once, each with an episode of its own."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from paceline.nouns.errors import UsageError


class Poles:
    """Carts with a pole; see `car.Cars` for the methods.

    Args:
        seed: with an episode's number it gives the beginning.
    """

    observation_size, actions = 4, 2

    def __init__(self, seed: int) -> None:
        try:
            import gymnasium
        except ImportError as error:
            fix = "install it: pip install gymnasium, or leave --task out to drive"
            raise UsageError("--task cartpole", "gymnasium is not installed", fix) from error
        self.make = lambda: gymnasium.make("CartPole-v1", disable_env_checker=True)
        self.seed = seed
        self.carts: list = []

    def reset(self, episodes: Sequence[int]) -> np.ndarray:
        """Begin an episode for each number. Return what is observed, (E, 4)."""
        self.carts += [self.make() for _ in range(len(episodes) - len(self.carts))]
        self.seen = np.zeros((len(episodes), self.observation_size))
        for cart, episode in enumerate(episodes):
            self.begin(cart, episode)
        return self.seen.copy()

    def begin(self, cart: int, episode: int) -> None:
        """Begin an episode with one cart."""
        entropy = np.random.SeedSequence([self.seed, episode]).generate_state(1)
        self.seen[cart], _ = self.carts[cart].reset(seed=int(entropy[0]))

    def look(self) -> np.ndarray:
        """What is observed, (E, 4)."""
        return self.seen.copy()

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Push each cart to the left (0) or right (1)."""
        rewards, ended, cut = np.zeros(len(actions)), np.zeros(len(actions), bool), np.zeros(len(actions), bool)
        for cart, action in enumerate(actions.tolist()):
            self.seen[cart], rewards[cart], ended[cart], cut[cart], _ = self.carts[cart].step(action)
        return self.seen.copy(), rewards, ended, cut
