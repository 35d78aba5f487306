"""Symmetry: what a function must do to be one, the data it makes, the mirror loss against a calculation by hand."""

import sys
import types

import pytest
import torch
from control_rollouts import make_config, make_spaces

from async_rl.control.networks import build_actor
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.errors import ConfigError
from learner.control.symmetry import Symmetry


def mirror(obs, actions):
    """Left and right: every number changes its sign."""
    mirrored = None if obs is None else {name: torch.cat([o, -o]) for name, o in obs.items()}
    return mirrored, None if actions is None else torch.cat([actions, -actions])


def four(obs, actions):
    """Two mirrors and both at once: the signs of the first number, of the second, of both."""

    def images(x):
        signs = torch.ones(4, *x.shape[1:], dtype=x.dtype)
        signs[1, 0], signs[2, 1], signs[3, :2] = -1, -1, -1
        return torch.cat([x * s for s in signs])

    mirrored = None if obs is None else {name: images(o) for name, o in obs.items()}
    return mirrored, None if actions is None else images(actions)


def swap(obs, actions):
    """For one of three choices: 0 and 2 change places."""
    mirrored = None if obs is None else {name: torch.cat([o, -o]) for name, o in obs.items()}
    return mirrored, None if actions is None else torch.cat([actions, 2 - actions])


def make_symmetry(function, spaces=None, **settings):
    module = types.ModuleType("symmetry_of_a_test")
    module.function = function
    sys.modules["symmetry_of_a_test"] = module
    settings = {"function": "symmetry_of_a_test:function", "augment": True, **settings}
    return Symmetry(make_config(symmetry=settings, policy={"hidden": [4]}), spaces or make_spaces())


def test_the_mirror_images_follow_the_originals():
    symmetry = make_symmetry(mirror)
    obs, actions = torch.tensor([[1.0, 2, 3], [4, 5, 6]]), torch.tensor([[7.0, 8], [9, 10]])
    mirrored, turned = symmetry.augment({"policy": obs}, actions)
    assert symmetry.images == 2
    assert mirrored["policy"].tolist() == [[1, 2, 3], [4, 5, 6], [-1, -2, -3], [-4, -5, -6]]
    assert turned.tolist() == [[7, 8], [9, 10], [-7, -8], [-9, -10]]


def test_several_mirrors_and_discrete_actions_are_symmetries_too():
    assert make_symmetry(four).images == 4
    assert make_symmetry(swap, make_spaces(discrete=True)).images == 2


@pytest.mark.parametrize("function", [mirror, four])
def test_the_mirror_loss_compares_the_action_of_the_image_with_the_image_of_the_action(function):
    symmetry = make_symmetry(function, augment=False, mirror_coef=1.0)
    torch.manual_seed(0)
    actor = build_actor(make_config(policy={"hidden": [4], "activation": "tanh"}), make_spaces())
    obs = torch.randn(3, 3)
    weight, bias = actor.head.weight, actor.head.bias

    def mean(x):
        return torch.tanh(x @ actor.encoder.mlp[0].weight.T + actor.encoder.mlp[0].bias) @ weight.T + bias

    expected = 0.0
    signs = [[-1, -1, -1]] if function is mirror else [[-1, 1, 1], [1, -1, 1], [-1, -1, 1]]
    for sign in signs:
        sign = torch.tensor(sign)
        expected = expected + ((mean(obs * sign) - (mean(obs) * sign[:2]).detach()) ** 2).sum()
    expected = expected / (10 * 2 * len(signs))  # 10 samples over all ranks, 2 numbers of an action
    loss = symmetry.mirror_loss(actor, {"policy": obs}, count=10)
    torch.testing.assert_close(loss, expected)
    got = torch.autograd.grad(loss, weight)[0]
    torch.testing.assert_close(got, torch.autograd.grad(expected, weight)[0])


def test_a_policy_that_is_symmetric_has_no_mirror_loss():
    symmetry = make_symmetry(mirror, augment=False, mirror_coef=1.0)
    actor = build_actor(make_config(policy={"hidden": [4], "activation": "tanh"}), make_spaces())
    with torch.no_grad():
        for layer in (actor.encoder.mlp[0], actor.head):
            layer.bias.zero_()  # tanh without biases is odd
    assert symmetry.mirror_loss(actor, {"policy": torch.randn(5, 3)}, 5).item() == pytest.approx(0, abs=1e-12)


def test_images_and_other_observations_are_mirrored_in_their_own_kind():
    spaces = Spaces(
        observations={"camera": Observation((2, 4), "uint8"), "policy": Observation((3,))},
        action=Action(kind="discrete", size=1, choices=(3,)),
    )

    def flip(obs, actions):
        mirrored = obs and {
            "camera": torch.cat([obs["camera"], obs["camera"].flip(-1)]),
            "policy": torch.cat([obs["policy"], -obs["policy"]]),
        }
        return mirrored, None if actions is None else torch.cat([actions, 2 - actions])

    assert make_symmetry(flip, spaces).images == 2


def only_originals(obs, actions):
    return obs, actions


def changes_originals(obs, actions):
    obs, actions = mirror(obs, actions)
    return obs, None if actions is None else actions.flip(0)


def no_involution(obs, actions):
    return (
        None if obs is None else {n: torch.cat([o, o.roll(1, -1)]) for n, o in obs.items()},
        None if actions is None else torch.cat([actions, -actions]),
    )


def forgets_a_group(obs, actions):
    return {}, mirror(None, actions)[1]


def wrong_shape(obs, actions):
    obs, actions = mirror(obs, actions)
    return obs, None if actions is None else actions[:, :1]


def wrong_kind(obs, actions):
    obs, actions = mirror(obs, actions)
    return obs, None if actions is None else actions.double()


def needs_both(obs, actions):
    return mirror(obs, actions) if len(actions) == len(obs["policy"]) else None


def depends(obs, actions):
    mirrored, turned = mirror(obs, actions)
    return mirrored, turned if obs is not None or turned is None else torch.cat([actions, actions])


@pytest.mark.parametrize(
    ("function", "said"),
    [
        (only_originals, "makes 5 rows of 5"),
        (changes_originals, "changes the originals"),
        (no_involution, "does not give the original back.*mirror image 1"),
        (forgets_a_group, "is given policy, .*actions.* and returns .*actions"),
        (wrong_shape, r"makes .*actions.* \[10, 1\]"),
        (wrong_kind, "float64"),
        (needs_both, "fails on random input"),
        (depends, "other actions when observations are None"),
    ],
)
def test_what_is_no_symmetry_is_refused(function, said):
    with pytest.raises(ConfigError, match=said):
        make_symmetry(function)


@pytest.mark.parametrize(
    ("name", "said"),
    [("nonsense", "no module:function"), ("no_such_module:f", "cannot be imported"), ("math:pi", "is no function")],
)
def test_a_name_that_leads_nowhere_is_refused(name, said):
    with pytest.raises(ConfigError, match=said):
        Symmetry(make_config(symmetry={"function": name, "augment": True}), make_spaces())


def test_the_mirror_loss_needs_continuous_actions():
    with pytest.raises(ConfigError, match="continuous"):
        make_symmetry(swap, make_spaces(discrete=True), mirror_coef=0.5)
