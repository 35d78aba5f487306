"""A cluster of this machine: `sbatch`, `srun` and `scontrol` as scripts that take the options of the real ones."""

import os
import sys
from pathlib import Path

NODES = {"0": "localhost", "1": "localhost localhost"}
"""Nodes of each component, as the fake controller names them."""

SCONTROL = """\
[ "$1 $2" = "show hostnames" ] || { echo "scontrol: what?" >&2; exit 1; }
for node in $3; do echo "$node"; done
"""

# Slurm's own words for a job that it refuses, and the number of one that it takes. The job runs at once, here.
SBATCH = """\
script="${!#}"
case "$*" in *--test-only*)
  if grep -q "^#SBATCH --partition=nowhere" /dev/stdin; then
    echo "sbatch: error: invalid partition specified: nowhere" >&2; exit 1
  fi
  echo "sbatch: Job 7 to start at 2026-01-01T00:00:00 using 3 processors on nodes localhost" >&2; exit 0 ;;
esac
echo "$@" >>"$FAKE/sbatch.log"
echo "7;cluster"
"""

# Each task in turn gets its number; signals reach it, as those to srun do.
SRUN = """\
echo "$@" >>"$FAKE/srun.log"
nodes=1
while [ "${1#--}" != "$1" ]; do
  case "$1" in --het-group=0) nodes="${FAKE_LEARNERS:-1}" ;; esac
  shift
done
pids=()
asked=
trap 'asked=yes; kill -TERM "${pids[@]}" 2>/dev/null' TERM INT
for ((node = 0; node < nodes; node++)); do SLURM_NODEID=$node SLURM_PROCID=$node "$@" & pids+=($!); done
[ -z "$asked" ] || kill -TERM "${pids[@]}"
code=0
for pid in "${pids[@]}"; do
  wait "$pid"; ended=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; ended=$?; done
  [ "$ended" -eq 0 ] || code=$ended
done
exit "$code"
"""


def install(folder: Path) -> dict[str, str]:
    """Put the commands into a folder; the environment in which they are found."""
    folder.mkdir(exist_ok=True)
    for name, body in (("scontrol", SCONTROL), ("sbatch", SBATCH), ("srun", SRUN)):
        command = folder / name
        command.write_text(f"#!/usr/bin/env bash\n{body}")
        command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "FAKE": str(folder),
        "PYTHON": sys.executable,
    }


def job_environment(folder: Path, number: int) -> dict[str, str]:
    """What Slurm tells the script of a heterogeneous job."""
    return {
        **install(folder),
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_NODELIST_HET_GROUP_0": NODES["0"],
        "SLURM_JOB_NODELIST_HET_GROUP_1": NODES["1"],
    }
