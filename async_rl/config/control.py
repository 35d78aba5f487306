"""The settings of a run that controls environments (``domain = "control"``), by section; checks: control_checks.py.

Names and defaults follow rsl_rl where it has them, so that its users find what they know.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from async_rl.config.base import ActorsBase, Beta, BufferConfig, EvalBase, LearnerBase, RunConfig, Section
from async_rl.config.control_checks import check_control_effect, check_control_together

Names = Annotated[tuple[str, ...], Field(strict=False)]  # TOML has lists only
Widths = Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)]


class EnvConfig(Section):
    """The environment, and how much of it one actor steps at a time."""

    id: str = "gymnasium:CartPole-v1"
    """``gymnasium:ID``, or ``module:Class`` (or function) that makes an object with rsl_rl's ``VecEnv`` interface or a
    gymnasium vector environment; it is called with ``num_envs``, ``seed`` and ``kwargs``."""
    kwargs: dict[str, Any] = Field({}, strict=False)
    """Keyword arguments of the environment."""
    num_envs: int = Field(64, ge=1, le=1 << 20)
    """Environments N that each actor steps together."""
    horizon: int = Field(24, ge=1, le=1 << 16)
    """Steps T of a fragment: an actor submits arrays [T, N, ...]."""
    vectorization: Literal["auto", "sync", "async"] = "auto"
    """gymnasium: the environment's own vectorised form where it has one, else ``sync`` in the actor's process; or
    ``async``: a process for each environment."""
    autoreset: Literal["next_step", "same_step"] = "next_step"
    """gymnasium: when a finished environment is reset; both give the same learning, see docs/control.md."""
    spaces: str = ""
    """A ``spaces.json`` that a run wrote, for a learner host that cannot make the environment; empty: it is made once
    at the start to look at its spaces."""


class ObservationsConfig(Section):
    """Which observation groups of the environment each network reads, concatenated in this order."""

    actor: Names = ("policy",)
    """A gymnasium environment has the group ``policy``, or one per key of its dictionary."""
    critic: Names = ()
    """Empty: as the actor."""
    teacher: Names = ()
    """``distillation``; empty: as the actor, if those are the groups that the teacher was trained on."""
    rnd: Names = ()
    """Empty: as the actor."""
    discriminator: Names = ()
    """``amp``; empty: as the actor."""


class PolicyConfig(Section):
    """The networks of actor and critic."""

    network: Literal["mlp", "gru", "lstm", "transformer"] = "mlp"
    """``gru`` and ``lstm``: a recurrent layer before the MLP; ``transformer``: image and instruction in, action tokens
    out (see async_rl/control/vla.py)."""
    hidden: Widths = (256, 256, 256)
    """Widths of the MLP's hidden layers."""
    critic_hidden: Widths = ()
    """Of the critic; empty: as the actor."""
    activation: Literal["elu", "relu", "selu", "tanh", "gelu", "silu", "leaky_relu"] = "elu"
    encoder: Literal["separate", "shared"] = "separate"
    """``shared``: the critic is a linear layer on the actor's last hidden layer."""
    std: Literal["scalar", "log", "state"] = "scalar"
    """Continuous actions: deviation of the Gaussian as a parameter, as the logarithm of one, or as an output of the
    network."""
    init_std: float = Field(1.0, gt=0)
    normalize: bool = False
    """Normalise observations by their running mean and deviation, over all ranks and actors."""
    rnn_hidden: int = Field(256, ge=1)
    """``gru``, ``lstm``: width of the hidden state."""
    rnn_layers: int = Field(1, ge=1)
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes CUDA where there is a device for each process, else the CPU."""


class ControlBufferConfig(BufferConfig):
    """The buffer; a group is one fragment [T, N, ...], or the episodes of one task (``grpo``)."""

    groups_per_step: int = Field(1, ge=1)
    """Fragments (or groups of episodes) that one learner step trains on."""
    max_staleness: int = Field(1, ge=0)
    """η, in learner versions; 0 is synchronous training."""


class ControlActorsConfig(ActorsBase):
    """The actors: each steps its environments with the newest policy it has."""


class ControlAlgorithmConfig(Section):
    """How fragments become gradients; paper and equation of each choice are in docs/control.md."""

    name: Literal["ppo", "grpo", "distillation"] = "ppo"
    """``ppo`` with a critic; ``grpo``: groups of episodes from the same start, no critic; ``distillation``: imitate a
    teacher on the states that the student visits."""
    reward_scale: float = Field(1.0, gt=0)
    """Factor of the environment's rewards before anything is learnt from them; what is reported has its own scale."""
    gamma: float = Field(0.99, gt=0, le=1)
    lam: float = Field(0.95, ge=0, le=1)
    clip: float = Field(0.2, gt=0)
    """Ratio is clipped at ``1 ± clip``."""
    value_clip: float = Field(0.2, ge=0)
    """Values move at most so far from the old ones; 0: no clip."""
    value_coef: float = Field(1.0, gt=0)
    entropy_coef: float = Field(0.01, ge=0)
    epochs: int = Field(5, ge=1)
    """Passes over the batch per step."""
    minibatches: int = Field(4, ge=1)
    """Updates per pass; each rank splits its samples at random, or its environments where the policy is recurrent."""
    correction: Literal["none", "vtrace"] = "none"
    """``vtrace`` (IMPALA) corrects value targets and advantages for policies older than the trained one."""
    rho_max: float = Field(1.0, gt=0)
    """``vtrace``: largest weight of a temporal difference."""
    c_max: float = Field(1.0, gt=0)
    """``vtrace``: largest weight by which a trace goes on."""
    proximal: Literal["behaviour", "recomputed"] = "behaviour"
    """Policy that the ratio is taken to: the one that acted, or that of the step's start (decoupled clip)."""
    weight_max: float = Field(2.0, gt=0)
    """``proximal = "recomputed"``: largest weight proximal / behaviour of a sample."""
    imitation: Literal["mse", "huber"] = "mse"
    """``distillation``: loss between the student's mean action and the teacher's."""


