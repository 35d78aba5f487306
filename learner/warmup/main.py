"""Build the tiny start models: 0.6M parameters, Qwen2, a token per character.

    python -m learner.warmup.main tiny --out DIR         right on about half of the two-digit sums (``arithmetic``)
    python -m learner.warmup.main tiny-tools --out DIR   solves about a third of the multi-turn tasks (``calculator``)

    random weights ──supervised on training problems──► held-out accuracy in its window ──► Hugging Face folder DIR

Reinforcement learning needs a model that is right sometimes. Held-out problems are only measured here, never trained.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.config import TaskConfig
from async_rl.process import run_guarded
from async_rl.tasks import Problem, load_task
from async_rl.tasks.prompt import encode_prompt
from learner.warmup.demonstrations import EXPERTS, Demonstration
from learner.warmup.supervision import IGNORE, Lesson, supervise

PAD, BOS, EOS, UNK = 0, 1, 2, 3
VOCAB_SIZE = 128

_SEED = 0
_BATCH_TOKENS = 1_024
"""Tokens of a batch of demonstrations, which differ much in length."""
_TRAINED, _MEASURED = 6_000, 100
"""Most demonstrations that are trained, and measured."""
_WINDOWS = {"calculator": (0.35, 0.5), "guess": (0.15, 0.3), "gymnasium:FrozenLake-v1": (0.15, 0.3)}
"""Accuracies between which each lesson ends. Guesses and moves other than the expert's may succeed, too: there, more
than twice as many episodes do."""


def build_tokenizer() -> Any:
    """Make a character tokenizer: the id of a character is its ASCII code, and codes 0 to 3 are pad, bos, eos, unk.

    It is byte-level BPE without merges, because transformers loads the tokenizer of any Qwen2 folder as byte-level BPE:
    of another kind it would drop the spaces there.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, "<unk>": UNK}
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    vocab = special | {bytes_.pre_tokenize_str(chr(code))[0][0]: code for code in range(len(special), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", fuse_unk=True))
    tokenizer.pre_tokenizer = bytes_
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<eos>",
        unk_token="<unk>",
        padding_side="left",
    )


def build_model() -> nn.Module:
    """Make the model with random weights from the current seed."""
    from transformers import Qwen2Config, Qwen2ForCausalLM

    config = Qwen2Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=192,
        intermediate_size=256,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=3,
        max_position_embeddings=512,
        initializer_range=0.05,
        tie_word_embeddings=False,
        pad_token_id=PAD,
        bos_token_id=BOS,
        eos_token_id=EOS,
    )
    return Qwen2ForCausalLM(config)


Row = list[tuple[list[int], bool]]
"""A sequence in pieces: token ids, and whether the model is to write them."""


def encode_problems(tokenizer: Any, problems: Sequence[Problem], task: TaskConfig) -> tuple[Tensor, Tensor]:
    """Encode prompts with their right answers and the end token; see :func:`pad`."""
    rows: list[Row] = []
    for problem in problems:
        answer = [*tokenizer(problem.columns["answer"])["input_ids"], EOS]
        rows.append([(list(encode_prompt(tokenizer, problem, task)), False), (answer, True)])
    return pad(rows)


def encode_demonstrations(tokenizer: Any, shown: Sequence[Demonstration]) -> tuple[Tensor, Tensor]:
    """Encode solved episodes, each turn with its end token; see :func:`pad`."""
    rows: list[Row] = []
    for episode in shown:
        row: Row = [(tokenizer(episode.prompt)["input_ids"], False)]
        for turn, observation in zip_longest(episode.turns, episode.observations, fillvalue=""):
            row += [([*tokenizer(turn)["input_ids"], EOS], True), (tokenizer(observation)["input_ids"], False)]
        rows.append(row)
    return pad(rows)


def pad(rows: Sequence[Row]) -> tuple[Tensor, Tensor]:
    """Make tensors of sequences.

    Returns:
        ``(inputs, targets)``, both int64 [num_rows, length], padded on the right; ``targets`` are shifted by one and
        hold -100 except where a piece that the model writes is to be predicted.
    """
    length = max(sum(len(ids) for ids, _ in row) for row in rows)
    inputs = torch.full((len(rows), length), PAD)
    targets = torch.full((len(rows), length), IGNORE)
    for i, row in enumerate(rows):
        start = 0
        for ids, is_written in row:
            inputs[i, start : start + len(ids)] = torch.tensor(ids, dtype=torch.long)
            if is_written:
                targets[i, start : start + len(ids)] = inputs[i, start : start + len(ids)]
            start += len(ids)
    return inputs[:, :-1], targets[:, 1:]


def save(model: Any, tokenizer: Any, out: Path) -> None:
    """Write a Hugging Face folder that appears at ``out`` whole or not at all."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    try:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
        partial.chmod(0o755)
        if out.is_dir():
            shutil.rmtree(out)
        os.replace(partial, out)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def tiny_lessons(tokenizer: Any) -> list[Lesson]:
    """Sums of two numbers of two digits."""
    task = TaskConfig(name="addition", digits=2)
    data = load_task(task, _SEED)
    train, heldout = (encode_problems(tokenizer, problems, task) for problems in (data.train, data.heldout))
    return [Lesson(name="addition", train=train, heldout=heldout, enough=0.45, too_much=0.58)]


def tools_lessons(tokenizer: Any) -> list[Lesson]:
    """The protocols of the environments that ship, as experts play them."""
    lessons = []
    for name, expert in EXPERTS.items():
        data = load_task(TaskConfig(environment=name), _SEED)
        train, heldout = (
            encode_demonstrations(tokenizer, [expert(p) for p in problems[:most]])
            for problems, most in ((data.train, _TRAINED), (data.heldout, _MEASURED))
        )
        batch = max(1, _BATCH_TOKENS // train[0].shape[1])
        enough, too_much = _WINDOWS[name]
        lessons.append(Lesson(name=name, train=train, heldout=heldout, enough=enough, too_much=too_much, batch=batch))
    return lessons


MODELS: Mapping[str, Callable[[Any], list[Lesson]]] = {"tiny": tiny_lessons, "tiny-tools": tools_lessons}
"""The lessons of each model that can be built, by the name that ``model.path`` gives it."""


def main() -> None:
    """Build, supervise, save."""
    parser = argparse.ArgumentParser(prog="python -m learner.warmup.main", description="Build a tiny start model.")
    parser.add_argument("model", choices=sorted(MODELS))
    parser.add_argument("--out", type=Path, required=True, help="folder to write, replaced if it is there")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    tokenizer, model = build_tokenizer(), build_model()
    lessons = MODELS[args.model](tokenizer)
    found = supervise(model, lessons, lambda line: print(line, flush=True))
    save(model, tokenizer, args.out)
    text = ", ".join(f"{lesson.name} {accuracy:.1%}" for lesson, accuracy in zip(lessons, found, strict=True))
    print(f"model {args.model} with held-out accuracy {text} in {args.out}", flush=True)


if __name__ == "__main__":
    run_guarded(main)
