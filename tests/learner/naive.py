"""The textbook in plain Python floats and loops, written without looking at how the learner computes it.

Sequences are lists of ``Token``; nothing is flat, batched or vectorised here.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

from learner.algorithms.objective import Counts, Outputs, objective
from learner.batching import MicroBatch


@dataclass(frozen=True)
class Token:
    logprob: float
    behaviour: float
    proximal: float
    reference: float
    advantage: float
    age: int
    entropy: float = 0.7
    value: float = 0.0
    old_value: float = 0.0
    target: float = 0.0


def random_sequences(seed, count=6, longest=7, spread=0.6, one_advantage=False):
    rng = random.Random(seed)
    sequences = []
    for _ in range(count):
        shared = rng.gauss(0, 1)
        tokens = []
        for _ in range(rng.randint(1, longest)):
            logprob = -rng.uniform(0.1, 4)
            tokens.append(
                Token(
                    logprob=logprob,
                    behaviour=logprob + rng.gauss(0, spread),
                    proximal=logprob + rng.gauss(0, spread / 2),
                    reference=logprob + rng.gauss(0, spread),
                    advantage=shared if one_advantage else rng.gauss(0, 1),
                    age=rng.randint(0, 4),
                    entropy=rng.uniform(0, 2),
                    value=rng.gauss(0, 1),
                    old_value=rng.gauss(0, 1),
                    target=rng.gauss(0, 1),
                )
            )
        sequences.append(tokens)
    return sequences


def clip(x, low, high):
    return low if x < low else high if x > high else x


# --- what the learner is fed with --------------------------------------------------------------------------------


def micro_batch(sequences, order=None, dtype=torch.float64):
    """Flat tensors of whole sequences; ``order`` interleaves them (token order within each is kept by the caller)."""
    flat = [(s, t) for s, tokens in enumerate(sequences) for t in tokens]
    if order is not None:
        flat = [flat[i] for i in order]
    whole = torch.zeros(0, dtype=torch.int64)

    def column(name):
        return torch.tensor([getattr(t, name) for _, t in flat], dtype=dtype)

    return MicroBatch(
        inputs_RL=whole.view(0, 0),
        source_N=whole,
        targets_N=whole,
        reads_M=whole,
        index_M=whole,
        sequence_M=torch.tensor([s for s, _ in flat], dtype=torch.int64),
        num_sequences=len(sequences),
        behaviour_logprobs_M=column("behaviour"),
        advantages_M=column("advantage"),
        sequence_lengths_M=torch.tensor([float(len(sequences[s])) for s, _ in flat], dtype=dtype),
        ages_M=torch.tensor([t.age for _, t in flat], dtype=torch.int64),
        proximal_logprobs_M=column("proximal"),
        ref_logprobs_M=column("reference"),
        old_values_M=column("old_value"),
        returns_M=column("target"),
    ), Outputs(
        logprobs_M=column("logprob").requires_grad_(),
        entropy_M=column("entropy").requires_grad_(),
        values_M=column("value").requires_grad_(),
        ref_logprobs_M=column("reference"),
    )


def interleaved(sequences, seed):
    """A random order of all tokens in which each sequence's own tokens stay in order of time."""
    rng = random.Random(seed)
    starts = [sum(len(s) for s in sequences[:i]) for i in range(len(sequences))]
    left = [list(range(start, start + len(s))) for start, s in zip(starts, sequences, strict=True)]
    order = []
    while any(left):
        order.append(rng.choice([indices for indices in left if indices]).pop(0))
    return order


def counts_of(sequences, longest=9):
    return Counts(num_tokens=sum(map(len, sequences)), num_sequences=len(sequences), longest=longest)


def run_objective(sequences, algorithm, counts=None, order=None, kl_coef=None):
    """Loss, gradient of the log-probabilities and sums, all of one micro-batch."""
    batch, outputs = micro_batch(sequences, order)
    coef = algorithm.kl_coef if kl_coef is None else kl_coef
    loss, sums = objective(batch, outputs, algorithm, counts or counts_of(sequences), coef, num_ages=6)
    loss.backward()
    return loss.item(), outputs.logprobs_M.grad, sums


# --- the textbook ------------------------------------------------------------------------------------------------


