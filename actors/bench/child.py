r"""One engine of the benchmark in a process of its own, on one core, that decodes its load each time it is told to.

    stdin   RUN\n ...                           numbers of runs; its end ends the process
    stdout  {"error": ...}\n {"tokens": ...}\n  when it is ready, then one object a run

``python -m actors.bench.child SIDE CASE --model DIR --slots N --sequences N``
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import get_args

import torch

from actors.bench.load import CaseName, Side, make_load
from actors.bench.sides import make_side, worst_error
from async_rl.process import cpu_seconds, die_with_parent, run_guarded

_CHECKED = 32
"""Requests whose log-probabilities are held against a plain forward before anything is measured."""


def main() -> None:
    """Be ready, then decode the load once a line."""
    parser = argparse.ArgumentParser(prog="python -m actors.bench.child")
    parser.add_argument("side", choices=get_args(Side))
    parser.add_argument("case", choices=get_args(CaseName))
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--slots", type=int, required=True)
    parser.add_argument("--sequences", type=int, required=True)
    args = parser.parse_args()
    die_with_parent()
    torch.set_num_threads(1)
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)  # what libraries print goes to stderr
    load = make_load(args.case, args.model, args.sequences)
    run = make_side(args.side, args.model, load, args.slots)
    few = load.requests[:_CHECKED]
    error = worst_error(args.model, few, run(few))
    core = max(os.sched_getaffinity(0))
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), {core})
    limits = [request.max_new_tokens for request in load.requests]
    facts = {"sequences": sum(request.num_samples for request in load.requests), "longest": max(limits)}
    print(json.dumps({"error": error, **facts, "mean": sum(limits) / len(limits)}), file=answers)
    for line in sys.stdin:
        requests = load.seeded(int(line))
        began, cpu = time.perf_counter(), cpu_seconds()
        sampled = list(run(requests))
        cpu_s, wall_s = cpu_seconds() - cpu, time.perf_counter() - began
        tokens = sum(len(sample.tokens) for sample in sampled)
        print(json.dumps({"tokens": tokens, "wall_s": wall_s, "cpu_s": cpu_s}), file=answers)


if __name__ == "__main__":
    run_guarded(main)
