"""Build the tiny model of preset ``arithmetic``: 0.6M parameters, Qwen2, right on about half of the two-digit sums.

    python -m learner.warmup --out DIR

    random weights ──supervised on training sums──► held-out greedy accuracy ≥ 0.45 ──► Hugging Face folder DIR

Reinforcement learning needs a model that is right sometimes. Held-out problems are only measured here, never trained.
"""

from __future__ import annotations

import argparse
import os
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from async_rl.config import TaskConfig
from async_rl.errors import AsyncRLError
from async_rl.process import run_guarded
from async_rl.tasks import Problem, load_task
from async_rl.tasks.prompt import encode_prompt

PAD, BOS, EOS, UNK = 0, 1, 2, 3
VOCAB_SIZE = 128
ENOUGH, TOO_MUCH = 0.45, 0.58
"""The accuracy to stop at, and the one that must not be passed: the rest is left to learn."""

_SEED = 0
_BATCH = 64
_LR = 1e-3
_EVAL_EVERY = 10
_MAX_STEPS = 4_000
_IGNORE = -100


def build_tokenizer() -> Any:
    """Make a character tokenizer: the id of a character is its ASCII code, and codes 0 to 3 are pad, bos, eos, unk."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = {"<pad>": PAD, "<bos>": BOS, "<eos>": EOS, "<unk>": UNK}
    vocab = special | {chr(code): code for code in range(len(special), VOCAB_SIZE)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
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


def encode_problems(tokenizer: Any, problems: Sequence[Problem], task: TaskConfig) -> tuple[Tensor, Tensor]:
    """Encode prompts with their right answers and the end token.

    Returns:
        ``(inputs, targets)``, both int64 [num_problems, length], padded on the right; ``targets`` are shifted by one
        and hold -100 except where the answer or the end token is to be predicted.
    """
    rows = []
    for problem in problems:
        prompt = encode_prompt(tokenizer, problem, task)
        rows.append((len(prompt), [*prompt, *tokenizer(problem.columns["answer"])["input_ids"], EOS]))
    length = max(len(ids) for _, ids in rows)
    inputs = torch.full((len(rows), length - 1), PAD)
    targets = torch.full((len(rows), length - 1), _IGNORE)
    for i, (num_prompt, ids) in enumerate(rows):
        inputs[i, : len(ids) - 1] = torch.tensor(ids[:-1])
        targets[i, num_prompt - 1 : len(ids) - 1] = torch.tensor(ids[num_prompt:])
    return inputs, targets


@torch.no_grad()
def greedy_accuracy(model: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Share of rows that greedy decoding answers exactly.

    One forward pass is enough: greedy decoding gives the right answer if and only if, along the right answer, each next
    token is the most likely one.
    """
    predicted = model(input_ids=inputs).logits.argmax(-1)
    return float(((predicted == targets) | (targets == _IGNORE)).all(1).float().mean())


def supervise(
    model: nn.Module, train: tuple[Tensor, Tensor], heldout: tuple[Tensor, Tensor], say: Callable[[str], None]
) -> float:
    """Train on right answers until the held-out accuracy is enough; returns that accuracy.

    Raises:
        AsyncRLError: the accuracy did not reach its window.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=_LR, weight_decay=0.01, foreach=True)
    start, before = time.monotonic(), _snapshot(model)
    for step in range(1, _MAX_STEPS + 1):
        loss = _step(model, optimizer, *train)
        if step % _EVAL_EVERY:
            continue
        accuracy = greedy_accuracy(model, *heldout)
        if accuracy >= TOO_MUCH:
            accuracy = step_back(model, before, heldout)
        before = _snapshot(model)
        if accuracy >= ENOUGH or step % (10 * _EVAL_EVERY) == 0:
            say(f"step {step:4d}  loss {loss:.3f}  held-out {accuracy:.3f}  {time.monotonic() - start:.1f} s")
        if ENOUGH <= accuracy < TOO_MUCH:
            return accuracy
    raise AsyncRLError(f"the tiny model has {accuracy:.3f} held-out accuracy after {step} steps, not {ENOUGH} or more")


def step_back(model: nn.Module, before: list[Tensor], heldout: tuple[Tensor, Tensor]) -> float:
    """Bisect the line from ``before`` to the present weights for a point in the window; returns its accuracy.

    A few updates can carry the model across the whole window; how many depends on the processor's rounding.
    """
    after, low, high = _snapshot(model), 0.0, 1.0
    for _ in range(12):
        middle = (low + high) / 2
        with torch.no_grad():
            for parameter, a, b in zip(model.parameters(), before, after, strict=True):
                parameter.copy_(torch.lerp(a, b, middle))
        accuracy = greedy_accuracy(model, *heldout)
        if ENOUGH <= accuracy < TOO_MUCH:
            break
        low, high = (low, middle) if accuracy >= TOO_MUCH else (middle, high)
    return accuracy


def _step(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: Tensor, targets: Tensor) -> float:
    rows = torch.randint(len(inputs), (_BATCH,))
    logits = model(input_ids=inputs[rows]).logits
    loss = nn.functional.cross_entropy(logits.flatten(0, 1), targets[rows].flatten(), ignore_index=_IGNORE)
    optimizer.zero_grad()
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return loss.item()


def _snapshot(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


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


def main() -> None:
    """Build, supervise, save."""
    parser = argparse.ArgumentParser(prog="python -m learner.warmup", description="Build the tiny arithmetic model.")
    parser.add_argument("--out", type=Path, required=True, help="folder to write, replaced if it is there")
    out = parser.parse_args().out
    torch.set_num_threads(1)
    torch.manual_seed(_SEED)
    task = TaskConfig(name="addition", digits=2)
    data, tokenizer, model = load_task(task, _SEED), build_tokenizer(), build_model()
    train, heldout = (encode_problems(tokenizer, problems, task) for problems in (data.train, data.heldout))
    accuracy = supervise(model, train, heldout, lambda line: print(line, flush=True))
    save(model, tokenizer, out)
    print(f"tiny model with {accuracy:.1%} held-out accuracy in {out}", flush=True)


if __name__ == "__main__":
    run_guarded(main)
