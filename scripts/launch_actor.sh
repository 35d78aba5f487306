#!/usr/bin/env bash
# Starts the actors of this host, which serve the learner of another one; any number of hosts, at any time.
#
#   bash scripts/launch_actor.sh CONFIG --connect tcp://LEARNER:PORT [--engines N] [--keys KEYS]
#
# N engines, each with a device of its own; by default one for every GPU that is visible, and one without GPUs. They share
# one transfer of the weights. `--role reward` or `--role reference` starts scorers instead. Everything else (--set, --name)
# goes to `async-rl actor` as it is.
set -euo pipefail
python="${PYTHON:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python}"
[ -x "$(command -v "$python")" ] || { echo "launch_actor: no $python: run scripts/setup.sh, or set PYTHON" >&2; exit 2; }

engines=""
for argument in "$@"; do
  case "$argument" in
    --engines | --engines=*) engines=given ;;
    --help | -h) sed -n '2,8s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
  esac
done
if [ -z "$engines" ]; then
  if [ -n "${CUDA_VISIBLE_DEVICES+set}" ]; then
    gpus="$(tr ',' '\n' <<<"$CUDA_VISIBLE_DEVICES" | grep -cE '[^ ]' || true)"
  else
    gpus="$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ' || true)"
  fi
  set -- "$@" --engines "$((gpus > 0 ? gpus : 1))"
fi
exec "$python" -m async_rl actor "$@"
