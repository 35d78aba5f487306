"""What vLLM is started with: our settings, its configuration, and the environment that it reads."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from async_rl.config import LoraConfig

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker in one process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_ENVIRONMENT: Mapping[str, str] = {"TORCHDYNAMO_DISABLE": "1"}  # no C++ compiler at run time
DEFAULTS: Mapping[str, str] = {"VLLM_LOGGING_LEVEL": "ERROR"}
CPU_DEFAULTS: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}

_ALONE, _SHARED = 0.9, 0.7
"""Share of a GPU that vLLM takes. One that takes turns with a learner leaves room for its CUDA context, and for what it
holds while both start."""

ADAPTER_ID = 1
"""By which vLLM and its requests know the adapter: there is one, of which versions follow each other."""
_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""vLLM makes slots of these ranks; an adapter may have a lower one than its slot."""

_SEGMENT = ("async_rl", "actors.engines.vllm_worker.WorkerExtension")
_BROADCAST = ("async_rl_broadcast", "actors.engines.vllm_broadcast.BroadcastExtension")
"""Weight-transfer backend, and the class in whose module it is registered."""

_LONGEST_BASE = 107 - len("/async_rl-vllm-12345678/") - 36
"""vLLM names its sockets by a UUID of 36 characters."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """What vLLM is started with."""

    model_path: str
    dtype: str
    max_num_seqs: int
    """Sequences decoded at the same time."""
    context: int
    """Longest prompt plus completion, in tokens."""
    seed: int
    recompute: bool
    """Recompute the KV of running requests when weights change."""
    sleep_mode: bool
    """Allocate weights and KV cache so that they can be given back (CUDA; the CPU build gives nothing back)."""
    lora: LoraConfig | None = None
    """Of the adapter that versions bring; the base is read from the model's folder then."""
    broadcast: bool = False
    """Whether its workers can take part in broadcasts of versions."""

    @property
    def sleep_level(self) -> int:
        """vLLM's: 0 only pauses, 1 keeps the weights on the host, 2 drops what the next version brings."""
        if not self.sleep_mode:
            return 0
        return 2 if self.lora is None else 1


def vllm_config(settings: Settings) -> Any:
    """Configure vLLM for these settings, on the platform that it was built for."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    if cpu:
        os.environ.update(CPU_ENVIRONMENT)
        for key, value in CPU_DEFAULTS.items():
            os.environ.setdefault(key, value)
    backend, extension = _BROADCAST if settings.broadcast else _SEGMENT
    config = AsyncEngineArgs(
        model=settings.model_path,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.context,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(2048 if cpu else 8192, settings.context, settings.max_num_seqs),
        skip_tokenizer_init=True,  # tokens in, tokens out
        generation_config="vllm",  # nothing that the model's folder says changes how we sample
        load_format="dummy" if settings.lora is None else "auto",  # version 0 is loaded and proven before all requests
        **(adapter_arguments(settings.lora) if settings.lora is not None else {}),
        enforce_eager=cpu,
        enable_sleep_mode=settings.sleep_mode and not cpu,
        gpu_memory_utilization=_SHARED if settings.sleep_mode else _ALONE,
        enable_prefix_caching=False,  # nothing that older weights computed is reused
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled, temperature included
        weight_transfer_config=WeightTransferConfig(backend=backend),
        worker_extension_cls=extension,
    ).create_engine_config()
    if cpu:
        _check_heads(config.model_config.get_head_size())
        config.cache_config.kv_cache_memory_bytes = _kv_cache_bytes(config, settings)
    return config


def adapter_arguments(lora: LoraConfig) -> dict[str, Any]:
    """What vLLM is told of an adapter: one slot, in the target layers only."""
    return {
        "enable_lora": True,
        "max_loras": 1,
        "max_lora_rank": next(rank for rank in _RANKS if rank >= lora.rank),
        # vLLM knows layers by their last name alone; of those that a longer target leaves out the slots stay 0
        "lora_target_modules": list(dict.fromkeys(target.rpartition(".")[2] for target in lora.targets)),
    }


def adapter_request(settings: Settings) -> Any:
    """What each request carries, so that it is decoded with the adapter; None without one."""
    if settings.lora is None:
        return None
    from vllm.lora.request import LoRARequest

    return LoRARequest("adapter", ADAPTER_ID, "/published")  # a path must be there; nothing is read from it


def _check_heads(size: int) -> None:
    """Say at the start what vLLM would only find out, and die of, at the first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise ValueError(f"the model's attention heads have size {size}, vLLM's CPU build supports {supported}")


def _kv_cache_bytes(config: Any, settings: Settings) -> int:
    """Bytes of KV for all sequences at full length, in a quarter of free memory; vLLM queues what is beyond."""
    model, parallel, block = config.model_config, config.parallel_config, config.cache_config.block_size
    token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    sequence = int(-(-settings.context // block) * block * token * model.dtype.itemsize)
    spare = int(block * token * model.dtype.itemsize)
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return max(sequence + spare, min(settings.max_num_seqs * sequence + spare, free // 4))


def temporary_folder() -> tempfile.TemporaryDirectory[str]:
    """Make a folder for vLLM's sockets (paths of at most 107 characters); in ``/tmp`` if others are too deep."""
    base = tempfile.gettempdir()
    parent = base if len(base) <= _LONGEST_BASE else "/tmp"
    return tempfile.TemporaryDirectory(prefix="async_rl-vllm-", dir=parent, ignore_cleanup_errors=True)


@contextlib.contextmanager
def environment(folder: str) -> Iterator[None]:
    """Set vLLM's environment for a block; what vLLM adds (preloaded libraries) does not reach our other children.

    Args:
        folder: for its sockets and files, which it leaves behind.
    """
    saved = dict(os.environ)
    os.environ.update(ENVIRONMENT, VLLM_RPC_BASE_PATH=folder, TMPDIR=folder)
    for key, value in DEFAULTS.items():
        os.environ.setdefault(key, value)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(saved)
