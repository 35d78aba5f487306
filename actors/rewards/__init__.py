"""Where rewards come from: the verifier, a reward model, a judge, and weighted sums of them.

    make_reward_pool ─► VerifierPool                                     the verifier alone
                        RewardPool ─┬─► VerifierPool ─► the verifier     or any weighted sum
                                    ├─► VerifierPool ─► reward_model.py
                                    └─► VerifierPool ─► judge.py

Every source is a function of the verifier form, ``f(prompts, completions, **columns) -> list[float]``, in killable
child processes with a time limit that the parent owns.
"""

from actors.rewards.pool import RewardPool, make_reward_pool

__all__ = ["RewardPool", "make_reward_pool"]
