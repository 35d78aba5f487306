"""The settings of a language model's run, by section: names, types, defaults, meaning; contradictions: checks.py."""

from __future__ import annotations

from typing import Any, Literal

from pydantic import Field, model_validator

from async_rl.config.base import ActorsBase, EvalBase, LearnerBase, RunConfig, Section
from async_rl.config.checks import check_effect, check_together
from async_rl.config.recipes import with_recipe
from async_rl.sandbox import DEFAULT_MEMORY

_TASK_FREE = {"verifiers", "timeout_s", "curriculum", "memory_bytes", "network", "keep_env"}
"""Settings of ``[task]`` in which hosts may differ."""


class ModelConfig(Section):
    """Which language model is trained."""

    path: str = "tiny"
    """A Hugging Face model folder; or ``tiny``, ``tiny-tools`` (built and briefly supervised on the spot) or
    ``smollm2`` (fetched)."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Compute type of engine and learner; master weights and log-probabilities are float32 always."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """``auto`` takes CUDA where there is a device for each process, else the CPU."""


class TaskConfig(Section):
    """What is asked of the model and how answers are scored."""

    name: Literal["addition", "sorting", "countdown", "jsonl", "reasoning_gym"] = "addition"
    """A built-in generator, ``jsonl`` for problems from ``data``, or ``reasoning_gym`` for its data set ``dataset``."""
    data: str = ""
    """Problems with a ``prompt`` column (and ``answer``, ... as the verifier needs): a JSONL file, or a folder that
    Hugging Face ``datasets`` saved; sets ``name`` to ``jsonl``."""
    dataset: str = ""
    """Name of a data set of reasoning-gym."""
    environment: str = ""
    """Multi-turn: ``calculator``, ``guess``, ``gymnasium:ID`` or ``module:Class``; empty: one answer to each prompt.
    The environment brings its problems, unless ``data`` does."""
    max_turns: int = Field(4, ge=2)
    """Most answers of one episode; ``sampling.max_new_tokens`` limits each of them."""
    curriculum: bool = False
    """Draw problems that are solved sometimes more often than those that are solved always or never."""
    verifier: str = ""
    """``module:function`` with the signature ``f(prompts, completions, **columns) -> list[float]``; empty: exact match
    with ``answer`` for JSONL data, the built-in one for built-in tasks."""
    digits: int = Field(2, ge=1, le=6)
    """Digits of each operand (``addition``) or length of a list (``sorting``)."""
    chat: bool = False
    """Wrap prompts in the model's chat template."""
    instruction: str = ""
    """Text put before each prompt (one system-like sentence for chat models)."""
    holdout: int = Field(500, ge=1)
    """Problems that are never trained on, for evaluation; at most a fifth of the data."""
    timeout_s: float = Field(10.0, gt=0)
    """Time limit of one verifier call (one group), or of one call of an environment (one turn); a call that passes it
    is killed and counted."""
    verifiers: int = Field(1, ge=1)
    """Child processes per actor for the verifier, or for the episodes of the environment."""
    memory_bytes: int = Field(DEFAULT_MEMORY, ge=64 << 20)
    """Most memory of such a process, and its longest file; a call that needs more fails and is counted."""
    network: bool = False
    """Whether such a process may use the network; it is cut off where the system allows that."""
    keep_env: tuple[str, ...] = Field((), strict=False)  # TOML has lists only
    """Environment variables that it gets although their names (``..._KEY``, ``..._TOKEN``) say they are secrets."""


class SamplingConfig(Section):
    """The sampling contract: both sides must agree on it, it is part of the handshake."""

    group_size: int = Field(8, ge=1, le=65_536)
    """Completions per prompt."""
    max_new_tokens: int = Field(16, ge=1)
    """Longest completion."""
    temperature: float = Field(1.0, gt=0)
    """Used by the engine and by the learner's log-probabilities."""
    top_p: float = Field(1.0, gt=0, le=1)
    """Must be 1 for ratio losses: a truncated distribution has no ratio to the full one."""


