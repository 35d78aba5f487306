#!/usr/bin/env bash
# Sets up .venv if needed (with vLLM's CPU build) and runs the tests. Arguments go to pytest, e.g. -m "not real and not vllm"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev vllm

# One thread per process: the tests start many processes on few cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
exec .venv/bin/python -m pytest "$@"
