"""The vision-language-action network: its distribution over action tokens, what it reads, and what it refuses."""

import itertools

import pytest
import torch

from async_rl.config import parse_control
from async_rl.control.networks import build_actor
from async_rl.control.spaces import Action, Observation, Spaces
from async_rl.control.vla import VOCABULARY, VlaActor
from async_rl.errors import ConfigError

CHOICES = (2, 4, 3)
OBSERVATIONS = {
    "image": Observation((8, 12, 3), "uint8"),
    "instruction": Observation((4,), "int32"),
    "arm": Observation((2,)),
}


def spaces(choices=CHOICES, **observations):
    action = Action(kind="discrete", size=len(choices), choices=choices)
    return Spaces(observations={**OBSERVATIONS, **observations}, action=action)


def actor(groups=("image", "instruction", "arm"), seed=0, **kwargs):
    torch.manual_seed(seed)
    return VlaActor(spaces(**kwargs), groups, 32, 2)


def some(count, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return {
        "image": torch.randint(0, 256, (count, 8, 12, 3), generator=generator).to(torch.uint8),
        "instruction": torch.randint(0, 10, (count, 4), generator=generator).int(),
        "arm": torch.randn(count, 2, generator=generator),
    }


def distribution(net, obs):
    return net.distribution(net.features(net.observe(obs)))


def every_action():
    return torch.tensor(list(itertools.product(*map(range, CHOICES))))


@torch.no_grad()
def test_the_probabilities_of_all_actions_add_up_to_one():
    obs = {name: array.expand(24, *array.shape[1:]) for name, array in some(1).items()}
    assert distribution(actor(), obs).log_prob(every_action()).exp().sum().item() == pytest.approx(1, abs=1e-5)


@torch.no_grad()
def test_one_pass_gives_the_log_probabilities_that_part_by_part_decoding_has():
    net, obs = actor(), some(16)
    judged, entropies = distribution(net, obs).judge(actions := distribution(net, obs).sample(torch.Generator()))
    past, expected, entropy = net.features(net.observe(obs)), [], torch.zeros(16)
    for part in range(3):
        log_probs = net.logits(past, actions[:, :part])[part].log_softmax(-1)
        expected.append(log_probs[torch.arange(16), actions[:, part]])
        entropy -= (log_probs.exp() * log_probs).sum(-1)
    assert (judged - torch.stack(expected, 1)).abs().max() < 1e-5
    assert (entropies - entropy).abs().max() < 1e-5


@torch.no_grad()
def test_a_part_depends_on_those_before_it_and_on_none_behind_it():
    net, obs = actor(), some(6)
    first = torch.tensor([[0, 1, 2]]).expand(6, 3)
    for part in range(3):
        changed = first.clone()
        changed[:, part] = (changed[:, part] + 1) % CHOICES[part]
        difference = (
            distribution(net, obs).log_prob_parts(changed) - distribution(net, obs).log_prob_parts(first)
        ).abs()
        assert (difference[:, :part] < 1e-6).all()
        assert (difference[:, part + 1 :] > 1e-6).all()


@torch.no_grad()
def test_samples_come_as_often_as_the_log_probabilities_say():
    net, count = actor(), 6000
    obs = {name: array.expand(count, *array.shape[1:]) for name, array in some(1).items()}
    actions = distribution(net, obs).sample(torch.Generator().manual_seed(0))
    code = actions @ torch.tensor([12, 3, 1])
    counts = torch.bincount(code, minlength=24) / count
    expected = distribution(net, {n: a[:24] for n, a in obs.items()}).log_prob(every_action()).exp()
    assert (counts - expected).abs().max() < 4 * (0.25 / count) ** 0.5  # four deviations, were a probability one half


@torch.no_grad()
def test_the_mode_takes_the_likeliest_choice_after_the_choices_before():
    net, obs = actor(), some(20)
    past, chosen = net.features(net.observe(obs)), torch.zeros(20, 0, dtype=torch.int64)
    for part in range(3):
        chosen = torch.cat([chosen, net.logits(past, chosen)[part].argmax(-1, keepdim=True)], 1)
    assert torch.equal(distribution(net, obs).mode(), chosen)


@torch.no_grad()
def test_a_patch_is_a_square_of_four_pixels_in_the_order_of_rows():
    net = actor(("image",))
    patches, image = net.encoders[0], some(1)["image"]
    found = patches(image)[0]
    for row, column in itertools.product(range(2), range(3)):
        square = image[0, 4 * row : 4 * row + 4, 4 * column : 4 * column + 4].reshape(-1).float() / 255
        expected = patches.project.weight @ square + patches.project.bias + patches.row[row, 0] + patches.column[column]
        assert (found[3 * row + column] - expected).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize("group", ["image", "instruction", "arm"])
def test_every_group_that_is_read_changes_the_action_and_no_other_does(group):
    obs = some(4)
    changed = obs | {group: some(4, seed=2)[group]}
    acts = torch.zeros(4, 3, dtype=torch.int64)
    reads, ignores = actor(), actor(tuple(name for name in obs if name != group))
    assert (distribution(reads, obs).log_prob(acts) - distribution(reads, changed).log_prob(acts)).abs().min() > 1e-6
    assert torch.equal(distribution(ignores, obs).log_prob(acts), distribution(ignores, changed).log_prob(acts))


def test_the_loss_reaches_every_parameter():
    net, obs = actor(), some(8)
    logprobs, entropies = distribution(net, obs).judge(torch.ones(8, 3, dtype=torch.int64))
    (logprobs.sum() + entropies.sum()).backward()
    assert [name for name, p in net.named_parameters() if p.grad is None or not p.grad.any()] == []


def test_a_batch_of_none_has_a_gradient_of_zero():
    net = actor()
    logprobs, _ = distribution(net, some(0)).judge(torch.zeros(0, 3, dtype=torch.int64))
    logprobs.sum().backward()
    assert logprobs.shape == (0, 3)
    assert all(p.grad is None or not p.grad.any() for p in net.parameters())


def test_a_single_choice_needs_no_earlier_part():
    net = actor(choices=(5,))
    assert distribution(net, some(3)).sample().shape == (3, 1)


def test_tokens_outside_the_vocabulary_are_refused_by_name():
    obs = some(2)
    obs["instruction"][1, 2] = VOCABULARY
    with pytest.raises(ConfigError, match=rf"'instruction' has tokens from \d to {VOCABULARY}; "):
        actor().observe(obs)


@pytest.mark.parametrize(
    ("name", "space"),
    [("image", Observation((10, 12, 3), "uint8")), ("image", Observation((8, 8, 3))), ("arm", Observation((2, 2)))],
)
def test_a_group_that_it_cannot_read_is_refused_with_what_it_reads(name, space):
    with pytest.raises(ConfigError, match=rf"group '{name}' is {space.dtype}"):
        actor(**{name: space})


def build(hidden, groups=("image",), action=None):
    settings = {"domain": "control", "algorithm": {"name": "grpo"}, "observations": {"actor": list(groups)}}
    config = parse_control(settings | {"policy": {"network": "transformer", "hidden": hidden}})
    space = spaces()
    return build_actor(config, Spaces(observations=space.observations, action=action or space.action))


def test_the_configuration_gives_width_layers_and_groups():
    net = build([48, 48, 48], ("instruction", "arm"))
    assert (len(net.layers), net.norm.normalized_shape, net.groups) == (3, (48,), ("instruction", "arm"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"hidden": [32, 64]}, "one entry for each layer, all the same width"),
        ({"hidden": [40, 40]}, "multiple of 16, not 40"),
        ({"hidden": [32], "groups": ("nose",)}, "no group 'nose'; the environment has image, instruction, arm"),
        ({"hidden": [32], "action": Action(kind="continuous", size=2)}, "let the environment offer choices"),
    ],
)
def test_what_does_not_fit_is_refused_with_what_to_do(arguments, message):
    with pytest.raises(ConfigError, match=message):
        build(**arguments)


def test_a_normaliser_that_a_transformer_does_not_have_is_refused():
    settings = {"domain": "control", "algorithm": {"name": "grpo"}}
    with pytest.raises(ConfigError, match=r"policy\.normalize = True has no effect"):
        parse_control(settings | {"policy": {"network": "transformer", "hidden": [32], "normalize": True}})
