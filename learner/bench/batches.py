"""What the learner's benchmarks train on: a model, its configuration, and groups of token sequences.

arithmetic    64 prompts ``12+34=`` × 8 completions that the model samples itself, up to 16 tokens, rewarded by rule
smollm2       random tokens, lengths spread evenly from 64 to 512, on random weights of SmolLM2-135M's shape
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgpack
import numpy as np
import torch

from async_rl.config import Config, parse_config
from async_rl.data import Group, make_group, token_trajectory
from async_rl.models import cached_model, load_causal_lm, load_tokenizer
from async_rl.wire import decode_groups, encode_groups, unpack_header
from learner.shard import MiniBatch

CaseName = Literal["arithmetic", "smollm2"]
GROUP_SIZE = 8
MAX_NEW = 16
"""Most tokens of a sampled sum."""
SHORTEST, LONGEST, PROMPT = 64, 512, 32
"""Tokens of a sequence of ``smollm2``, and of the prompt that it has in common with its group."""
_SEED = 0
_BUILD_S = 600.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What is trained, and how."""

    name: CaseName
    config: Config
    folder: Path | None
    """Of the model; None: random weights of SmolLM2-135M's shape."""
    rows: int
    """Most sequences of one forward of the padded baseline."""
    checked: int | None
    """Groups on which gradients and peak memory are compared; None: all. Many take as long as what is measured, and
    their micro-batches are all alike."""

    def make_model(self) -> Any:
        """A fresh model, with the same weights each time."""
        return smollm2_model() if self.folder is None else load_causal_lm(self.folder, "float32", "cpu")

    def draw(self, num_sequences: int) -> list[Group]:
        """The batch, the same each time: ``num_sequences`` in groups of 8 (the last one may be smaller)."""
        draw = _arithmetic if self.name == "arithmetic" else _random
        return draw(self, num_sequences)


def load_case(name: CaseName, model: Path | None) -> Case:
    """A case on its own model, or on that of a folder; ``tiny`` is built where it is missing."""
    if name == "arithmetic":
        return Case(name=name, config=_config(MAX_NEW), folder=model or _tiny(), rows=1 << 16, checked=None)
    rows = 4  # 4 x 512 tokens of both sides at a time: the activations of twice as many take 12 GB
    return Case(
        name=name, config=_config(LONGEST, micro_batch_tokens=rows * LONGEST), folder=model, rows=rows, checked=2
    )


def one_rank(groups: Sequence[Group]) -> MiniBatch:
    """``groups`` as what a rank that is alone gets."""
    return MiniBatch(
        groups=groups,
        num_tokens=sum(group.num_sampled for group in groups),
        num_sequences=sum(len(group) for group in groups),
        lengths_per_rank=[[n for group in groups for n in group.lengths]],
    )


def write_groups(file: Path, groups: Sequence[Group]) -> None:
    """For another process of this machine."""
    file.write_bytes(msgpack.packb([bytes(frame) for frame in encode_groups("batch", groups)]))


def read_groups(file: Path) -> list[Group]:
    """What :func:`write_groups` wrote."""
    header, *frames = msgpack.unpackb(file.read_bytes())
    return decode_groups(unpack_header(header), frames)


def smollm2_model() -> Any:
    """Random weights of the shape of SmolLM2-135M, the same each time."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1_536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8_192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100_000.0},
        tie_word_embeddings=True,
    )
    torch.manual_seed(_SEED)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa").eval()


def _config(max_new: int, **learner: int) -> Config:
    sampling = {"group_size": GROUP_SIZE, "max_new_tokens": max_new}
    config: Config = parse_config({"sampling": sampling, "learner": learner})
    return config


def _tiny() -> Path:
    folder = cached_model("tiny")
    if not (folder / "config.json").is_file():
        command = [sys.executable, "-m", "learner.warmup.main", "tiny", "--out", str(folder)]
        subprocess.run(command, check=True, timeout=_BUILD_S, stdout=subprocess.DEVNULL)
    return folder


def _arithmetic(case: Case, num_sequences: int) -> list[Group]:
    assert case.folder is not None
    model, tokenizer = case.make_model(), load_tokenizer(case.folder)
    terms = np.random.default_rng(_SEED).integers(10, 100, (-(-num_sequences // GROUP_SIZE), 2)).tolist()
    return [
        _sampled(model, tokenizer, index, f"{a}+{b}=", str(a + b), min(GROUP_SIZE, num_sequences - GROUP_SIZE * index))
        for index, (a, b) in enumerate(terms)
    ]


@torch.no_grad()
def _sampled(model: Any, tokenizer: Any, index: int, prompt: str, answer: str, size: int) -> Group:
    """One group, sampled at temperature 1 up to the end token; 1 for the right sum, 0 for all else."""
    ids = tokenizer(prompt, add_special_tokens=False, return_tensors="pt")["input_ids"]
    end, generator = int(tokenizer.eos_token_id), torch.Generator().manual_seed(index)
    rows, logprobs = ids.repeat(size, 1), torch.zeros(size, 0)
    for _ in range(MAX_NEW):
        table = model(input_ids=rows, use_cache=False).logits[:, -1].log_softmax(-1)
        drawn = torch.multinomial(table.exp(), 1, generator=generator)
        rows, logprobs = torch.cat([rows, drawn], 1), torch.cat([logprobs, table.gather(1, drawn)], 1)
    trajectories = []
    for completion, said in zip(rows[:, ids.shape[1] :].tolist(), logprobs.tolist(), strict=True):
        length = completion.index(end) + 1 if end in completion else MAX_NEW
        right = tokenizer.decode(completion[:length], skip_special_tokens=True) == answer
        trajectories.append(
            token_trajectory(
                prompt=ids[0].tolist(),
                completion=completion[:length],
                logprobs=said[:length],
                versions=[0] * length,
                reward=float(right),
            )
        )
    return make_group(ordinal=index, attempt=0, task_index=index, trajectories=trajectories)


def _random(case: Case, num_sequences: int) -> list[Group]:
    """Lengths are evenly spaced, so that a small batch has the padding of a large one."""
    rng = np.random.default_rng(_SEED)
    vocabulary = int(case.make_model().config.vocab_size)
    lengths = rng.permutation(np.linspace(SHORTEST, LONGEST, num_sequences).round().astype(int)).tolist()

    def draw(count: int) -> list[int]:
        return rng.integers(0, vocabulary, count).tolist()

    groups = []
    for index, first in enumerate(range(0, num_sequences, GROUP_SIZE)):
        prompt = draw(PROMPT)
        trajectories = [
            token_trajectory(
                prompt=prompt,
                completion=draw(length - PROMPT),
                logprobs=[-float(np.log(vocabulary))] * (length - PROMPT),
                versions=[0] * (length - PROMPT),
                reward=float(rng.integers(0, 2)),
            )
            for length in lengths[first : first + GROUP_SIZE]
        ]
        groups.append(make_group(ordinal=index, attempt=0, task_index=index, trajectories=trajectories))
    return groups
