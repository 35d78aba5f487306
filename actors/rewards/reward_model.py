"""A reward model: a Hugging Face sequence classification folder as a function of the verifier form.

    load (once in a child) ─► score(prompts, completions) ─► texts ─► batches ─► logits ─► one number each

One label: its logit. Several: the probability of the last one. Always float32.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from actors.scorers.token_batches import token_batches
from async_rl.errors import ConfigError
from async_rl.models import device_for, load_tokenizer

if TYPE_CHECKING:
    import torch

_BATCH_TOKENS = 16_384
"""Most tokens of one forward pass, padding included."""
_NO_LIMIT = 1 << 30
"""Tokenizers without a length limit say a number above this."""

Score = Callable[..., list[float]]


def load(folder: str, device: str, instruction: str, chat: bool) -> Score:
    """Load the model; called once in the life of a child process.

    Args:
        folder: model and tokenizer.
        device: as ``model.device``.
        instruction: put before each prompt, as the policy sees it.
        chat: wrap prompt and completion in the folder's own chat template.

    Raises:
        ConfigError: no such model there, or no device for it.
    """
    tokenizer = load_tokenizer(Path(folder))
    if chat and not tokenizer.chat_template:
        raise ConfigError(f"task.chat = true, but the tokenizer of the reward model {folder} has no chat template")
    model = RewardModel(load_classifier(Path(folder)), tokenizer, device_for(device, 0))

    def score(prompts: Sequence[str], completions: Sequence[str]) -> list[float]:
        pairs = zip(prompts, completions, strict=True)
        if not chat:
            return model.score([instruction + prompt + completion for prompt, completion in pairs])
        return model.score([as_chat(tokenizer, instruction + prompt, completion) for prompt, completion in pairs])

    return score


def as_chat(tokenizer: Any, prompt: str, completion: str) -> str:
    """One exchange in the tokenizer's chat template."""
    turns = [{"role": "user", "content": prompt}, {"role": "assistant", "content": completion}]
    text: str = tokenizer.apply_chat_template(turns, tokenize=False)
    return text


def load_classifier(folder: Path) -> Any:
    """The folder's sequence classification model, float32, in evaluation mode.

    Raises:
        ConfigError: none can be loaded, or its weights lack something, such as the head of a language model's folder.
    """
    import torch
    from safetensors import SafetensorError
    from transformers import AutoModelForSequenceClassification, logging

    logging.disable_progress_bar()
    try:
        model, info = AutoModelForSequenceClassification.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True, output_loading_info=True, use_safetensors=True
        )
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{folder}: no sequence classification model can be loaded: {error}") from None
    if info["missing_keys"]:
        raise ConfigError(f"{folder}: the weights lack {sorted(info['missing_keys'])[:5]}; it is no reward model")
    return model.eval()


class RewardModel:
    """A classifier with its tokenizer on a device.

    Texts that are longer than it can read lose their start, so that the answer's end stays; how many did is said on
    stderr, which is in the log of the process that scores.
    """

    def __init__(self, model: Any, tokenizer: Any, device: torch.device) -> None:
        self._model, self._tokenizer, self._device = model.to(device), tokenizer, device
        tokenizer.truncation_side = "left"
        tokenizer.padding_side = "right"
        self._max_length = longest(model.config, tokenizer)
        self.scored = 0
        """Texts so far."""
        self.truncated = 0
        """Those of them that were cut."""

    def score(self, texts: Sequence[str]) -> list[float]:
        """One number per text: the only label's logit, or the last label's probability."""
        ids = [self._encode(text) for text in texts]
        self._say(before=self.truncated - sum(cut for _, cut in ids))
        # a model without a padding token takes the last column for the text's end: each text alone, then
        rows = 1 if self._model.config.pad_token_id is None else len(texts)
        scores = [0.0] * len(texts)
        for batch in token_batches([len(tokens) for tokens, _ in ids], _BATCH_TOKENS, rows):
            for i, value in zip(batch, self._forward([ids[i][0] for i in batch]), strict=True):
                scores[i] = value
        return scores

    def _encode(self, text: str) -> tuple[list[int], bool]:
        tokens = self._tokenizer(text, truncation=False)["input_ids"]
        cut = self._max_length is not None and len(tokens) > self._max_length
        if cut:
            tokens = self._tokenizer(text, truncation=True, max_length=self._max_length)["input_ids"]
        self.scored, self.truncated = self.scored + 1, self.truncated + cut
        return tokens, cut

    def _say(self, before: int) -> None:
        """Say it at the first one, and each time that their number has doubled."""
        if self.truncated.bit_length() > before.bit_length():
            print(
                f"reward model: {self.truncated} of {self.scored} texts were longer than {self._max_length} tokens and "
                "lost their start",
                file=sys.stderr,
                flush=True,
            )

    def _forward(self, rows: list[list[int]]) -> list[float]:
        import torch

        lengths = torch.tensor([len(row) for row in rows])
        longest_row = int(lengths.max())
        inputs = torch.full((len(rows), longest_row), self._model.config.pad_token_id or 0)
        for i, row in enumerate(rows):
            inputs[i, : len(row)] = torch.tensor(row)
        mask = (torch.arange(longest_row)[None] < lengths[:, None]).long()
        with torch.no_grad():
            logits = self._model(input_ids=inputs.to(self._device), attention_mask=mask.to(self._device)).logits.float()
        values = logits[:, 0] if logits.shape[1] == 1 else logits.softmax(-1)[:, -1]
        return values.tolist()  # type: ignore[no-any-return]


def longest(config: Any, tokenizer: Any) -> int | None:
    """Most tokens that model and tokenizer take; ``None``: neither says."""
    said = (getattr(config, "max_position_embeddings", None), tokenizer.model_max_length)
    return min((int(n) for n in said if n is not None and n < _NO_LIMIT), default=None)
