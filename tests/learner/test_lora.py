"""An adapter in the learner: what is trained and computed, what it is compared with, what a checkpoint has of it."""

import copy
import importlib.util
import os
from dataclasses import replace

import numpy as np
import pytest
import torch
from server_part import server_part
from test_update import brute_force_gradient, flat_gradient
from token_domains import counters, domain_of

from actors.engines.base import Request
from actors.engines.torch_engine import TorchEngine
from async_rl.config import parse_config
from async_rl.errors import ConfigError
from async_rl.models import load_causal_lm
from async_rl.runfolder import RunFolder
from async_rl.timer import StateTimer
from async_rl.weights.segment import SegmentReader
from learner import adapter_files
from learner.adapter import AdapterOff, FrozenBase, add_adapter
from learner.batching import build_micro_batches, plan_micro_batches
from learner.checkpoint import Checkpoints, ContractError
from learner.flat import view_of
from learner.group import LearnerGroup, Placement
from learner.networks import load_networks
from learner.publisher import Publisher
from learner.rank import Rank
from learner.reference import Reference
from learner.sequences import concatenate
from learner.signals import Signals
from learner.start import find_start
from learner.token_domain import build
from learner.updater import Updater
from learner.warmup.main import build_model, build_tokenizer, save

pytestmark = [
    pytest.mark.skipif(importlib.util.find_spec("peft") is None, reason="peft is not installed"),
    pytest.mark.filterwarnings("ignore"),  # peft's own
]

CPU = torch.device("cpu")
LORA = {"rank": 4, "alpha": 12, "targets": ["q_proj", "v_proj", "down_proj"]}
PROMPT = (5, 6, 7, 8)


@pytest.fixture
def folder(tmp_path, make_model):
    make_model().save_pretrained(tmp_path / "base")
    return tmp_path / "base"


def updater_of(folder, **sections):
    config = parse_config({"model": {"path": str(folder)}, "lora": LORA, **sections})
    group = LearnerGroup(Placement(0, 1, CPU), timeout_s=60.0)
    return Updater(config, load_networks(config, folder, CPU), group, StateTimer())


def disturbed(updater, seed=0):
    """The same with an adapter far from 0."""
    torch.manual_seed(seed)
    for slot in updater.flat.layout:
        view_of(updater.flat.data, slot).normal_(0.0, 0.2)
    updater.flat.refresh()
    return updater


def merged(folder, updater):
    """The base with W + α/r B A, multiplied out in float64."""
    model, tensors = load_causal_lm(folder, "float32", CPU), updater.flat.tensors("policy")
    for name, a in tensors.items():
        if ".lora_A." in name:
            weight, b = model.get_submodule(name.partition(".lora_A.")[0]).weight, tensors[name.replace("_A.", "_B.")]
            weight.data = (weight.double() + 12 / 4 * b.double() @ a.double()).float()
    return model


@torch.no_grad()
def logits(model, seed=1):
    torch.manual_seed(seed)
    return model(torch.randint(0, 24, (3, 12)), use_cache=False).logits


def train(updater, make_groups, make_mini_batch, steps):
    for step in steps:
        totals = updater.gradient(*updater.prepare([make_mini_batch(make_groups(3, seed=step))], version=3))
        updater.apply(totals, step, adapt=False)


class Trained:
    """A model of which only the trainable parameters are shown."""

    def __init__(self, model):
        self._model = model
        self.zero_grad = model.zero_grad

    def __call__(self, **inputs):
        return self._model(**inputs)

    def parameters(self):
        return [p for p in self._model.parameters() if p.requires_grad]


def test_the_adapter_alone_is_trained_and_changes_nothing_at_the_start(folder):
    updater = updater_of(folder)
    assert len(updater.flat.layout) == 2 * 3 * 2  # layers, targets, A and B
    assert all(".lora_A.default.weight" in s.name or ".lora_B.default.weight" in s.name for s in updater.flat.layout)
    # a layer: q 16 -> 16, v 16 -> 8 (one head of two), down 32 -> 16
    assert sum(s.numel for s in updater.flat.layout) == 2 * 4 * (16 + 16 + 16 + 8 + 32 + 16)
    assert torch.equal(logits(updater.networks.policy), logits(load_causal_lm(folder, "float32", CPU)))
    assert torch.equal(updater_of(folder).flat.data, updater.flat.data)
    assert not torch.equal(updater_of(folder, seed=1).flat.data, updater.flat.data)


def test_the_policy_computes_what_the_merged_weights_do(folder):
    updater = disturbed(updater_of(folder))
    found, expected = logits(updater.networks.policy), logits(merged(folder, updater))
    assert (found - expected).abs().max() < 1e-4
    assert (found - logits(load_causal_lm(folder, "float32", CPU))).abs().max() > 0.1


