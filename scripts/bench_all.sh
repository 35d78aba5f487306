#!/usr/bin/env bash
# All figures of docs/performance.md once more, one benchmark after the other, and its table written anew: about an hour
# on an otherwise idle machine. A benchmark whose file lies in OUT already is not repeated.
#   bash scripts/bench_all.sh OUT [TRL_PYTHON]      TRL_PYTHON: python of an environment that has trl; without it that part is left out
set -euo pipefail
out="$(realpath -m "${1:?usage: bash scripts/bench_all.sh OUT [TRL_PYTHON]}")"
trl="${2:-}"
case "$trl" in */*) trl="$(realpath -s "$trl")" ;; esac
cd "$(dirname "${BASH_SOURCE[0]}")/.."
mkdir -p "$out"
python="$PWD/.venv/bin/python"
export OMP_NUM_THREADS="${OMP_NUM_THREADS:-1}" OMP_WAIT_POLICY=PASSIVE TOKENIZERS_PARALLELISM=false

bench() {
  local file="$out/$1.json"
  shift
  if [ -f "$file" ]; then return; fi
  echo "== $(date +%T) $*"
  "$@" --out "$file" || failed+=("$*")
}
failed=()

bench 01-utilization "$python" -m async_rl bench utilization --ratios 0.5,1,2 --plot "$out/utilization.svg"
bench 02-transport "$python" -m async_rl bench transport
bench 03-buffer "$python" -m async_rl bench buffer
bench 04-weights "$python" -m async_rl bench weights
bench 04-weights-relay "$python" -m async_rl bench weights --receivers 16 --relay 4
bench 05-engine "$python" -m async_rl bench engine
bench 06-learner-arithmetic "$python" -m async_rl bench learner --case arithmetic
bench 07-learner-smollm2 "$python" -m async_rl bench learner --case smollm2 --sequences 128 --repeats "${SMOLLM2_REPEATS:-1}"  # 25 minutes each
if [ ! -f "$out/08-async.json" ]; then
  echo "== $(date +%T) a whole run with overlap and in turns"
  "$python" scripts/bench_async.py "$out/async-runs" && mv "$out/async-runs/async.json" "$out/08-async.json" || failed+=("bench_async.py")
fi
if [ -n "$trl" ]; then
  bench 09-trl-learner "$python" scripts/bench_trl.py --trl-python "$trl"
  bench 10-trl-end-to-end "$python" scripts/compare_trl.py "$out/trl-runs" --trl-python "$trl"
else
  echo "== TRL: left out, no TRL_PYTHON was given"
fi

"$python" scripts/bench_page.py "$out"
if [ "${#failed[@]}" -gt 0 ]; then
  printf 'failed: %s\n' "${failed[@]}"
  exit 1
fi