def proximal_of(token, algorithm):
    if algorithm.proximal == "behaviour":
        return token.behaviour
    if algorithm.proximal == "recomputed":
        return token.proximal
    alpha = 0.0 if token.age == 0 else 1.0 / token.age
    return alpha * token.behaviour + (1 - alpha) * token.logprob


def naive_weights(tokens, algorithm):
    raw = [math.exp(proximal_of(t, algorithm) - t.behaviour) for t in tokens]
    product = math.prod(raw)
    low, high = algorithm.correction_low, algorithm.correction_high
    weights = []
    for token, w in zip(tokens, raw, strict=True):
        if algorithm.correction == "truncate":
            w = min(w, high)
        elif (
            (algorithm.correction == "mask" and not low <= w <= high)
            or (algorithm.correction == "sequence_mask" and not low <= product <= high)
            or (algorithm.correction == "geometric_mask" and not low <= product ** (1 / len(tokens)) <= high)
        ):
            w = 0.0
        if 0 <= algorithm.max_token_age < token.age:
            w = 0.0
        weights.append(w * algorithm.age_decay**token.age)
    return weights


def naive_policy_loss(token, frozen, sequence_ratio, algorithm):
    """``frozen`` is the token at the point where the gradient is taken: what a stop-gradient holds fast."""
    base = proximal_of(frozen, algorithm)
    low, high = 1 - algorithm.clip_low, 1 + algorithm.clip_high
    ratio = math.exp(token.logprob - base)
    if algorithm.loss == "importance":
        return -ratio * token.advantage
    if algorithm.loss == "cispo":
        return -clip(math.exp(frozen.logprob - base), low, high) * token.advantage * token.logprob
    if algorithm.loss == "gspo":
        ratio = sequence_ratio * math.exp(token.logprob - frozen.logprob)
    surrogate = min(ratio * token.advantage, clip(ratio, low, high) * token.advantage)
    if algorithm.loss == "ppo" and algorithm.dual_clip > 0 and token.advantage < 0:
        surrogate = max(surrogate, algorithm.dual_clip * token.advantage)
    return -surrogate


def naive_kl(token, estimator):
    ratio = math.exp(token.reference - token.logprob)
    return {"k1": -math.log(ratio), "k2": math.log(ratio) ** 2 / 2, "k3": ratio - 1 - math.log(ratio)}[estimator]


def naive_value_loss(token, limit):
    plain = (token.value - token.target) ** 2
    if limit == 0:
        return plain
    near = clip(token.value, token.old_value - limit, token.old_value + limit)
    return max(plain, (near - token.target) ** 2)


def naive_objective(sequences, frozen, algorithm, counts):
    total = 0.0
    for tokens, held in zip(sequences, frozen, strict=True):
        weights = naive_weights(held, algorithm)
        ratios = [t.logprob - proximal_of(t, algorithm) for t, w in zip(held, weights, strict=True) if w != 0]
        sequence_ratio = math.exp(sum(ratios) / len(ratios)) if ratios else 1.0
        losses = []
        for token, hold, weight in zip(tokens, held, weights, strict=True):
            loss = weight * naive_policy_loss(token, hold, sequence_ratio, algorithm)
            loss -= algorithm.entropy_coef * token.entropy
            if algorithm.kl_in == "loss":
                loss += algorithm.kl_coef * naive_kl(token, algorithm.kl_estimator)
            if algorithm.advantage == "gae":
                loss += algorithm.value_coef * naive_value_loss(token, algorithm.value_clip)
            losses.append(loss)
        if algorithm.aggregation == "token":
            total += sum(losses) / counts.num_tokens
        elif algorithm.aggregation == "sequence":
            total += sum(losses) / len(losses) / counts.num_sequences
        else:
            total += sum(losses) / counts.num_sequences / counts.longest
    return total


def naive_gradient(sequences, algorithm, counts, field="logprob", step=1e-6):
    """Central differences, token by token, in order of the sequences."""
    gradient = []
    for s, tokens in enumerate(sequences):
        for t, token in enumerate(tokens):
            moved = []
            for sign in (1, -1):
                other = [list(x) for x in sequences]
                other[s][t] = replace(token, **{field: getattr(token, field) + sign * step})
                moved.append(naive_objective(other, sequences, algorithm, counts))
            gradient.append((moved[0] - moved[1]) / (2 * step))
    return gradient