@pytest.mark.parametrize("kl_coef", [0.0, 0.3])
def test_the_gradient_is_that_of_pefts_own_model_and_the_kl_that_to_the_base(
    folder, make_groups, make_mini_batch, kl_coef
):
    import peft

    updater, groups = disturbed(updater_of(folder, algorithm={"kl_coef": kl_coef})), make_groups(4)
    base = load_causal_lm(folder, "float32", CPU)
    config = peft.LoraConfig(r=4, lora_alpha=12, target_modules=LORA["targets"], task_type="CAUSAL_LM")
    plain = peft.get_peft_model(copy.deepcopy(base), config)
    for name, tensor in updater.flat.tensors("policy").items():
        plain.get_parameter(f"base_model.model.{name}").data.copy_(tensor)
    loss, expected = brute_force_gradient(Trained(plain), groups, kl=(kl_coef, base) if kl_coef else None)

    totals = updater.gradient(*updater.prepare([make_mini_batch(groups)], version=3))
    assert expected.abs().max() > 1e-2
    assert (flat_gradient(updater) - expected).abs().max() < 1e-5
    assert float(totals["loss_policy"] + totals["loss_kl"]) == pytest.approx(loss, abs=1e-5)
    if kl_coef:
        assert float(totals["loss_kl"]) > 1e-3


def test_the_gradient_is_the_chain_rule_through_the_merged_weights(folder, make_groups, make_mini_batch):
    # y = (W + s B A) x with s = α/r = 3, and G the gradient of W + s B A: that of A is s Bᵀ G, that of B is s G Aᵀ
    updater, groups = disturbed(updater_of(folder)), make_groups(4)
    plain = merged(folder, updater)
    brute_force_gradient(plain, groups)
    updater.gradient(*updater.prepare([make_mini_batch(groups)], version=3))
    tensors = {name: tensor.double() for name, tensor in updater.flat.tensors("policy").items()}
    for slot in updater.flat.layout:
        layer, _, kind = slot.name.partition(".lora_")
        g = plain.get_submodule(layer).weight.grad.double()
        other = tensors[f"{layer}.lora_{'B' if kind[0] == 'A' else 'A'}.default.weight"]
        expected = 3 * (other.T @ g if kind[0] == "A" else g @ other.T)
        assert expected.abs().max() > 1e-3, slot.name
        assert (view_of(updater.flat.grad, slot) - expected).abs().max() < 1e-5, slot.name


def test_the_reference_is_the_base_with_the_adapter_off_unless_another_one_is_named(folder, tmp_path, make_groups):
    networks = disturbed(updater_of(folder, algorithm={"kl_coef": 0.1})).networks
    sequences = concatenate(make_groups(3), version=3)
    nothing = Signals(advantages_M=torch.zeros(len(sequences.token_M)))
    plan = plan_micro_batches(sequences, 1000)
    (batch,) = build_micro_batches(sequences, nothing, plan, count=1, device=CPU)
    assert isinstance(networks.reference, AdapterOff)
    expected = Reference(load_causal_lm(folder, "float32", CPU), 1.0).logprobs(batch)
    before = networks.outputs(batch)
    assert torch.equal(before.ref_logprobs_M, expected)
    assert (before.logprobs_M.detach() - expected).abs().max() > 0.1  # the adapter is on again
    assert sum(p.requires_grad for p in networks.policy.parameters()) == 12


def test_versions_hold_the_adapter_alone_under_pefts_names_and_its_checksum_covers_it(folder):
    updater = disturbed(updater_of(folder))
    domain = domain_of(updater)
    publisher = Publisher(f"lora-{os.getpid()}", domain.published, 4096)
    try:
        first = publisher.publish(updater.flat.data, 0, evaluated=False)
        names = {t.name for t in first.tensors}
        assert "model.layers.1.mlp.down_proj.lora_B.weight" in names
        assert len(names) == 12
        assert all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in names)
        whole = sum(p.numel() for p in load_causal_lm(folder, "float32", CPU).parameters()) * 4
        assert first.nbytes <= 2 * 4 * (16 + 16 + 16 + 8 + 32 + 16) * 4 + 12 * 128 < whole  # gaps below 128 bytes
        view_of(updater.flat.data, updater.flat.layout[3])[0, 0] += 1e-3
        assert publisher.publish(updater.flat.data, 1, evaluated=False).checksum != first.checksum
    finally:
        publisher.close()