class ActorsConfig(ActorsBase):
    """The rollout actors."""

    engine: Literal["torch", "vllm", "mock"] = "torch"
    """``torch`` is embedded, ``vllm`` is real vLLM, ``mock`` has no model."""
    placement: Literal["separate", "colocated"] = "separate"
    """``colocated``: generation and training take turns on the same device; the idle side gives its memory back."""
    slots: int = Field(512, ge=1)
    """Sequences that one engine decodes at the same time."""
    kv_cache: Literal["keep", "recompute"] = "keep"
    """What happens to the KV of running requests when weights change."""
    weight_updates: Literal["in_flight", "drained"] = "in_flight"
    """When new weights are taken: between two decode steps, running sequences going on; or ``drained``: once all
    running sequences have ended, nothing being started before."""
    mock_lengths: str = "lognormal"
    """``mock``: lengths of completions: ``constant``, ``lognormal``, or a file of recorded ones."""
    mock_tokens: int = Field(16, ge=1)
    """``mock``: their median, before ``max_new_tokens`` cuts them."""
    mock_spread: float = Field(10.0, ge=1)
    """``mock``: p99 / p50 of ``lognormal``."""
    mock_speed: float = Field(2000.0, gt=0)
    """``mock``: tokens per second of one slot."""

    @property
    def colocated(self) -> bool:
        """Whether actors and learner take turns on the same device."""
        return self.placement == "colocated"


class RewardConfig(Section):
    """Where rewards come from: a weighted sum of sources, in the actors or in processes of their own."""

    placement: Literal["actor", "scorer"] = "actor"
    """``actor``: child processes of the actor score its groups; ``scorer``: processes that lease them from the
    buffer."""
    scorers: int = Field(1, ge=1)
    """Reward scorers that ``run`` starts on this machine."""
    verifier: float = 1.0
    """Weight of the verifier (or of the environment's own reward)."""
    model: float = 0.0
    """Weight of the reward model's score (its logit, or the probability of the last class where it has several)."""
    model_path: str = ""
    """A Hugging Face sequence classification folder."""
    judge: float = 0.0
    """Weight of the judge's grade, between 0 and 1."""
    judge_url: str = ""
    """Base address of an OpenAI-compatible server, such as ``http://localhost:8000/v1``; the key is read from
    ``ASYNC_RL_JUDGE_KEY``."""
    judge_model: str = ""
    """Name of the model there."""
    judge_prompt: str = (
        "Question:\n{prompt}\n\nAnswer:\n{completion}\n\nGrade the answer between 0 (wrong) and 1 (right). "
        'Reply with JSON alone: {"grade": NUMBER}'
    )
    """What the judge is asked; ``{prompt}``, ``{completion}`` and columns of the data in braces are filled in."""


class ReferenceConfig(Section):
    """The frozen model of the KL terms, or the teacher of on-policy distillation."""

    path: str = ""
    """Model folder, ``tiny`` or ``smollm2``; empty: the start model."""
    placement: Literal["learner", "scorer"] = "learner"
    """``learner``: on the same packed batch as the policy; ``scorer``: processes that lease groups from the buffer."""
    scorers: int = Field(1, ge=1)
    """Reference scorers that ``run`` starts on this machine."""


