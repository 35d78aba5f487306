"""Hugging Face model folders: where they are, what they stop at, and how both sides load and run them.

    NAME | DIR ──resolve_model──► folder ──load_causal_lm──► nn.Module ──last_hidden──► output embeddings

The names are ``tiny``, ``tiny-tools`` (both built here) and ``smollm2`` (fetched).

Engine and learner compute logits only where they are needed, from the last hidden states; :func:`check_head` proves
that this gives the model's own logits. torch and transformers are imported on use: the command line starts fast.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.errors import ConfigError
from async_rl.lean import import_transformers
from async_rl.model_reading import empty_model, read_any, read_plain

if TYPE_CHECKING:
    import torch

BUILT = ("tiny", "tiny-tools")
"""Models that ``learner.warmup.main`` builds."""
_MADE_BY = {
    "tiny": "async-rl run arithmetic",
    "tiny-tools": "async-rl run calculator",
    "smollm2": "async-rl fetch smollm2",
}
"""The short names that ``model.path`` knows, and the command that puts each into the cache."""
SHORT_NAMES = tuple(_MADE_BY)
_CACHED_AS = {"tiny": "tiny-192x2-bytes", "tiny-tools": "tiny-tools-192x2", "smollm2": "smollm2"}
"""Folder of each in the cache; a model that is built otherwise gets another name, lest an old one is taken for it."""
_LOGIT_TRANSFORMS = ("final_logit_softcapping", "logit_scale", "logits_scaling")
"""Config keys of architectures that change the logits after the output embeddings."""


def cache_dir() -> Path:
    """Folder of models that this package builds or fetches: ``$ASYNC_RL_CACHE``, else ``~/.cache/async_rl``."""
    return Path(os.environ.get("ASYNC_RL_CACHE") or Path.home() / ".cache" / "async_rl")


def cached_model(name: str) -> Path:
    """Where the cache has (or will have) the model of a short name."""
    return cache_dir() / _CACHED_AS[name]


def resolve_model(path: str, setting: str = "model.path") -> Path:
    """The folder that a model setting means.

    Args:
        path: its value.
        setting: its name, for the message.

    Raises:
        ConfigError: nothing is there; says what would put it there or what is expected.
    """
    if path in _MADE_BY:
        folder = cached_model(path)
        if not (folder / "config.json").is_file():
            raise ConfigError(f"{setting} = {path!r}: {folder} does not exist yet; `{_MADE_BY[path]}` makes it")
        return folder
    folder = Path(path).expanduser()
    if not (folder / "config.json").is_file():
        raise ConfigError(
            f"{setting} = {path!r}: {folder}/config.json does not exist; expected a Hugging Face model folder "
            "(config.json, *.safetensors, tokenizer.json), 'tiny', 'tiny-tools' or 'smollm2'"
        )
    return folder


def stop_token_ids(path: Path) -> tuple[int, ...]:
    """End-of-sequence ids of ``generation_config.json``, else of ``config.json``.

    Raises:
        ConfigError: neither file names one, so that no completion would ever stop.
    """
    for name in ("generation_config.json", "config.json"):
        eos = _read_json(path / name).get("eos_token_id") if (path / name).is_file() else None
        if eos is not None and eos != []:
            return tuple(int(i) for i in eos) if isinstance(eos, list) else (int(eos),)
    raise ConfigError(f"{path}: neither generation_config.json nor config.json has an eos_token_id; add one")


def context_length(path: Path) -> int:
    """Most tokens of a sequence: the trained positions, cut to the sliding window where layers have one.

    Inside the window a sliding layer sees everything, so that full attention is exact.

    Raises:
        ConfigError: ``config.json`` does not say, or a layer keeps a state that is no KV cache.
    """
    config = _read_json(path / "config.json")
    length = config.get("max_position_embeddings", config.get("n_positions"))
    if not isinstance(length, int) or length < 1:
        raise ConfigError(f"{path}/config.json: max_position_embeddings = {length!r}; expected a positive integer")
    layers = set(config.get("layer_types") or ["full_attention"])
    if layers - {"full_attention", "sliding_attention"}:
        raise ConfigError(f"{path}/config.json: layer_types {sorted(layers)}: the torch engine decodes attention only")
    slides = "sliding_attention" in layers or ("layer_types" not in config and config.get("use_sliding_window", True))
    window = config.get("sliding_window")
    return min(length, int(window)) if slides and window else length


def vocabulary_size(path: Path) -> int:
    """Number of token ids of the model.

    Raises:
        ConfigError: ``config.json`` does not say.
    """
    size = _read_json(path / "config.json").get("vocab_size")
    if not isinstance(size, int) or size < 2:
        raise ConfigError(f"{path}/config.json: vocab_size = {size!r}; expected an integer above 1")
    return size


def device_for(config_device: str, local_rank: int, local_processes: int = 1) -> torch.device:
    """Device of process ``local_rank`` (from 0) of the ``local_processes`` that share this host.

    ``auto`` decides for all of them alike: CUDA where each has its own device, else the CPU.

    Raises:
        ConfigError: ``cuda`` was asked for, but there is no device for this process.
    """
    import torch

    if config_device == "cpu":
        return torch.device("cpu")
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if count >= max(local_rank + 1, local_processes):
        return torch.device("cuda", local_rank)
    if config_device == "cuda":
        raise ConfigError(
            f"model.device = 'cuda': local rank {local_rank} of {max(local_rank + 1, local_processes)} processes, but "
            f"{count} CUDA devices are visible; start fewer processes here, check CUDA_VISIBLE_DEVICES and the driver, "
            "or set model.device = 'cpu'"
        )
    return torch.device("cpu")


def load_tokenizer(path: Path) -> Any:
    """The folder's tokenizer, by the class that transformers picks for the model unless that one loses text.

    transformers may replace what ``tokenizer.json`` says by the scheme of the model's family: in a Qwen2 folder a
    tokenizer that is not byte-level then drops every space, silently.

    Raises:
        ConfigError: there is none, or it cannot be read.
    """
    import_transformers()
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    if not any(path.glob("tokenizer*")):  # transformers would make up an empty one
        raise ConfigError(f"{path}: no tokenizer.json; save the tokenizer with save_pretrained")
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, local_files_only=True)
        if (path / "tokenizer.json").is_file() and not _keeps_text(tokenizer):
            plain = PreTrainedTokenizerFast.from_pretrained(path, local_files_only=True)
            return plain if _keeps_text(plain) else tokenizer
        return tokenizer
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path}: no tokenizer can be loaded: {error}") from None


def _keeps_text(tokenizer: Any) -> bool:
    """Whether words, spaces and digits survive encoding and decoding."""
    text = "a b 1 + 2"
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    decoded: str = tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return decoded.strip() == text


def load_causal_lm(
    path: Path, dtype: str | torch.dtype, device: str | torch.device, weights: bool = True
) -> torch.nn.Module:
    """The folder's causal language model with sdpa attention, in evaluation mode (no dropout).

    Args:
        path: model folder.
        dtype: of the parameters; ``float32`` or ``bfloat16``.
        device: where it goes.
        weights: False leaves the parameters uninitialised, for an engine that is given a version before it samples.

    Raises:
        ConfigError: no causal language model, or the weights are missing or do not fit its config.
    """
    import torch
    from safetensors import SafetensorError

    import_transformers()
    from transformers import AutoConfig, logging

    kind = getattr(torch, dtype) if isinstance(dtype, str) else dtype
    bar = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True)
        if not weights:
            return empty_model(config, kind, torch.device(device))
        if (model := read_plain(path, config, kind)) is None:
            model = read_any(path, kind)
    except (OSError, ValueError, RuntimeError, SafetensorError) as error:
        raise ConfigError(f"{path}: no causal language model can be loaded: {error}") from None
    finally:
        if bar:
            logging.enable_progress_bar()
    return model.to(device).eval()


def last_hidden(model: torch.nn.Module, input_ids: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    """Hidden states [batch, length, hidden] that ``model.get_output_embeddings()`` turns into logits."""
    return model.base_model(input_ids=input_ids, **kwargs).last_hidden_state


def check_head(model: torch.nn.Module) -> None:
    """Check that output embeddings of the last hidden states are the model's logits, on a few tokens.

    Raises:
        ConfigError: the architecture scales or caps its logits, or has no output embeddings.
    """
    import torch

    head = model.get_output_embeddings()
    changed = {k: v for k in _LOGIT_TRANSFORMS if (v := getattr(model.config, k, None)) not in (None, 0, 1)}
    if head is None or model.base_model is model or changed:
        raise ConfigError(
            f"{type(model).__name__} transforms its logits ({changed or 'no output embeddings'}): unsupported"
        )
    ids = torch.arange(1, 9, device=head.weight.device)[None] % head.weight.shape[0]
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits.float()
        logits = head(last_hidden(model, ids, use_cache=False)).float()
    delta = (logits - expected).abs().max().item()
    scale = expected.abs().max().item()
    if not delta <= (1e-4 if head.weight.dtype == torch.float32 else 2e-2) * max(scale, 1.0):
        raise ConfigError(
            f"{type(model).__name__}: logits differ by {delta:.2e} from output embeddings of the last hidden states: "
            "the architecture transforms its logits and is not supported"
        )


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from None
    if not isinstance(content, dict):
        raise ConfigError(f"{file}: expected a JSON object")
    return content
