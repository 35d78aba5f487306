"""Advantages and value targets of a fragment [T, N]: GAE, and V-trace for steps of older policies. Pure.

values of all observations ─► next_values ─► generalized_advantages │ vtrace ─► advantages, returns

How episodes end, everywhere: behind a termination there is nothing; behind a truncation there is what the critic says
of the final observation, or, where the environment does not tell that, of the state before the step; neither goes on
into the next row. Reset steps count for nothing: their advantage is 0 and their return is their value.
"""

from __future__ import annotations

import torch


def next_values(
    values: torch.Tensor,
    last_values: torch.Tensor,
    terminated: torch.Tensor,
    truncated: torch.Tensor,
    final_values: torch.Tensor | None,
    final_index: tuple[torch.Tensor, torch.Tensor],
) -> torch.Tensor:
    """Value of the state that follows each step in its own episode.

    Args:
        values: float32 [T, N], of the states before each step.
        last_values: [N], of the states that follow the last step.
        terminated: bool [T, N]
        truncated: bool [T, N]
        final_values: [K], of what followed the truncated steps; None: not told.
        final_index: int64 [K] each, their steps and environments.

    Returns:
        float32 [T, N]; 0 after a termination.
    """
    following = torch.cat((values[1:], last_values.unsqueeze(0))).masked_fill_(terminated, 0.0)
    if final_values is None:
        return torch.where(truncated, values, following)
    following[final_index] = final_values
    return following


def generalized_advantages(
    rewards: torch.Tensor,
    values: torch.Tensor,
    following: torch.Tensor,
    ended: torch.Tensor,
    acted: torch.Tensor,
    gamma: float,
    lam: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """GAE(γ, λ) (Schulman et al. 2015, arXiv:1506.02438, eq. 16).

        δ_t = r_t + γ V'_t - V_t        A_t = δ_t + γλ A_{t+1} where the episode goes on        return_t = A_t + V_t

    Args:
        rewards: float32 [T, N]
        values: V [T, N], of the states before each step.
        following: V' [T, N], see :func:`next_values`.
        ended: bool [T, N]: the step is the last of its episode.
        acted: bool [T, N]: False on reset steps.
        gamma: discount γ.
        lam: λ.

    Returns:
        Advantages and returns, float32 [T, N] each.
    """
    deltas = (rewards + gamma * following).sub_(values).mul_(acted)
    advantages = _discounted_sums(deltas, (~ended & acted).to(values.dtype).mul_(gamma * lam))
    return advantages, advantages + values


def vtrace(
    log_ratios: torch.Tensor,
    rewards: torch.Tensor,
    values: torch.Tensor,
    following: torch.Tensor,
    ended: torch.Tensor,
    acted: torch.Tensor,
    gamma: float,
    lam: float,
    rho_max: float,
    c_max: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """V-trace (Espeholt et al. 2018, arXiv:1802.01561, eq. 1 and section 4.2), with λ.

        ρ_t = min(ρ_max, π/μ)        c_t = λ min(c_max, π/μ)        δ_t = ρ_t (r_t + γ V'_t - V_t)
        v_t = V_t + δ_t + γ c_t (v_{t+1} - V_{t+1})        A_t = r_t + γ (λ v_{t+1} + (1 - λ) V'_t) - V_t

    With π = μ, v and A are returns and advantages of GAE(γ, λ). The policy gradient's own weight ρ_t is not in A:
    the ratio of the clipped surrogate (or the weight of the decoupled clip) is that weight already.

    Args:
        log_ratios: log π/μ [T, N], of the trained policy to the one that acted.
        rewards: float32 [T, N]
        values: V [T, N]
        following: V' [T, N], see :func:`next_values`.
        ended: bool [T, N]
        acted: bool [T, N]
        gamma: discount γ.
        lam: λ.
        rho_max: largest ρ; it decides between which policies the fixed point of v lies.
        c_max: largest c / λ; it decides how fast v gets there.

    Returns:
        Advantages A and value targets v, float32 [T, N] each.
    """
    ratios = log_ratios.exp()  # one that overflows is cut to its largest value
    errors = (rewards + gamma * following).sub_(values).mul_(acted)
    goes_on = (~ended & acted).to(values.dtype)
    corrections = _discounted_sums(
        ratios.clamp(max=rho_max) * errors, ratios.clamp(max=c_max) * goes_on * (gamma * lam)
    )
    after = torch.zeros_like(corrections)
    after[:-1] = corrections[1:]
    return errors + goes_on.mul_(gamma * lam) * after, values + corrections


def _discounted_sums(deltas: torch.Tensor, factors: torch.Tensor) -> torch.Tensor:
    """S_t = δ_t + f_t S_{t+1} over the first axis."""
    sums = torch.empty_like(deltas)
    running = torch.zeros_like(deltas[0])
    for step in range(len(deltas) - 1, -1, -1):
        running = torch.addcmul(deltas[step], factors[step], running, out=sums[step])
    return sums