class AlgorithmConfig(Section):
    """How groups become gradients; paper and equation of each choice are in docs/algorithms.md."""

    name: Literal[
        "grpo", "dr_grpo", "dapo", "rloo", "reinforce_pp", "ppo", "gspo", "cispo", "decoupled_ppo", "distillation"
    ] = "grpo"
    """A recipe: sets the defaults of other keys, see recipes.py; keys that are given win."""
    advantage: Literal["grpo", "dr_grpo", "rloo", "reinforce_pp", "gae", "distill"] = "grpo"
    """``grpo`` (r - mean) / std of the group, ``dr_grpo`` without std, ``rloo`` minus the mean of the others,
    ``reinforce_pp`` reward to go over the whole batch, ``gae`` with a critic, ``distill`` teacher's log-probability
    minus the student's."""
    loss: Literal["ppo", "gspo", "cispo", "importance"] = "ppo"
    """``ppo`` clipped ratio, ``gspo`` clipped sequence ratio, ``cispo`` clipped weight, ``importance`` plain ratio."""
    clip_low: float = Field(0.2, gt=0, le=1)
    """Ratio is clipped at ``1 - clip_low``."""
    clip_high: float = Field(0.2, gt=0)
    """and at ``1 + clip_high`` (larger than ``clip_low``: clip-higher)."""
    dual_clip: float = Field(0.0, ge=0)
    """Bound of the ratio where the advantage is negative (dual clip), above 1; 0: none."""
    aggregation: Literal["token", "sequence", "constant"] = "token"
    """Mean over all tokens of the batch, over sequences of their token means, or sum over sequences divided by the
    longest possible one; counts are global."""
    proximal: Literal["behaviour", "recomputed", "interpolated"] = "behaviour"
    """Policy that the ratio is taken to: the one that sampled; that of the step's start (decoupled PPO), forwarded
    again or interpolated between the behaviour's and the current one by age."""
    correction: Literal["none", "truncate", "mask", "sequence_mask", "geometric_mask"] = "none"
    """Weight of a token, w = proximal / behaviour: as it is, truncated at ``correction_high``, or set to 0 outside
    ``[correction_low, correction_high]`` by token, by sequence (product) or by sequence (geometric mean)."""
    correction_low: float = Field(0.5, ge=0, lt=1)
    correction_high: float = Field(2.0, gt=1)
    max_token_age: int = Field(-1, ge=-1)
    """Tokens older than this many versions get weight 0; -1: none do."""
    age_decay: float = Field(1.0, gt=0, le=1)
    """A token's weight is multiplied by this for each version of its age."""
    overlong_buffer: int = Field(0, ge=0)
    """Soft length penalty (DAPO) over the last so many tokens before ``sampling.max_new_tokens``; 0: none."""
    critic: Literal["head", "model"] = "head"
    """``gae``: a value head on the policy's last hidden state, or a model of its own."""
    gamma: float = Field(1.0, gt=0, le=1)
    """``gae``: discount per token."""
    lam: float = Field(0.95, ge=0, le=1)
    """``gae``: λ."""
    value_coef: float = Field(0.5, gt=0)
    """``gae``: c1, weight of the value loss."""
    value_clip: float = Field(0.2, ge=0)
    """``gae``: values move at most so far from the old ones; 0: no clip."""
    entropy_coef: float = Field(0.0, ge=0)
    """Weight of the entropy bonus."""
    kl_coef: float = Field(0.0, ge=0)
    """β of the KL penalty to the reference; 0: none."""
    kl_in: Literal["loss", "reward"] = "loss"
    """Where the penalty goes."""
    kl_estimator: Literal["k1", "k2", "k3"] = "k3"
    """Schulman's estimators; ``k1`` only in the reward."""
    kl_controller: Literal["fixed", "adaptive"] = "fixed"
    """``adaptive`` moves β so that the measured KL meets ``kl_target``."""
    kl_target: float = Field(0.05, gt=0)
    """``adaptive``: wanted KL to the reference, per token."""
    minibatches: int = Field(1, ge=1)
    """Optimiser updates per step, each over a share of the groups."""
    epochs: int = Field(1, ge=1)
    """Passes over the batch per step."""


class LearnerConfig(LearnerBase):
    """The learner group."""

    lr_schedule: Literal["constant", "kl_adaptive"] = "constant"
    """``kl_adaptive`` multiplies or divides by 1.5 when the measured KL (between behaviour and current policy) is below
    half or above twice ``kl_target``."""
    critic_lr: float = Field(0.0, ge=0)
    """Learning rate of the critic's own parameters; 0: 10 times ``lr`` for a head, ``lr`` for a model."""
    warmup_steps: int = Field(0, ge=0)
    """Linear warm-up of the learning rate."""
    micro_batch_tokens: int = Field(16_384, ge=1)
    """Most tokens (padding included) of one forward and backward."""
    compile: bool = False
    """``torch.compile`` the models' layers; needs a C++ compiler, and about a minute at the start and for each new kind
    of batch."""
    strategy: Literal["flat", "fsdp"] = "flat"
    """``flat``: every rank holds the whole model, and one all_reduce sums its gradient; ``fsdp``: each rank holds a
    shard of every layer, and layers are gathered when they are run: for models larger than a device."""
    shard_optimizer: bool = False
    """``flat``: each rank keeps the optimiser's state of its slice only; saves 8 bytes a parameter, less those of the
    slice, and costs an all_gather of the parameters an update. ``fsdp`` does it in any case."""


