"""How a causal language model gets its weights: a short way for plain float32 files, transformers' way for others.

config ─► empty_model ─► read_plain: model.safetensors, name by name ─► model
                              └─ None: not so plain ─► read_any: AutoModelForCausalLM.from_pretrained ─► model
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from async_rl.errors import ConfigError

if TYPE_CHECKING:
    import torch


def empty_model(config: Any, dtype: torch.dtype, device: torch.device) -> torch.nn.Module:
    """A model of a configuration whose parameters have the values that their memory has; buffers are computed."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.initialization import no_init_weights

    with device, torch.no_grad(), no_init_weights():
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
    model.tie_weights()
    return model.eval()


def read_plain(path: Path, config: Any, dtype: torch.dtype) -> torch.nn.Module | None:
    """A float32 model whose one file holds just the tensors of its code, under their names; None: something else.

    transformers builds a model on the device ``meta`` before it reads one, whose arithmetic imports torch's compiler.
    """
    import torch
    from safetensors import safe_open
    from transformers import GenerationConfig

    file = path / "model.safetensors"
    if dtype != torch.float32 or not file.is_file() or getattr(config, "quantization_config", None) is not None:
        return None
    model: Any = empty_model(config, dtype, torch.device("cpu"))
    names = model.state_dict(keep_vars=True)
    with safe_open(file, "pt") as tensors:
        shapes = {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
        read = {id(names[name]) for name in shapes if name in names}
        if any(id(tensor) not in read for tensor in names.values()) or any(
            name not in names or list(names[name].shape) != shape for name, shape in shapes.items()
        ):
            return None
        with torch.no_grad():
            for name in shapes:
                names[name].copy_(tensors.get_tensor(name))
    if (path / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
    return model  # type: ignore[no-any-return]


def read_any(path: Path, dtype: torch.dtype) -> torch.nn.Module:
    """Whatever transformers can read.

    Raises:
        ConfigError: tensors are missing.
    """
    from transformers import AutoModelForCausalLM

    model, info = AutoModelForCausalLM.from_pretrained(
        path,
        dtype=dtype,
        attn_implementation="sdpa",
        local_files_only=True,
        output_loading_info=True,
        use_safetensors=True,
    )
    if info["missing_keys"]:
        raise ConfigError(f"{path}: the weights lack {sorted(info['missing_keys'])[:5]}; save all of them")
    return model  # type: ignore[no-any-return]
