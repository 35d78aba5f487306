"""The models of a rank and their forward passes over one packed batch: policy, critic and frozen reference.

                  ┌─► policy trunk ─► hidden [N, H] ─┬─► log-probabilities, entropy [M]
micro-batch ──────┤                                  └─► critic (head)  ─► values [M]
                  ├─► critic trunk ──────────────────────► critic (model) ─► values [M]
                  └─► reference (no gradient) ───────────► log-probabilities [M]
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from async_rl.compiler import find_compiler
from async_rl.config import Config
from async_rl.errors import ConfigError
from async_rl.logprobs import token_logprobs
from async_rl.models import check_head, load_causal_lm, load_tokenizer, resolve_model
from learner.adapter import AdapterOff, FrozenBase, add_adapter
from learner.algorithms.objective import Outputs
from learner.batching import MicroBatch
from learner.critic import Critic
from learner.logprobs import can_forward_trees, predicting_hidden
from learner.reference import Reference, ReferenceModel

if TYPE_CHECKING:
    from learner.group import LearnerGroup


class Networks:
    """What is trained, and what it is compared with.

    Args:
        policy: causal language model on the group's device, in float32 unless it has an adapter.
        critic: for GAE, or None.
        reference: for a KL term or distillation, or None.
        temperature: of the sampling contract.
        entropy_gradient: whether the entropy is part of the loss.
        base: what of the policy is not trained, where it has an adapter.
    """

    def __init__(
        self,
        policy: Any,
        critic: Critic | None = None,
        reference: ReferenceModel | None = None,
        *,
        temperature: float = 1.0,
        entropy_gradient: bool = False,
        base: FrozenBase | None = None,
    ) -> None:
        self.policy = policy
        self.critic = critic
        self.reference = reference
        self.base = base
        self.trees = can_forward_trees(policy)
        """Whether rows of trees can be forwarded; the other models have the same architecture or are asked, too."""
        if reference is not None:
            self.trees &= reference.trees
        self._temperature = temperature
        self._entropy_gradient = entropy_gradient

    @property
    def trained(self) -> Mapping[str, nn.Module]:
        """What is trained, by role; the policy comes first."""
        return {"policy": self.policy} | ({"critic": self.critic} if self.critic is not None else {})

    def follow_rank_0(self, group: LearnerGroup) -> None:
        """Leave each rank a shard of the reference, if there is one; what was found out on rank 0 counts."""
        self.trees = bool(group.broadcast_number(float(self.trees)))
        if isinstance(self.reference, Reference):
            self.reference.shard(group)

    def compile(self) -> None:
        """Compile the layers of all models, in place, for batches of any size; they keep names and parameters.

        Raises:
            ConfigError: there is no C++ compiler.
        """
        find_compiler()
        self.policy.base_model.compile(dynamic=True)
        if self.critic is not None and self.critic.trunk is not None:
            self.critic.trunk.compile(dynamic=True)
        if self.reference is not None:
            self.reference.compile()

    def outputs(self, batch: MicroBatch) -> Outputs:
        """All that the objective reads, each ``[M]``, with gradient except the reference's."""
        hidden_NH = self._policy_hidden(batch)
        logprobs_N, entropy_N = self._logprobs(hidden_NH, batch, self._entropy_gradient)
        ref_logprobs_M = batch.ref_logprobs_M
        if ref_logprobs_M is None and self.reference is not None:
            ref_logprobs_M = self.reference.logprobs(batch)
        return Outputs(
            logprobs_M=logprobs_N[batch.reads_M],
            entropy_M=entropy_N[batch.reads_M],
            values_M=self.critic(batch, hidden_NH)[batch.reads_M] if self.critic is not None else None,
            ref_logprobs_M=ref_logprobs_M,
        )

    @torch.no_grad()
    def logprobs_and_values(self, batch: MicroBatch, logprobs: bool) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Without gradient: the policy's log-probabilities ``[M]`` if wanted, and a critic's values ``[M]``."""
        critic_reads_policy = self.critic is not None and self.critic.trunk is None
        hidden_NH = self._policy_hidden(batch) if logprobs or critic_reads_policy else torch.empty(0)
        values_N = self.critic(batch, hidden_NH) if self.critic is not None else None
        return (
            self._logprobs(hidden_NH, batch, False)[0][batch.reads_M] if logprobs else None,
            values_N[batch.reads_M] if values_N is not None else None,
        )

    def _policy_hidden(self, batch: MicroBatch) -> torch.Tensor:
        return predicting_hidden(self.policy, batch.inputs_RL, batch.source_N, batch.positions_RL, batch.visible_RLL)

    def _logprobs(
        self, hidden_NH: torch.Tensor, batch: MicroBatch, entropy_gradient: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        head = self.policy.get_output_embeddings()
        return token_logprobs(
            hidden_NH, head.weight, head.bias, batch.targets_N, self._temperature, entropy_gradient=entropy_gradient
        )


def check_tokens(policy: Path, reference: Path) -> None:
    """Make sure that a token id means the same to both models.

    Raises:
        ConfigError: they have other vocabularies, so that log-probabilities cannot be compared.
    """
    if load_tokenizer(policy).get_vocab() != load_tokenizer(reference).get_vocab():
        raise ConfigError(
            f"reference.path = {str(reference)!r} has another vocabulary than the policy's {policy}: a token id would "
            "mean another text there; take a model with the same tokenizer"
        )


def load_networks(config: Config, source: Path, device: torch.device, weights: bool = True) -> Networks:
    """Load what the configuration needs; what is trained in float32, whatever it computes in.

    Args:
        config: the run.
        source: folder of the policy: the start model, or that of a checkpoint; with an adapter, of its base.
        device: where the models go.
        weights: False leaves the parameters uninitialised, where another rank gives them; their memory is not touched.

    Raises:
        ConfigError: a model cannot be loaded, or does not fit the others.
    """
    algorithm, lora = config.algorithm, config.lora
    policy = load_causal_lm(source, config.model.dtype if lora.is_on else "float32", device, weights)
    if weights:
        check_head(policy)
    if lora.is_on:
        add_adapter(policy, lora, config.seed)
    critic = None
    if algorithm.advantage == "gae":
        trunk = None
        if algorithm.critic == "model":
            trunk = load_causal_lm(resolve_model(config.model.path), "float32", device, weights).base_model
        critic = Critic(policy.get_output_embeddings().weight.shape[1], trunk).to(device)
    networks = Networks(
        policy,
        critic,
        _load_reference(config, source, policy, device, weights),
        temperature=config.sampling.temperature,
        entropy_gradient=algorithm.entropy_coef > 0,
        base=FrozenBase(policy) if lora.is_on else None,
    )
    if config.learner.compile:
        networks.compile()
    return networks


def _load_reference(
    config: Config, source: Path, policy: Any, device: torch.device, weights: bool
) -> ReferenceModel | None:
    """The reference that the learner needs: the base of an adapter is in memory already."""
    if not config.needs_reference or config.reference.placement != "learner":
        return None
    folder = resolve_model(config.reference.path or config.model.path, "reference.path")
    if config.lora.is_on and folder.resolve() == source.resolve():
        return AdapterOff(policy, config.sampling.temperature)
    check_tokens(source, folder)
    return Reference(load_causal_lm(folder, config.model.dtype, device, weights), config.sampling.temperature)
