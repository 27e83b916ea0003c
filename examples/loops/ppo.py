"""PPO: the model makes the batches, and each rank has as many samples as its episodes gave.

There is no loader; the weight of a rank's loss is its number of samples, so that the mean is that of all episodes.
"""

import torch
from torch import nn
from torch.distributions import Categorical

import paceline

ROLLOUTS, EPOCHS, EPISODES = 6, 3, 8
torch.manual_seed(0)
actor = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 3))
critic = nn.Sequential(nn.Linear(2, 32), nn.Tanh(), nn.Linear(32, 1))
optimizer = torch.optim.Adam([*actor.parameters(), *critic.parameters()], lr=3e-3)
job, actor, critic, optimizer = paceline.prepare(actor, critic, optimizer)


def play(rollout, episode):
    """Walk to the origin; episodes end there, or after 20 steps, so they differ in length."""
    random = torch.Generator().manual_seed(1000 * rollout + episode)  # the same episode on any number of ranks
    place = torch.randn(2, generator=random)
    states, actions, rewards = [], [], []
    for _ in range(20):
        with torch.no_grad():
            action = torch.multinomial(actor(place).softmax(dim=0), 1, generator=random).item()
        states.append(place)
        actions.append(action)
        moves = torch.tensor([[0.3, 0.0], [-0.3, 0.0], [0.0, -0.3 * place[1].sign()]])
        place = place + moves[action]
        rewards.append(-place.norm())
        if place.norm() < 0.4:
            break
    returns = torch.stack(rewards).flip(0).cumsum(0).flip(0)
    return torch.stack(states), torch.tensor(actions), returns


rollout = job.step_number // EPOCHS  # a resumed job begins where it was
while rollout < ROLLOUTS:
    with job.gathered():  # ranks call the actor as often as their episodes need
        episodes = [play(rollout, episode) for episode in range(job.data_rank, EPISODES, job.data_size)]
    states, actions, returns = (torch.cat(parts) for parts in zip(*episodes, strict=True))
    with torch.no_grad():
        before = Categorical(logits=actor(states)).log_prob(actions)
        advantages = returns - critic(states)[:, 0]
    for _ in range(EPOCHS):
        ratio = (Categorical(logits=actor(states)).log_prob(actions) - before).exp()
        gain = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
        loss = -gain.mean() + 0.5 * (critic(states)[:, 0] - returns).square().mean()
        optimizer.zero_grad()
        job.backward(loss, weight=len(states))
        job.clip(0.5)
        optimizer.step()
    rollout += 1
