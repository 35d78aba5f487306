"""PPO with a critic in torch's own parts: one sequence at a time, no packing, no flat vector, plain loops."""

from __future__ import annotations

import numpy as np
import torch


class Oracle:
    """Policy, critic and two AdamWs; ``trunk`` None reads the policy's hidden states."""

    def __init__(self, policy, trunk, reference, *, lr, critic_lr, algorithm):
        self.policy, self.trunk, self.reference, self.algorithm = policy, trunk, reference, algorithm
        self.head = torch.nn.Linear(policy.config.hidden_size, 1)
        torch.nn.init.zeros_(self.head.weight)
        torch.nn.init.zeros_(self.head.bias)
        critic = [*self.head.parameters(), *(trunk.parameters() if trunk else [])]
        self.parameters = [*policy.parameters(), *critic]
        groups = [{"params": list(policy.parameters()), "lr": lr}, {"params": critic, "lr": critic_lr}]
        self.adamw = torch.optim.AdamW(groups, betas=(0.9, 0.95), weight_decay=0.0)

    def forward(self, trajectory):
        """Log-probabilities, entropies, values of the trained tokens, and log-probabilities of the reference."""
        ids = torch.from_numpy(trajectory.tokens.astype(np.int64))
        at = np.flatnonzero(trajectory.loss_mask)
        output = self.policy(input_ids=ids[None], output_hidden_states=True)
        table = torch.log_softmax(output.logits[0], -1)
        hidden = output.hidden_states[-1][0] if self.trunk is None else self.trunk(input_ids=ids[None])[0][0]
        values = self.head(hidden).squeeze(-1)
        with torch.no_grad():
            ref_table = torch.log_softmax(self.reference(input_ids=ids[None]).logits[0], -1)
        rows = [table[t - 1] for t in at]
        return (
            torch.stack([table[t - 1, ids[t]] for t in at]),
            torch.stack([-(row.exp() * row).sum() for row in rows]),
            torch.stack([values[t - 1] for t in at]),
            torch.stack([ref_table[t - 1, ids[t]] for t in at]),
        )

    def advantages(self, trajectories, beta):
        """GAE by its definition, token by token; then normalised over all of them."""
        gamma, lam = self.algorithm.gamma, self.algorithm.lam
        advantages, returns, olds = [], [], []
        for trajectory in trajectories:
            with torch.no_grad():
                _, _, values, reference = self.forward(trajectory)
            values = values.tolist()
            behaviour = trajectory.logprobs[trajectory.loss_mask == 1].tolist()
            rewards = [-beta * (b - r) for b, r in zip(behaviour, reference.tolist(), strict=True)]
            rewards[-1] += trajectory.reward
            row = []
            for t in range(len(values)):
                total = 0.0
                for later in range(t, len(values)):
                    after = values[later + 1] if later + 1 < len(values) else 0.0
                    total += (gamma * lam) ** (later - t) * (rewards[later] + gamma * after - values[later])
                row.append(total)
            advantages.append(row)
            returns.append([a + v for a, v in zip(row, values, strict=True)])
            olds.append(values)
        flat = np.concatenate(advantages)
        return [[(a - flat.mean()) / flat.std() for a in row] for row in advantages], returns, olds

    def step(self, mini_batches, epochs, beta):
        """All updates of a step over lists of trajectories."""
        whole = [t for part in mini_batches for t in part]
        known = dict(zip(map(id, whole), zip(*self.advantages(whole, beta), strict=True), strict=True))
        for part in mini_batches * epochs:
            tokens = sum(int(t.loss_mask.sum()) for t in part)
            self.adamw.zero_grad()
            loss = sum(self.loss(t, *known[id(t)]) for t in part) / tokens
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.parameters, 0.5)
            self.adamw.step()

    def loss(self, trajectory, advantages, returns, olds):
        """Sum over the tokens of one sequence."""
        algorithm, total = self.algorithm, 0.0
        logprobs, entropies, values, _ = self.forward(trajectory)
        behaviour = trajectory.logprobs[trajectory.loss_mask == 1]
        for t in range(len(advantages)):
            ratio = torch.exp(logprobs[t] - float(behaviour[t]))
            clipped = torch.clip(ratio, 1 - algorithm.clip_low, 1 + algorithm.clip_high)
            policy = -torch.min(ratio * advantages[t], clipped * advantages[t])
            near = torch.clip(values[t], olds[t] - algorithm.value_clip, olds[t] + algorithm.value_clip)
            value = torch.max((values[t] - returns[t]) ** 2, (near - returns[t]) ** 2)
            total = total + policy + algorithm.value_coef * value - algorithm.entropy_coef * entropies[t]
        return total