@pytest.mark.parametrize(("dtype", "limit"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_engine_and_learner_give_the_same_logprobs_to_the_same_adapter(folder, dtype, limit):
    updater = disturbed(updater_of(folder, model={"path": str(folder), "dtype": dtype}))
    config, networks = updater._config, updater.networks
    kind = getattr(torch, dtype)
    engine = TorchEngine(folder, device=CPU, dtype=kind, slots=8, context=64, stop_token_ids=(2,), lora=config.lora)
    publisher, reader = Publisher(f"lora-{os.getpid()}", domain_of(updater).published, 4096, dtype), SegmentReader()
    try:
        manifest = publisher.publish(updater.flat.data, 0, evaluated=False)
        assert engine.load_weights(manifest, reader.open(manifest)) == manifest.checksum
        engine.submit([Request(id=0, prompt=PROMPT, num_samples=8, seed=(0, 0), max_new_tokens=12, temperature=1.0)])
        done = []
        while engine.num_running:
            done += engine.step(0.0)
    finally:
        reader.close()
        publisher.close()
    assert len(done) == 8
    differences = []
    for c in done:
        ids = torch.tensor([[*PROMPT, *c.tokens]])
        with torch.no_grad():
            table = networks.policy(ids, use_cache=False).logits[0, len(PROMPT) - 1 : -1].float().log_softmax(-1)
        differences.append(table[torch.arange(len(c.tokens)), torch.from_numpy(c.tokens).long()].numpy() - c.logprobs)
    assert np.abs(np.concatenate(differences)).max() < limit


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_resumed_learner_continues_bit_by_bit_and_peft_reads_the_checkpoint(
    tmp_path, folder, make_groups, make_mini_batch, dtype
):
    import peft

    model = {"path": str(folder), "dtype": dtype}
    straight = updater_of(folder, model=model, learner={"lr": 1e-2})
    train(straight, make_groups, make_mini_batch, range(2))
    checkpoint = Checkpoints(tmp_path, 2).save(counters(2), domain_of(straight), server_part)
    assert RunFolder(tmp_path).latest_checkpoint() == checkpoint
    assert not (checkpoint / "hf").exists()
    if dtype == "float32":
        loaded = peft.PeftModel.from_pretrained(load_causal_lm(folder, dtype, CPU), str(checkpoint / "adapter"))
        assert torch.equal(logits(loaded.eval()), logits(straight.networks.policy))
        ours, theirs = merged(folder, straight).state_dict(), loaded.merge_and_unload().state_dict()
        assert max((ours[name] - theirs[name]).abs().max() for name in ours) < 1e-6
        base = load_causal_lm(folder, dtype, CPU).state_dict()
        assert max((theirs[name] - base[name]).abs().max() for name in base) > 1e-4
    train(straight, make_groups, make_mini_batch, range(2, 4))

    resumed = updater_of(folder, model=model, learner={"lr": 1e-2})
    domain_of(resumed).load(checkpoint)
    train(resumed, make_groups, make_mini_batch, range(2, 4))
    assert torch.equal(resumed.flat.data, straight.flat.data)
    assert (resumed.flat.data - updater_of(folder, model=model).flat.data).abs().max() > 1e-3


def test_a_checkpoint_of_another_base_or_shape_is_refused(tmp_path, folder, monkeypatch):
    updater = updater_of(folder)
    checkpoint = Checkpoints(tmp_path, 2).save(counters(2), domain_of(updater), server_part)
    other = updater_of(folder, lora={**LORA, "targets": ["q_proj"]})
    with pytest.raises(ConfigError, match="does not fit the adapter"):
        domain_of(other).load(checkpoint)
    monkeypatch.setattr(adapter_files, "base_of", lambda config: "another")
    with pytest.raises(
        ContractError, match=r"was trained on a model with the checksum '\w{32}', model\.path has 'another'"
    ):
        domain_of(updater).load(checkpoint)


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "nothing", "norm"])
def test_a_target_that_is_no_linear_layer_inside_the_model_is_a_sentence(make_model, target):
    lora = parse_config({"lora": {"rank": 2, "targets": ["q_proj", target]}}).lora
    with pytest.raises(ConfigError, match=f"'{target}' names no linear layer of Qwen2ForCausalLM.* q_proj, up_proj"):
        add_adapter(make_model(), lora, seed=0)


def test_a_base_that_was_away_computes_as_before(folder):
    updater = disturbed(updater_of(folder))
    policy = updater.networks.policy
    before, base = logits(policy), FrozenBase(policy)
    base.offload()
    assert policy.lm_head.weight.untyped_storage().nbytes() == 0
    base.restore()
    assert torch.equal(logits(policy), before)


def test_a_life_of_the_learner_begins_at_the_newest_adapter_and_never_sets_it_aside_for_another_base(
    tmp_path, monkeypatch
):
    save(build_model(), build_tokenizer(), tmp_path / "start")
    config = parse_config({"model": {"path": str(tmp_path / "start")}, "lora": LORA})
    group = LearnerGroup(Placement(0, 1, CPU), 60.0)
    rank = Rank(group=group, timer=StateTimer(), out=tmp_path)
    first = build(config, rank)
    first.updater.flat.data.fill_(0.5)
    Checkpoints(tmp_path, 1).save(counters(4, config.contract_hash()), first, server_part)
    start = find_start(config, tmp_path, group, lambda folder: build(config, replace(rank, resume=folder)))
    assert start.state.step == 4
    assert {float(view_of(start.loaded.updater.flat.data, slot)[0, 0]) for slot in first.updater.flat.layout} == {0.5}
    assert start.loaded.published == first.published
    monkeypatch.setattr(adapter_files, "base_of", lambda config: "another")
    with pytest.raises(ContractError, match="put the model back"):
        find_start(config, tmp_path, group, lambda folder: build(config, replace(rank, resume=folder)))
    assert [folder.name for folder in (tmp_path / "checkpoints").iterdir()] == ["step_4"]