class LoraConfig(Section):
    """An adapter in place of the whole model: a layer computes W x + α/r B A x, W stays (Hu et al. 2021)."""

    rank: int = Field(0, ge=0, le=512)
    """r, columns of B and rows of A; 0: no adapter, the whole model is trained."""
    alpha: int = Field(32, ge=1)
    """α; the product of the two matrices is multiplied by ``alpha / rank``."""
    targets: tuple[str, ...] = Field(
        ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"), strict=False, min_length=1
    )
    """Names of the linear layers that get one, in every block."""

    @property
    def is_on(self) -> bool:
        """Whether an adapter is trained, and published, instead of the model."""
        return self.rank > 0

    @property
    def scale(self) -> float:
        """α / r."""
        return self.alpha / self.rank


class EvalConfig(EvalBase):
    """Evaluation on held-out problems: greedy, pinned to one version, in its own process."""

    problems: int = Field(500, ge=1)
    """Held-out problems used."""


class Config(RunConfig):
    """One run that trains a language model."""

    model: ModelConfig = ModelConfig()
    task: TaskConfig = TaskConfig()
    sampling: SamplingConfig = SamplingConfig()
    actors: ActorsConfig = ActorsConfig()
    reward: RewardConfig = RewardConfig()
    reference: ReferenceConfig = ReferenceConfig()
    algorithm: AlgorithmConfig = AlgorithmConfig()
    lora: LoraConfig = LoraConfig()
    learner: LearnerConfig = LearnerConfig()
    eval: EvalConfig = EvalConfig()

    @model_validator(mode="before")
    @classmethod
    def _fill_in(cls, raw: Any) -> Any:
        if not isinstance(raw, dict):
            return raw
        if isinstance(raw.get("task"), dict) and raw["task"].get("data"):
            raw = {**raw, "task": {**raw["task"], "name": "jsonl"}}
        return with_recipe(raw)

    @model_validator(mode="after")
    def _check(self) -> Config:
        check_effect(self)
        check_together(self)
        return self

    @property
    def device(self) -> Literal["auto", "cpu", "cuda"]:
        """Where engines and learner compute."""
        return self.model.device

    @property
    def dtype(self) -> Literal["float32", "bfloat16"]:
        """Type of the published weights."""
        return self.model.dtype

    @property
    def group_size(self) -> int:
        """Completions of a prompt."""
        return self.sampling.group_size

    @property
    def split_minibatches(self) -> int:
        """Mini-batches into which the server splits a batch."""
        return self.algorithm.minibatches

    @property
    def stages(self) -> tuple[str, ...]:
        """Names of the stages that scorers add to a submitted group before it is ready: ``reward``, ``reference``."""
        reward = ("reward",) if self.reward.placement == "scorer" else ()
        return (*reward, *(("reference",) if self.needs_reference and self.reference.placement == "scorer" else ()))

    @property
    def sharded(self) -> bool:
        """Whether no rank of the learner holds the whole model."""
        return self.learner.strategy == "fsdp"

    @property
    def saves_together(self) -> bool:
        """Whether every rank has a part of what a checkpoint keeps."""
        return self.sharded or self.learner.shard_optimizer

    @property
    def needs_reference(self) -> bool:
        """Whether anything reads the reference model's log-probabilities."""
        return self.algorithm.kl_coef > 0 or self.algorithm.advantage == "distill"

    def kept(self) -> dict[str, Any]:
        """What the critic is, if there is one."""
        critic = self.algorithm.critic if self.algorithm.advantage == "gae" else "none"
        return {"the critic (algorithm.advantage, algorithm.critic)": critic}

    @property
    def max_sampled(self) -> int:
        """Most sampled tokens of one trajectory."""
        return self.sampling.max_new_tokens * (self.task.max_turns if self.task.environment else 1)

    def contract(self) -> dict[str, Any]:
        """What all sides must agree on: model, adapter, task, sampling, rewards, reference, seed."""
        return {
            "seed": self.seed,
            "model": self.model.model_dump(exclude={"device"}),
            "task": self.task.model_dump(exclude=_TASK_FREE),
            "sampling": self.sampling.model_dump(),
            "reward": self.reward.model_dump(exclude={"scorers"}),
            "reference": self.reference.path if self.needs_reference else None,
            **({"lora": self.lora.model_dump()} if self.lora.is_on else {}),
        }
