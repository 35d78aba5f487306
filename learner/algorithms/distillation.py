"""On-policy distillation: the student samples, a teacher judges every token."""

from __future__ import annotations

import torch


def distillation_advantages(teacher_logprobs_M: torch.Tensor, student_logprobs_M: torch.Tensor) -> torch.Tensor:
    """Per-token reverse KL as advantage.

    On-policy reverse KL is from Agarwal et al. 2023 (arXiv:2306.13649), its policy gradient from Gu et al. 2023
    (arXiv:2306.08543, the single-step part of its decomposition).

        A_t = log π_teacher(a_t) - log π_student(a_t)        E[A_t] = -KL(student || teacher) in the state of token t

    Args:
        teacher_logprobs_M: of the sampled tokens, ``[M]``.
        student_logprobs_M: of the policy that sampled them, ``[M]``.

    Returns:
        float32 ``[M]``, without gradient.
    """
    return (teacher_logprobs_M - student_logprobs_M).detach().float()
