"""What settings mean together: combinations that make no sense are refused, each with the knob to change. Pure.

``without_effect``  keys that change nothing in this configuration, with the reason: refused when given, left out of the
                    resolved file
``check_together``  what contradicts itself
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from async_rl.config.recipes import RECIPES

if TYPE_CHECKING:
    from async_rl.config.sections import AlgorithmConfig, Config


def without_effect(config: Config) -> dict[str, str]:
    """Keys ``section.key`` that change nothing here, and why; of several reasons the last is told."""
    return dict(_without_effect(config))


def check_effect(config: Config) -> None:
    """Refuse settings that were given and change nothing.

    A value that is its default, or that its recipe brought, says nothing and is let through.

    Raises:
        ValueError: names the key and what makes it useless.
    """
    recipe = RECIPES[config.algorithm.name]
    for key, why in without_effect(config).items():
        section, _, name = key.partition(".")
        values = getattr(config, section)
        silent = (type(values).model_fields[name].default, recipe.get(section, {}).get(name))
        if getattr(values, name) not in silent:
            raise ValueError(f"{key} = {getattr(values, name)!r} has no effect with {why}; remove it")


def check_together(config: Config) -> None:
    """Refuse what contradicts itself.

    Raises:
        ValueError: says which setting to change.
    """
    for problem in _contradictions(config):
        raise ValueError(problem)


def _without_effect(config: Config) -> Iterator[tuple[str, str]]:
    algorithm, task, reward = config.algorithm, config.task, config.reward
    if config.learner.lr_schedule == "constant":
        yield "learner.kl_target", "learner.lr_schedule = 'constant'"
    if config.learner.ranks == 1:
        for name in ("checksum_every", "timeout_s", "shard_optimizer"):
            yield f"learner.{name}", "learner.ranks = 1"
    if config.sharded:
        yield "learner.shard_optimizer", "learner.strategy = 'fsdp', which shards it with the parameters"
    if not config.lora.is_on:
        for name in ("alpha", "targets"):
            yield f"lora.{name}", "lora.rank = 0"
    if algorithm.minibatches * algorithm.epochs == 1:
        once = "one update a step (algorithm.minibatches = algorithm.epochs = 1)"
        yield "algorithm.value_clip", f"{once}: values are still the old ones"
        if algorithm.proximal == "recomputed":
            for name in ("clip_low", "clip_high", "dual_clip"):
                yield f"algorithm.{name}", f"algorithm.proximal = 'recomputed' and {once}: the ratio is 1"
    if algorithm.advantage != "gae":
        for name in ("critic", "gamma", "lam", "value_coef", "value_clip"):
            yield f"algorithm.{name}", f"algorithm.advantage = {algorithm.advantage!r}"
        yield "learner.critic_lr", f"algorithm.advantage = {algorithm.advantage!r}"
    if algorithm.loss == "importance":
        for name in ("clip_low", "clip_high"):
            yield f"algorithm.{name}", "algorithm.loss = 'importance'"
    if algorithm.loss != "ppo":
        yield "algorithm.dual_clip", f"algorithm.loss = {algorithm.loss!r}"
    yield from _correction_without_effect(algorithm)
    if algorithm.kl_coef == 0:
        for name in ("kl_in", "kl_estimator", "kl_controller", "kl_target"):
            yield f"algorithm.{name}", "algorithm.kl_coef = 0"
    elif algorithm.kl_controller == "fixed":
        yield "algorithm.kl_target", "algorithm.kl_controller = 'fixed'"
    if algorithm.advantage == "distill":
        yield "algorithm.overlong_buffer", "algorithm.advantage = 'distill', which reads no rewards"
    if not config.needs_reference:
        for name in ("path", "placement", "scorers"):
            yield f"reference.{name}", "algorithm.kl_coef = 0"
    elif config.reference.placement == "learner":
        yield "reference.scorers", "reference.placement = 'learner'"
    if reward.placement == "actor":
        yield "reward.scorers", "reward.placement = 'actor'"
    if reward.model == 0:
        yield "reward.model_path", "reward.model = 0"
    if reward.judge == 0:
        for name in ("judge_url", "judge_model", "judge_prompt"):
            yield f"reward.{name}", "reward.judge = 0"
    if not task.environment:
        yield "task.max_turns", "task.environment = ''"
    else:
        yield "task.verifier", f"task.environment = {task.environment!r}, which gives the reward"
        if task.name != "jsonl":
            yield "task.name", f"task.environment = {task.environment!r}, which brings the problems"
        if task.environment != "calculator" or task.data:
            yield "task.digits", f"task.environment = {task.environment!r}"
    if task.name != "reasoning_gym":
        yield "task.dataset", f"task.name = {task.name!r}"
    if config.actors.engine != "mock":
        for name in ("mock_lengths", "mock_tokens", "mock_spread", "mock_speed"):
            yield f"actors.{name}", f"actors.engine = {config.actors.engine!r}"
    elif config.actors.mock_lengths != "lognormal":
        yield "actors.mock_spread", f"actors.mock_lengths = {config.actors.mock_lengths!r}"
        if config.actors.mock_lengths != "constant":
            yield "actors.mock_tokens", f"actors.mock_lengths = {config.actors.mock_lengths!r}"
    if config.weights.path == "shm":
        for name in ("relay", "delta"):
            yield f"weights.{name}", "weights.path = 'shm': nothing is sent"
    if config.weights.path == "broadcast":
        for name in ("relay", "delta"):
            yield f"weights.{name}", "weights.path = 'broadcast': only those that miss a version pull it"
    else:
        yield "weights.broadcast_s", f"weights.path = {config.weights.path!r}"
    if not config.weights.relay:
        yield "weights.relay_port", "weights.relay = 0"
    if config.buffer.max_staleness == 0:
        yield "actors.weight_updates", "buffer.max_staleness = 0: nothing runs when new weights come"


def _correction_without_effect(algorithm: AlgorithmConfig) -> Iterator[tuple[str, str]]:
    if algorithm.correction == "none":
        for name in ("correction_low", "correction_high"):
            yield f"algorithm.{name}", "algorithm.correction = 'none'"
    elif algorithm.correction == "truncate":
        yield "algorithm.correction_low", "algorithm.correction = 'truncate'"


def _contradictions(config: Config) -> Iterator[str]:
    algorithm, sampling, buffer = config.algorithm, config.sampling, config.buffer
    if config.task.name == "jsonl" and not config.task.data:
        yield "task.name = 'jsonl' needs task.data = FILE.jsonl"
    if config.task.name == "reasoning_gym" and not config.task.dataset:
        yield "task.name = 'reasoning_gym' needs task.dataset = NAME, the name of one of its data sets"
    if sampling.top_p < 1:
        yield (
            f"sampling.top_p = {sampling.top_p} with a ratio loss: the sampled distribution is truncated and "
            "has no ratio to the learner's; set sampling.top_p = 1"
        )
    if sampling.group_size < 2 and algorithm.advantage in ("grpo", "dr_grpo", "rloo"):
        yield (
            f"sampling.group_size = 1 with algorithm.advantage = {algorithm.advantage!r}: a group of one has no "
            "relative advantage (always 0); set it to 4 or more, or algorithm.name = 'ppo' or 'reinforce_pp'"
        )
    if sampling.group_size < 2 and buffer.replace_zero_variance:
        yield (
            "buffer.replace_zero_variance with sampling.group_size = 1: rewards of a group of one are always equal, "
            "so every group would be replaced for ever; set buffer.replace_zero_variance = false"
        )
    yield from _algorithm_contradictions(config)
    yield from _sharding_contradictions(config)
    if config.weights.path == "broadcast":
        yield from _broadcast_contradictions(config)
    yield from _reward_contradictions(config)
    if config.task.timeout_s >= buffer.lease_s:
        yield (
            f"task.timeout_s = {config.task.timeout_s:g} is not below buffer.lease_s = {buffer.lease_s:g}: a group "
            "whose verifier hangs would go to others before that is known, again and again; raise buffer.lease_s"
        )
    if algorithm.minibatches > buffer.groups_per_step:
        yield (
            f"algorithm.minibatches = {algorithm.minibatches} > buffer.groups_per_step = "
            f"{buffer.groups_per_step}: a mini-batch needs at least one group"
        )
    if config.learner.ranks > buffer.groups_per_step // algorithm.minibatches:
        yield (
            f"learner.ranks = {config.learner.ranks} but a mini-batch has only "
            f"{buffer.groups_per_step // algorithm.minibatches} groups: raise buffer.groups_per_step"
        )
    if buffer.max_uses > buffer.max_staleness + 1:
        yield (
            f"buffer.max_uses = {buffer.max_uses} is never reached: within buffer.max_staleness = "
            f"{buffer.max_staleness} a group meets at most {buffer.max_staleness + 1} steps; lower it, or raise "
            "buffer.max_staleness"
        )
    if config.actors.placement == "colocated" and buffer.max_staleness > 0:
        yield (
            f"actors.placement = 'colocated' with buffer.max_staleness = {buffer.max_staleness}: generation and "
            "training take turns, so every token is of the version that is trained; set buffer.max_staleness = 0"
        )


def _algorithm_contradictions(config: Config) -> Iterator[str]:
    algorithm = config.algorithm
    on_policy = config.buffer.max_staleness == 0 and algorithm.minibatches * algorithm.epochs == 1
    if config.learner.lr_schedule == "kl_adaptive" and on_policy:
        yield (
            "learner.lr_schedule = 'kl_adaptive' has no effect at buffer.max_staleness = 0 and one update a step: the "
            "policy that is trained is the one that sampled, so their KL is 0; set it to 'constant', or raise "
            "algorithm.minibatches, algorithm.epochs or buffer.max_staleness"
        )
    if algorithm.correction != "none" and algorithm.proximal == "behaviour":
        yield (
            f"algorithm.correction = {algorithm.correction!r} with algorithm.proximal = 'behaviour': the weight "
            "proximal / behaviour is always 1; set algorithm.proximal = 'recomputed' or 'interpolated', or "
            "algorithm.correction = 'none'"
        )
    if config.lora.is_on and algorithm.advantage == "gae" and algorithm.critic == "model":
        yield (
            f"algorithm.critic = 'model' with lora.rank = {config.lora.rank}: a whole model would be trained beside "
            "the adapter; set algorithm.critic = 'head', or lora.rank = 0"
        )
    if 0 < algorithm.dual_clip <= 1:
        yield f"algorithm.dual_clip = {algorithm.dual_clip}: the bound must lie above 1 (3 is usual); 0 turns it off"
    if algorithm.loss == "gspo" and algorithm.aggregation != "sequence":
        yield (
            f"algorithm.loss = 'gspo' with algorithm.aggregation = {algorithm.aggregation!r}: its objective is a mean "
            "over sequences; set algorithm.aggregation = 'sequence'"
        )
    if algorithm.loss == "gspo" and algorithm.advantage in ("gae", "distill"):
        yield (
            f"algorithm.loss = 'gspo' with algorithm.advantage = {algorithm.advantage!r}: one ratio for a whole "
            "sequence needs one advantage for it; set algorithm.loss = 'ppo', or a group advantage"
        )
    if algorithm.loss == "gspo" and algorithm.advantage == "reinforce_pp" and algorithm.kl_in == "reward":
        yield (
            "algorithm.loss = 'gspo' with algorithm.advantage = 'reinforce_pp' and algorithm.kl_in = 'reward': the "
            "penalty gives every token its own advantage, and one ratio needs one a sequence; set algorithm.kl_in = "
            "'loss'"
        )
    if algorithm.loss == "importance" and algorithm.proximal != "behaviour" and algorithm.correction == "none":
        yield (
            f"algorithm.loss = 'importance' with algorithm.proximal = {algorithm.proximal!r} and no correction: weight "
            "times ratio is policy / behaviour whatever is between; set algorithm.correction, or algorithm.proximal = "
            "'behaviour'"
        )
    if algorithm.kl_coef > 0 and algorithm.kl_in == "loss" and algorithm.kl_estimator == "k1":
        yield (
            "algorithm.kl_estimator = 'k1' in the loss: its gradient is zero on average, so it does not hold the "
            "policy back; set it to 'k3' or 'k2', or algorithm.kl_in = 'reward'"
        )
    if algorithm.advantage == "distill":
        if algorithm.kl_coef > 0:
            yield (
                "algorithm.advantage = 'distill' with algorithm.kl_coef > 0: the teacher is the reference, and the "
                "advantage is the KL to it already; set algorithm.kl_coef = 0"
            )
        if config.reference.path in ("", config.model.path):
            yield "algorithm.advantage = 'distill' needs a teacher: set reference.path to its folder"
        if config.buffer.replace_zero_variance:
            yield (
                "algorithm.advantage = 'distill' with buffer.replace_zero_variance: groups of equal rewards teach as "
                "much as others; set buffer.replace_zero_variance = false"
            )
    if algorithm.overlong_buffer >= config.max_sampled:
        yield (
            f"algorithm.overlong_buffer = {algorithm.overlong_buffer} is not below the longest completion "
            f"({config.max_sampled} tokens): every length would be punished"
        )
    if -1 < algorithm.max_token_age >= config.buffer.max_staleness > 0:
        yield (
            f"algorithm.max_token_age = {algorithm.max_token_age} masks nothing: no token is older than "
            f"buffer.max_staleness = {config.buffer.max_staleness}"
        )
    if config.buffer.max_staleness == 0:
        if algorithm.max_token_age >= 0 or algorithm.age_decay < 1:
            yield (
                "algorithm.max_token_age and algorithm.age_decay have no effect at buffer.max_staleness = 0; "
                "remove them"
            )
        if algorithm.proximal == "interpolated":
            yield (
                "algorithm.proximal = 'interpolated' has no effect at buffer.max_staleness = 0: every token has age 0; "
                "set it to 'recomputed' or 'behaviour'"
            )


def _sharding_contradictions(config: Config) -> Iterator[str]:
    if not config.sharded:
        return
    if config.learner.ranks == 1:
        yield "learner.strategy = 'fsdp' with learner.ranks = 1: there is nobody to share with; raise learner.ranks"
    if config.lora.is_on:
        yield (
            f"learner.strategy = 'fsdp' with lora.rank = {config.lora.rank}: only whole models are sharded; set "
            "learner.strategy = 'flat', or lora.rank = 0"
        )
    if config.actors.colocated:
        yield (
            "learner.strategy = 'fsdp' with actors.placement = 'colocated': shards cannot give their device back; set "
            "actors.placement = 'separate'"
        )
    if config.learner.compile:
        yield "learner.strategy = 'fsdp' with learner.compile: not supported together; set learner.compile = false"


def _broadcast_contradictions(config: Config) -> Iterator[str]:
    pull = "set weights.path = 'auto'"
    if config.actors.engine == "mock":
        yield f"weights.path = 'broadcast' with actors.engine = 'mock': it has no weights to receive; {pull}"
    if config.lora.is_on:
        yield (
            f"weights.path = 'broadcast' with lora.rank = {config.lora.rank}: an adapter is small, and is pulled by "
            f"engines one by one; {pull}"
        )
    if config.actors.colocated:
        yield (
            "weights.path = 'broadcast' with actors.placement = 'colocated': NCCL takes each device once, and learner "
            f"and engine share one; {pull}, which maps the learner's memory"
        )
    if config.actors.weight_updates == "drained" and config.buffer.max_staleness > 0:
        yield (
            "weights.path = 'broadcast' with actors.weight_updates = 'drained': all would wait for the engine whose "
            f"longest answer takes longest; set actors.weight_updates = 'in_flight', or {pull}"
        )
    if config.learner.ranks > 1 and config.weights.broadcast_s >= config.learner.timeout_s:
        yield (
            f"weights.broadcast_s = {config.weights.broadcast_s:g} is not below learner.timeout_s = "
            f"{config.learner.timeout_s:g}: the other ranks would take rank 0 for lost while it waits; lower it"
        )


def _reward_contradictions(config: Config) -> Iterator[str]:
    reward = config.reward
    if reward.verifier == reward.model == reward.judge == 0:
        yield "reward.verifier, reward.model and reward.judge are all 0: nothing would be rewarded; set one of them"
    if reward.model != 0 and not reward.model_path:
        yield f"reward.model = {reward.model} needs reward.model_path = FOLDER"
    if reward.judge != 0 and not (reward.judge_url and reward.judge_model):
        yield f"reward.judge = {reward.judge} needs reward.judge_url and reward.judge_model"
    if config.task.environment and reward.placement == "scorer":
        yield (
            f"task.environment = {config.task.environment!r} with reward.placement = 'scorer': an environment gives "
            "its reward while it is played; set reward.placement = 'actor'"
        )
