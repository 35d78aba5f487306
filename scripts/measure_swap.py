"""How long an engine stands still for a new version of the weights, while it generates.

random model ──Publisher──► /dev/shm slots 0, 1 in turn ──► engine.load_weights ──► pause_s, load_s per swap

python scripts/measure_swap.py --engine vllm --hidden 768 --layers 12 --swaps 20
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from pathlib import Path

import torch
from transformers import Qwen2Config, Qwen2ForCausalLM

from actors.engines.base import Engine, Request
from actors.engines.factory import make_engine
from async_rl.config import parse_config
from async_rl.weights.segment import SegmentReader
from learner.publisher import Publisher

PROMPT, NEW = tuple(range(1, 17)), 200


def main() -> None:
    """Swap versions under load and print medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("vllm", "torch"), default="vllm")
    parser.add_argument("--hidden", type=int, default=128, help="hidden size; a head has 64 of it")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--vocab", type=int, default=512)
    parser.add_argument("--slots", type=int, default=16, help="sequences that are decoded meanwhile")
    parser.add_argument("--swaps", type=int, default=20)
    parser.add_argument("--kv-cache", choices=("keep", "recompute"), default="keep")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        model = random_model(arguments.hidden, arguments.layers, arguments.vocab)
        model.save_pretrained(folder)
        config = parse_config(
            {"actors": {"engine": arguments.engine, "slots": arguments.slots, "kv_cache": arguments.kv_cache}}
        )
        engine = make_engine(config, Path(folder), "measured")
        layout, flat = flatten(model)
        publisher = Publisher(f"measure-{os.getpid()}", layout, config.weights.chunk_bytes)
        try:
            measure(engine, publisher, flat, arguments.swaps, arguments.slots)
        finally:
            publisher.close()
            engine.close()


def random_model(hidden: int, layers: int, vocab: int) -> Qwen2ForCausalLM:
    """A Qwen2 that generates nonsense for as long as it is asked to."""
    return Qwen2ForCausalLM(
        Qwen2Config(
            hidden_size=hidden,
            intermediate_size=hidden * 4,
            num_hidden_layers=layers,
            num_attention_heads=hidden // 64,
            num_key_value_heads=max(1, hidden // 256),
            vocab_size=vocab,
            max_position_embeddings=len(PROMPT) + NEW,
            eos_token_id=vocab - 1,
            tie_word_embeddings=True,
        )
    )


def flatten(model: Qwen2ForCausalLM) -> tuple[list[tuple[str, tuple[int, ...], int, int]], torch.Tensor]:
    """Layout and flat vector [num_flat] as the learner has them."""
    layout, first = [], 0
    for name, parameter in model.named_parameters():
        layout.append((name, tuple(parameter.shape), first, parameter.numel()))
        first += parameter.numel()
    return layout, torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def request(serial: int) -> Request:
    """One long sample."""
    return Request(id=serial, prompt=PROMPT, num_samples=1, seed=(serial,), max_new_tokens=NEW, temperature=1.0)


def measure(engine: Engine, publisher: Publisher, flat: torch.Tensor, swaps: int, slots: int) -> None:
    """Publish and load versions while ``slots`` sequences are decoded."""
    reader, load_s, pause_s, serial = SegmentReader(), [], [], 0
    began = time.perf_counter()
    for version in range(swaps + 1):
        manifest = publisher.publish(flat, version, evaluated=False)
        data = reader.open(manifest)
        manifest.verify(data)
        before = time.perf_counter()
        engine.load_weights(manifest, data)
        load_s.append(time.perf_counter() - before)
        pause_s.append(engine.last_pause_s)
        flat *= 0.999
        until = time.perf_counter() + 0.3
        while time.perf_counter() < until:
            if engine.num_running < slots:
                engine.submit([request(serial)])
                serial += 1
            engine.step(0.01)
    wall_s = time.perf_counter() - began
    for name, values in (("load_weights", load_s[1:]), ("pause", pause_s[1:])):
        print(
            f"{name}: median {statistics.median(values) * 1e3:.1f} ms, most {max(values) * 1e3:.1f} ms, "
            f"share of the time {sum(values) / wall_s:.1%}"
        )
    print(f"{manifest.nbytes / 2**20:.0f} MiB, {swaps} swaps in {wall_s:.1f} s")


if __name__ == "__main__":
    main()
