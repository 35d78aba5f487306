"""What control settings mean together: useless ones and contradictions are refused, with the knob to change. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from async_rl.config.control import ControlConfig

_RND = ("schedule", "final_weight", "final_step", "hidden", "outputs", "lr", "normalize_states", "normalize_rewards")
_AMP = ("task_weight", "expert", "hidden", "lr", "gradient_penalty", "replay", "normalize")
_CRITIC = ("reward_scale", "gamma", "lam", "value_clip", "value_coef", "correction", "rho_max", "c_max")
_DEMONSTRATIONS = ("demonstration_updates", "demonstration_loss")
_EPISODES = ("group_size", "tasks", "max_steps", "reward", "demonstrations", *_DEMONSTRATIONS)
_PPO_ONLY = ("clip", "entropy_coef", "proximal", "weight_max")


def control_without_effect(config: ControlConfig) -> dict[str, str]:
    """Keys ``section.key`` that change nothing here, and why; of several reasons the last is told."""
    return dict(_without_effect(config))


def check_control_effect(config: ControlConfig) -> None:
    """Refuse settings that were given and change nothing; a value that is its default says nothing and is let through.

    Raises:
        ValueError: names the key and what makes it useless.
    """
    for key, why in control_without_effect(config).items():
        section, _, name = key.partition(".")
        values = getattr(config, section)
        if getattr(values, name) != type(values).model_fields[name].default:
            raise ValueError(f"{key} = {getattr(values, name)!r} has no effect with {why}; remove it")


def check_control_together(config: ControlConfig) -> None:
    """Refuse what contradicts itself.

    Raises:
        ValueError: says which setting to change.
    """
    for problem in _contradictions(config):
        raise ValueError(problem)


def _without_effect(config: ControlConfig) -> Iterator[tuple[str, str]]:
    algorithm, env, policy = config.algorithm, config.env, config.policy
    if not env.id.startswith("gymnasium:"):
        for name in ("vectorization", "autoreset"):
            yield f"env.{name}", f"env.id = {env.id!r}, which is no gymnasium id"
    if not config.is_recurrent:
        for name in ("rnn_hidden", "rnn_layers"):
            yield f"policy.{name}", f"policy.network = {policy.network!r}"
    if policy.encoder == "shared":
        for key in ("policy.critic_hidden", "observations.critic"):
            yield key, "policy.encoder = 'shared'"
    if policy.network == "transformer":
        for name in ("activation", "std", "init_std", "normalize"):
            yield f"policy.{name}", "policy.network = 'transformer'"
    if algorithm.name != "ppo":
        for name in _CRITIC:
            yield f"algorithm.{name}", f"algorithm.name = {algorithm.name!r}, which has no critic"
        for key in ("policy.critic_hidden", "policy.encoder", "observations.critic"):
            yield key, f"algorithm.name = {algorithm.name!r}, which has no critic"
        for key in ("rnd.weight", "amp.style_weight", "symmetry.function"):
            yield key, f"algorithm.name = {algorithm.name!r}; it belongs to 'ppo'"
    if algorithm.name == "distillation":
        for name in _PPO_ONLY:
            yield f"algorithm.{name}", "algorithm.name = 'distillation'"
    else:
        for key in ("algorithm.imitation", "teacher.path", "observations.teacher"):
            yield key, f"algorithm.name = {algorithm.name!r}"
    if algorithm.correction == "none":
        for name in ("rho_max", "c_max"):
            yield f"algorithm.{name}", "algorithm.correction = 'none'"
    if algorithm.proximal == "behaviour":
        yield "algorithm.weight_max", "algorithm.proximal = 'behaviour'"
    if algorithm.name == "grpo":
        for name in ("horizon", "num_envs"):
            yield f"env.{name}", "algorithm.name = 'grpo': an actor steps episodes.group_size environments to their end"
    else:
        for name in _EPISODES:
            yield f"episodes.{name}", f"algorithm.name = {algorithm.name!r}"
        yield "buffer.replace_zero_variance", f"algorithm.name = {algorithm.name!r}"
    if algorithm.name == "grpo" and not config.episodes.demonstrations:
        for name in _DEMONSTRATIONS:
            yield f"episodes.{name}", "episodes.demonstrations = ''"
    if config.rnd.weight == 0 or algorithm.name != "ppo":
        for name in _RND:
            yield f"rnd.{name}", "rnd.weight = 0"
        yield "observations.rnd", "rnd.weight = 0"
    elif config.rnd.schedule == "constant":
        for name in ("final_weight", "final_step"):
            yield f"rnd.{name}", "rnd.schedule = 'constant'"
    if config.amp.style_weight == 0 or algorithm.name != "ppo":
        for name in _AMP:
            yield f"amp.{name}", "amp.style_weight = 0"
        yield "observations.discriminator", "amp.style_weight = 0"
    elif config.amp.task_weight == 0:
        yield "algorithm.reward_scale", "amp.task_weight = 0"
    if not config.symmetry.function or algorithm.name != "ppo":
        for name in ("augment", "mirror_coef"):
            yield f"symmetry.{name}", "symmetry.function = ''"
    if config.learner.lr_schedule != "kl_adaptive":
        for name in ("kl_target", "lr_min", "lr_max"):
            yield f"learner.{name}", f"learner.lr_schedule = {config.learner.lr_schedule!r}"
    if config.learner.ranks == 1:
        for name in ("checksum_every", "timeout_s"):
            yield f"learner.{name}", "learner.ranks = 1"


def _contradictions(config: ControlConfig) -> Iterator[str]:
    algorithm, policy, learner = config.algorithm, config.policy, config.learner
    if config.weights.path == "broadcast":
        yield "weights.path = 'broadcast' is for engines of language models: set weights.path = 'auto'"
    if learner.ranks > config.buffer.groups_per_step:
        yield (
            f"learner.ranks = {learner.ranks} > buffer.groups_per_step = {config.buffer.groups_per_step}: each rank "
            "needs a fragment of its own; raise buffer.groups_per_step (and lower env.num_envs to keep the batch)"
        )
    if algorithm.name == "distillation" and not config.teacher.path:
        yield "algorithm.name = 'distillation' needs a teacher: set teacher.path to the folder of its run"
    if algorithm.name == "distillation" and learner.lr_schedule == "kl_adaptive":
        yield (
            "learner.lr_schedule = 'kl_adaptive' with algorithm.name = 'distillation': there is no KL to adapt to; "
            "set it to 'constant' or 'linear'"
        )
    if policy.network == "transformer" and algorithm.name != "grpo":
        yield "policy.network = 'transformer' has no critic; set algorithm.name = 'grpo'"
    if config.is_recurrent and algorithm.name == "grpo":
        yield f"policy.network = {policy.network!r} with algorithm.name = 'grpo' is not built; set it to 'mlp'"
    if config.is_recurrent and config.symmetry.function:
        yield "symmetry.function with a recurrent policy: a hidden state has no mirror; set policy.network = 'mlp'"
    if config.is_recurrent and algorithm.minibatches > config.env.num_envs:
        yield (
            f"algorithm.minibatches = {algorithm.minibatches} > env.num_envs = {config.env.num_envs}: a recurrent "
            "policy is trained on whole environments; lower algorithm.minibatches"
        )
    samples = config.env.num_envs * config.env.horizon * config.buffer.groups_per_step
    if algorithm.name != "grpo" and algorithm.minibatches > samples:
        yield (
            f"algorithm.minibatches = {algorithm.minibatches} > env.num_envs × env.horizon × buffer.groups_per_step = "
            f"{samples} environment steps: lower algorithm.minibatches, or raise one of those"
        )
    if config.amp.style_weight > 0 and not config.amp.expert:
        yield "amp.style_weight needs amp.expert = FILE.safetensors with expert transitions"
    if config.symmetry.function and not (config.symmetry.augment or config.symmetry.mirror_coef > 0):
        yield "symmetry.function has no effect: set symmetry.augment = true or symmetry.mirror_coef"
    if config.rnd.schedule != "constant" and config.rnd.weight > 0 and config.rnd.final_step == 0:
        yield f"rnd.schedule = {config.rnd.schedule!r} needs rnd.final_step, the learner step at which it ends"
    if learner.lr_schedule == "kl_adaptive" and algorithm.epochs * algorithm.minibatches == 1:
        yield (
            "learner.lr_schedule = 'kl_adaptive' has no effect with one update a step, before which the KL is 0; set "
            "it to 'constant' or 'linear', or raise algorithm.minibatches or algorithm.epochs"
        )
    if config.buffer.max_uses > config.buffer.max_staleness + 1:
        yield (
            f"buffer.max_uses = {config.buffer.max_uses} is never reached: within buffer.max_staleness = "
            f"{config.buffer.max_staleness} a group meets at most {config.buffer.max_staleness + 1} steps; lower it, "
            "or raise buffer.max_staleness"
        )
    if learner.lr_min > learner.lr_max:
        yield f"learner.lr_min = {learner.lr_min} > learner.lr_max = {learner.lr_max}"
    if config.buffer.max_staleness == 0 and (algorithm.correction != "none" or algorithm.proximal != "behaviour"):
        yield (
            "algorithm.correction and algorithm.proximal correct for policies older than the trained one, and with "
            "buffer.max_staleness = 0 there are none; remove them or raise buffer.max_staleness"
        )
