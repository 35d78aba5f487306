#!/usr/bin/env bash
# Sets up .venv if needed (with vLLM's CPU build) and runs the tests: first, two at a time, those that start no processes
# and those with vLLM; then the other real ones, which need the machine for themselves. With arguments pytest runs once,
# with them, e.g. -m "not real and not vllm"
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh dev vllm

# One thread per process: the tests start many processes on few cores.
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false HF_HUB_OFFLINE=1
if [ $# -gt 0 ]; then exec .venv/bin/python -m pytest "$@"; fi
failed=0
.venv/bin/python -m pytest -n 2 --dist worksteal -m "vllm or not real" || failed=1
.venv/bin/python -m pytest -m "real and not vllm" || failed=1
exit "$failed"