class RndConfig(Section):
    """Random network distillation (Burda et al. 2018): reward for states that a predictor does not know yet."""

    weight: float = Field(0.0, ge=0)
    """Weight of the intrinsic reward; 0: none."""
    schedule: Literal["constant", "linear", "step"] = "constant"
    """How the weight goes to ``final_weight`` by learner step ``final_step``."""
    final_weight: float = Field(0.0, ge=0)
    final_step: int = Field(0, ge=0)
    hidden: Widths = (256, 256)
    outputs: int = Field(16, ge=1)
    """Width of the embedding."""
    lr: float = Field(1e-3, gt=0)
    normalize_states: bool = True
    normalize_rewards: bool = True
    """Divide by the running deviation of the discounted intrinsic return."""


class AmpConfig(Section):
    """Adversarial motion priors (Peng et al. 2021): a discriminator between expert transitions and the policy's."""

    style_weight: float = Field(0.0, ge=0)
    """Weight of the style reward; 0: no discriminator."""
    task_weight: float = Field(1.0, ge=0)
    """Weight of the environment's reward beside it."""
    expert: str = ""
    """File of expert transitions: safetensors with ``states`` and ``next_states`` [M, D], see scripts/record_expert.py;
    or the name of one that ships beside the presets."""
    hidden: Widths = (256, 128)
    lr: float = Field(1e-4, gt=0)
    gradient_penalty: float = Field(10.0, ge=0)
    replay: int = Field(100_000, ge=1)
    """Policy transitions that each rank keeps for the discriminator."""
    normalize: bool = True
    """Normalise its input by running statistics of both sources."""


class SymmetryConfig(Section):
    """Mirrored data and mirror loss (Mittal et al. 2024)."""

    function: str = ""
    """``module:function``: ``f(observations, actions) -> (observations, actions)``, the originals first and their
    mirror images behind them; either argument may be None; empty: no symmetry."""
    augment: bool = False
    """Train on the mirror images, too."""
    mirror_coef: float = Field(0.0, ge=0)
    """Weight of the mean squared difference between the mirrored action and the action of the mirrored state."""


class TeacherConfig(Section):
    """``distillation``: who is imitated."""

    path: str = ""
    """Run folder, or checkpoint folder, of a control run; or the name of a folder that ships beside the presets. Its
    actor network reads ``observations.teacher``."""


class EpisodesConfig(Section):
    """``grpo``: groups of whole episodes from the same initial state."""

    group_size: int = Field(8, ge=2, le=65_536)
    """Episodes of a group: they begin with the same seeded reset."""
    tasks: int = Field(1024, ge=1)
    """Different initial states."""
    max_steps: int = Field(64, ge=1)
    """Longest episode."""
    reward: str = ""
    """``module:function`` that scores a finished episode: ``f(episode: dict[str, array]) -> float``; or the path of a
    TorchScript reward model; empty: the sum of the environment's rewards."""
    demonstrations: str = ""
    """``module:function`` of demonstrated steps, on which the policy is trained before the first step:
    ``f(count, seed, **env.kwargs) -> dict`` of ``obs/GROUP`` [count, ...] and ``actions`` [count, A]; empty: none."""
    demonstration_updates: int = Field(100, ge=1)
    """Updates of that training at most, 256 steps each, all different."""
    demonstration_loss: float = Field(0.0, ge=0)
    """It ends when the mean negative log-likelihood of a demonstrated action over 8 updates falls below this: a policy
    that is sure of itself explores no more. 0: all updates are made."""


