#!/usr/bin/env bash
# Starts the learner of a run on this host: buffer server, ranks, evaluation. With several learner hosts run it on each.
#
#   bash scripts/launch_learner.sh CONFIG --out DIR --bind HOST:PORT --keys KEYS                    one learner host
#   bash scripts/launch_learner.sh CONFIG --out DIR --rendezvous HOST:PORT --keys KEYS \
#       --nnodes N --node-rank R --trusted-network                                               several, R = 0 .. N - 1
#
# HOST:PORT is the address of the first learner host; actors connect to it, too. With several hosts learner.ranks is the
# number of ranks over all of them. Everything else (--set, --resume, --insecure) goes to `async-rl learner` as it is.
set -euo pipefail
python="${PYTHON:-$(dirname "${BASH_SOURCE[0]}")/../.venv/bin/python}"
[ -x "$(command -v "$python")" ] || { echo "launch_learner: no $python: run scripts/setup.sh, or set PYTHON" >&2; exit 2; }

arguments=()
bind() { # HOST:PORT
  case "$1" in *://* | -* | "") echo "launch_learner: --bind takes HOST:PORT, not '$1'" >&2; exit 2 ;; esac
  arguments+=(--set "buffer.bind=tcp://$1")
}
while [ $# -gt 0 ]; do
  case "$1" in
    --bind) bind "${2:-}"; shift 2 ;;
    --bind=*) bind "${1#*=}"; shift ;;
    --help | -h) sed -n '2,9s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) arguments+=("$1"); shift ;;
  esac
done
exec "$python" -m async_rl learner "${arguments[@]}"
