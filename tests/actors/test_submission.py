"""A group is what its transcripts and rewards say, or it is refused."""

import numpy as np
import pytest

from actors.engines.base import Completion
from actors.players.submission import group_of
from actors.players.transcript import Transcript
from actors.players.work import Work
from async_rl.config import parse_config
from async_rl.protocol import Ticket
from async_rl.tasks import Problem


def completion(sample, *tokens):
    number = len(tokens)
    return Completion(
        request_id=0,
        sample=sample,
        tokens=np.asarray(tokens, np.int32),
        logprobs=np.full(number, -0.5, np.float32),
        versions=np.full(number, 3, np.int32),
        finish_reason="stop",
    )


def work():
    ticket = Ticket(ordinal=1, attempt=0, task_index=0, draw=0, group_size=2, version=0, lease_s=60.0)
    problem = Problem(prompt="p", columns={})
    made = Work(id=1, problem=problem, size=2, seed=(0,), draw=0, ticket=ticket, since=0.0)
    made.transcripts = [
        Transcript((7, 8), turns=[completion(0, 9)]),
        Transcript((7, 8), turns=[completion(1, 9, 10), completion(1, 11)], observations=[(), (12,)]),
    ]
    return made


def test_turns_and_observations_lie_one_after_the_other():
    group = group_of(work(), [1.0, 0.5], "a", parse_config({}))
    assert group.lengths == (3, 6)
    assert group.arrays["tokens"].tolist() == [7, 8, 9, 7, 8, 9, 10, 11, 12]
    assert group.arrays["loss_mask"].tolist() == [0, 0, 1, 0, 0, 1, 1, 1, 0]
    assert group.arrays["versions"].tolist() == [-1, -1, 3, -1, -1, 3, 3, 3, -1]
    assert group.rewards.tolist() == [1.0, 0.5]


@pytest.mark.parametrize("rewards", [[], [1.0], [1.0, 2.0, 3.0]])
def test_another_number_of_rewards_than_samples_is_refused(rewards):
    with pytest.raises(ValueError, match="rewards for 2 samples"):
        group_of(work(), rewards, "a", parse_config({}))