class ControlLearnerConfig(LearnerBase):
    """The learner group."""

    lr: float = Field(1e-3, ge=0)
    lr_schedule: Literal["kl_adaptive", "constant", "linear"] = "kl_adaptive"
    """``kl_adaptive`` multiplies or divides by 1.5, in each update, when the analytic KL between the policy of the
    step's start and the current one is below half or above twice ``kl_target``; ``linear`` falls to 0 at the end."""
    lr_min: float = Field(1e-5, gt=0)
    """Limits of the adaptive schedule."""
    lr_max: float = Field(1e-2, gt=0)
    betas: Annotated[tuple[Beta, Beta], Field(strict=False)] = (0.9, 0.999)
    max_grad_norm: float = Field(1.0, gt=0)
    """For actor and critic alike, each by its own norm; RND's predictor and the discriminator are not clipped."""


class ControlEvalConfig(EvalBase):
    """Evaluation: whole episodes with the most likely action, pinned to one version, in its own process."""

    episodes: int = Field(32, ge=1)


class ControlConfig(RunConfig):
    """One run that trains a policy for an environment."""

    domain: Literal["control"]
    env: EnvConfig = EnvConfig()
    observations: ObservationsConfig = ObservationsConfig()
    policy: PolicyConfig = PolicyConfig()
    buffer: ControlBufferConfig = ControlBufferConfig()
    actors: ControlActorsConfig = ControlActorsConfig()
    algorithm: ControlAlgorithmConfig = ControlAlgorithmConfig()
    rnd: RndConfig = RndConfig()
    amp: AmpConfig = AmpConfig()
    symmetry: SymmetryConfig = SymmetryConfig()
    teacher: TeacherConfig = TeacherConfig()
    episodes: EpisodesConfig = EpisodesConfig()
    learner: ControlLearnerConfig = ControlLearnerConfig()
    eval: ControlEvalConfig = ControlEvalConfig()

    @model_validator(mode="after")
    def _check(self) -> ControlConfig:
        check_control_effect(self)
        check_control_together(self)
        return self

    @property
    def is_control(self) -> bool:
        """True."""
        return True

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]:
        """Where policies and learner compute."""
        return self.policy.device

    @property
    def group_size(self) -> int:
        """Episodes of a group; 1 for a fragment."""
        return self.episodes.group_size if self.algorithm.name == "grpo" else 1

    @property
    def num_tasks(self) -> int:
        """Different tasks that tickets can name: initial states of ``grpo``; 1 for fragments, which have no task."""
        return self.episodes.tasks if self.algorithm.name == "grpo" else 1

    @property
    def is_recurrent(self) -> bool:
        """Whether the policy carries a hidden state from step to step."""
        return self.policy.network in ("gru", "lstm")

    def groups_of(self, network: Literal["actor", "critic", "teacher", "rnd", "discriminator"]) -> tuple[str, ...]:
        """Observation groups that a network reads."""
        return getattr(self.observations, network) or self.observations.actor

    def contract(self) -> dict[str, Any]:
        """What all sides must agree on: environment, observations, networks, episodes, seed."""
        return {
            "seed": self.seed,
            "env": {"id": self.env.id, "kwargs": self.env.kwargs, "horizon": self.env.horizon},
            "observations": self.observations.model_dump(mode="json"),
            "policy": self.policy.model_dump(mode="json", exclude={"device"}),
            "algorithm": self.algorithm.name,
            "episodes": self.episodes.model_dump(mode="json") if self.algorithm.name == "grpo" else None,
        }

    def kept(self) -> dict[str, Any]:
        """What the networks beside actor and critic depend on."""
        kept = {
            "rnd.weight > 0": self.rnd.weight > 0,
            "amp.style_weight > 0": self.amp.style_weight > 0,
            "teacher.path": self.teacher.path,
        }
        if self.rnd.weight > 0:
            names = ("hidden", "outputs", "normalize_states", "normalize_rewards")
            kept |= {f"rnd.{name}": getattr(self.rnd, name) for name in names}
        if self.amp.style_weight > 0:
            kept |= {"amp.hidden": self.amp.hidden, "amp.normalize": self.amp.normalize}
        return kept
