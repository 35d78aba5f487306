"""TRL's side of scripts/compare_trl.py and bench_trl.py: its stock ``GRPOTrainer``; runs in TRL's environment.

    trl_side.py train    PLAN.json ROWS      whole training: a row (JSON) at the start and at each evaluation
    trl_side.py learner  PLAN.json           its forward and backward of a given batch, once for each line of stdin
    trl_side.py memory   PLAN.json           peak memory of one of them, in bytes

Of this project it imports the reward alone. ``train`` keeps two pairs of clocks: of the whole command, and of training
alone, without imports, model loading and evaluation.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from pathlib import Path
from typing import Any

os.environ |= {"HF_HUB_OFFLINE": "1", "WANDB_DISABLED": "true"}  # read when transformers is imported
import torch
from datasets import Dataset
from safetensors.torch import save_file
from sums_reward import reward
from torch.nn.utils.rnn import pad_sequence
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, TrainerCallback
from trl import GRPOConfig, GRPOTrainer

_WARMUP = 2
"""Passes that are not counted."""


def main() -> None:
    """Do what the first argument says."""
    torch.set_num_threads(1)
    what, plan = sys.argv[1], json.loads(Path(sys.argv[2]).read_text())
    if what == "train":
        train(plan, Path(sys.argv[3]))
    elif what == "learner":
        serve(plan)
    else:
        measure_memory(plan)


# -- the whole training


class Clock(TrainerCallback):
    """Evaluates every few steps, with the training's clocks stopped, and ends the training at the target."""

    def __init__(self, plan: dict[str, Any], tokenizer: Any, rows: Path) -> None:
        self._plan, self._tokenizer, self._rows = plan, tokenizer, rows
        self._prompts = torch.tensor(
            [tokenizer(p["prompt"], add_special_tokens=False)["input_ids"] for p in plan["heldout"]]
        )
        self._spent: tuple[float, ...] = (0.0, 0.0)
        self._since = now()
        self._accuracies: list[float] = []

    def on_train_begin(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Note what the start took."""
        self._write(0, evaluate(model, self._tokenizer, self._prompts, self._plan), start_cpu_s=now()[1])
        self._since = now()

    def on_step_end(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        """Stop the clocks, evaluate if it is time, go on."""
        self._spent = tuple(
            spent + at - since for spent, at, since in zip(self._spent, now(), self._since, strict=True)
        )
        if state.global_step % self._plan["eval_every"] == 0:
            self._write(state.global_step, evaluate(model, self._tokenizer, self._prompts, self._plan))
            last = self._accuracies[-self._plan["evaluations"] :]
            mean = round(sum(last) / len(last), 9)
            if len(last) == self._plan["evaluations"] and mean >= self._plan["target"]:
                control.should_training_stop = True
        self._since = now()

    def _write(self, step: int, accuracy: float, **more: float) -> None:
        self._accuracies.append(accuracy)
        row = {"step": step, "wall_s": self._spent[0], "cpu_s": self._spent[1], "accuracy": accuracy, **more}
        row |= {"whole_wall_s": time.time() - self._plan["began"], "whole_cpu_s": now()[1]}
        with self._rows.open("a") as file:
            file.write(json.dumps(row) + "\n")


def train(plan: dict[str, Any], rows: Path) -> None:
    """GRPO until the target or the last step."""
    tokenizer, problems = load_tokenizer(plan["model"]), list(plan["train"])
    random.Random(plan["seed"]).shuffle(problems)
    end = tokenizer.eos_token_id

    def rewards(completion_ids: list[list[int]], answer: list[str], **_: Any) -> list[float]:
        found = []
        for ids, right in zip(completion_ids, answer, strict=True):
            said = ids[: ids.index(end)] if end in ids else ids
            found.append(reward(tokenizer.decode(said), right, end in ids))
        return found

    trainer = GRPOTrainer(
        model=load_model(plan["model"]),
        reward_funcs=rewards,
        args=settings(plan, plan["groups"] * plan["group_size"]),
        train_dataset=Dataset.from_list(problems),
        processing_class=tokenizer,
        callbacks=[Clock(plan, tokenizer, rows)],
    )
    trainer.train()


@torch.no_grad()
def evaluate(model: Any, tokenizer: Any, prompts: torch.Tensor, plan: dict[str, Any]) -> float:
    """Share of the held-out problems that a greedy answer solves; one batch, since all prompts have the same length."""
    longest = max(len(p["answer"]) for p in plan["heldout"]) + 1
    cache, inputs, said = None, prompts, []
    for _ in range(longest):
        output = model(input_ids=inputs, past_key_values=cache, use_cache=True)
        cache, inputs = output.past_key_values, output.logits[:, -1].argmax(-1, keepdim=True)
        said.append(inputs)
    right = 0
    for ids, problem in zip(torch.cat(said, 1).tolist(), plan["heldout"], strict=True):
        ended = tokenizer.eos_token_id in ids
        text = tokenizer.decode(ids[: ids.index(tokenizer.eos_token_id)] if ended else ids)
        right += ended and text == problem["answer"]
    return right / len(plan["heldout"])


# -- forward and backward alone


class Given(GRPOTrainer):
    """Trains on a batch that it is given instead of generating one."""

    given: dict[str, Any]

    def _generate_and_score_completions(self, inputs: Any) -> dict[str, Any]:
        return dict(self.given)


def make_pass(plan: dict[str, Any]) -> tuple[Any, Any]:
    """A function that makes TRL's forward and backward, and the model that gets the gradients."""
    tokenizer, model = load_tokenizer(plan["model"]), load_model(plan["model"])
    batch = json.loads(Path(plan["batch"]).read_text())
    trainer = Given(
        model=model,
        reward_funcs=lambda completions, **_: [0.0] * len(completions),
        args=settings(plan, len(batch["prompts"])),
        train_dataset=Dataset.from_list([{"prompt": "1"}] * len(batch["prompts"])),
        processing_class=tokenizer,
    )
    trainer.given = padded(batch, tokenizer.pad_token_id)
    trainer.current_gradient_accumulation_steps = 1

    def run() -> None:
        model.zero_grad()
        trainer.training_step(model, {}, None)

    return run, model


def padded(batch: dict[str, Any], pad: int) -> dict[str, Any]:
    """What TRL's generation hands to its loss: prompts padded on the left, completions on the right."""

    def rows(name: str, side: str) -> tuple[torch.Tensor, torch.Tensor]:
        parts = [torch.tensor(ids) for ids in batch[name]]
        ids = pad_sequence(parts, batch_first=True, padding_value=pad, padding_side=side)
        return ids, pad_sequence([torch.ones_like(p) for p in parts], batch_first=True, padding_side=side)

    prompt_ids, prompt_mask = rows("prompts", "left")
    completion_ids, completion_mask = rows("completions", "right")
    return {
        "prompt_ids": prompt_ids,
        "prompt_mask": prompt_mask,
        "completion_ids": completion_ids,
        "completion_mask": completion_mask,
        "advantages": torch.tensor(batch["advantages"]),
        "num_items_in_batch": completion_mask.sum(),
    }


def serve(plan: dict[str, Any]) -> None:
    """Leave the gradients in a file, say ready, then make and time a pass for each line."""
    run, model = make_pass(plan)
    for _ in range(_WARMUP):
        run()
    save_file({name: p.grad for name, p in model.named_parameters() if p.grad is not None}, plan["gradients"])
    answer({"ready": True})
    for _ in sys.stdin:
        wall, cpu = now()
        run()
        answer({"wall_s": now()[0] - wall, "cpu_s": now()[1] - cpu})


def measure_memory(plan: dict[str, Any]) -> None:
    """Print the most memory of one pass above what the loaded model and trainer have."""
    run, _ = make_pass(plan)
    before = status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts again at what is resident now
    run()
    answer({"bytes": status("VmHWM") - before})


# -- shared


def settings(plan: dict[str, Any], batch: int) -> GRPOConfig:
    """TRL's defaults but for what the comparison fixes; one update a batch."""
    return GRPOConfig(
        output_dir=plan["scratch"],
        per_device_train_batch_size=batch,
        steps_per_generation=1,
        gradient_accumulation_steps=1,
        num_generations=plan["group_size"],
        max_completion_length=plan["max_new"],
        learning_rate=plan["lr"],
        lr_scheduler_type="constant",
        max_steps=plan["steps"],
        seed=plan["seed"],
        temperature=1.0,
        bf16=False,
        fp16=False,
        gradient_checkpointing=False,
        use_cpu=True,
        logging_steps=10**9,
        report_to=[],
        save_strategy="no",
        disable_tqdm=True,
    )


def load_tokenizer(folder: str) -> Any:
    """The folder's; by its own file where transformers' class for the model would lose text."""
    tokenizer = AutoTokenizer.from_pretrained(folder)
    text = "12+34="
    if tokenizer.decode(tokenizer(text, add_special_tokens=False)["input_ids"]) != text:
        tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    return tokenizer


def load_model(folder: str) -> Any:
    """In float32."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, use_safetensors=True)


def now() -> tuple[float, float]:
    """Wall-clock and CPU seconds of this process."""
    return time.perf_counter(), time.process_time()


def status(name: str) -> int:
    """Bytes of a line of /proc/self/status."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith(f"{name}:"))


def answer(message: dict[str, Any]) -> None:
    """A line that begins with a mark: trainers print, too."""
    print(f"@{json.dumps(message)}", flush=True)


if __name__ == "__main__":
    main()
