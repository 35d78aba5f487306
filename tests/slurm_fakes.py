"""A cluster of this machine: `sbatch`, `srun`, `scancel`, `scontrol` as scripts with the options of the real ones."""

import os
import sys
from pathlib import Path

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
printf '%s\\n' "$@" >>"$FAKE/sbatch.log"
echo "7;cluster"
"""

# Each task in turn gets its number. As the real one it kills its tasks when it is told to end itself.
SRUN = """\
group=0 nodes=1
while [ "${1#--}" != "$1" ]; do
  case "$1" in --het-group=*) group="${1#*=}" ;; --nodes=*) nodes="${1#*=}" ;; esac
  shift
done
pids=()
trap 'echo "srun: forcing job termination" >&2; kill -KILL "${pids[@]}" 2>/dev/null' TERM INT
for ((node = 0; node < nodes; node++)); do
  SLURM_NODEID=$node bash -c 'echo $$ >>"$FAKE/tasks.$0"; exec "$@"' "$group" "$@" & pids+=($!)
done
code=0
for pid in "${pids[@]}"; do
  wait "$pid"; ended=$?
  while kill -0 "$pid" 2>/dev/null; do wait "$pid"; ended=$?; done
  [ "$ended" -eq 0 ] || code=$ended
done
exit "$code"
"""

# Signals the tasks of a component; those of the whole job by the number of its first one.
SCANCEL = """\
[ "$1" = "--signal=TERM" ] || { echo "scancel: what?" >&2; exit 1; }
groups=(0 1)
[ "$2" = "$SLURM_JOB_ID" ] || groups=(1)
for group in "${groups[@]}"; do
  [ ! -f "$FAKE/tasks.$group" ] || xargs -r kill -TERM <"$FAKE/tasks.$group" 2>/dev/null
done
exit 0
"""


def install(folder: Path) -> dict[str, str]:
    """Put the commands into a folder; the environment in which they are found."""
    folder.mkdir(exist_ok=True)
    for name, body in (("scontrol", SCONTROL), ("sbatch", SBATCH), ("srun", SRUN), ("scancel", SCANCEL)):
        command = folder / name
        command.write_text(f"#!/usr/bin/env bash\n{body}")
        command.chmod(0o755)
    return {
        **os.environ,
        "PATH": f"{folder}{os.pathsep}{os.environ['PATH']}",
        "FAKE": str(folder),
        "PYTHON": sys.executable,
    }


def job_environment(folder: Path, number: int, actors: int = 2) -> dict[str, str]:
    """What Slurm tells the script of a heterogeneous job with so many actor nodes; all of them are this one."""
    return {
        **install(folder),
        "SLURM_JOB_ID": str(number),
        "SLURM_JOB_ID_HET_GROUP_1": str(number + 1),
        "SLURM_JOB_NODELIST_HET_GROUP_0": "localhost",
        "SLURM_JOB_NODELIST_HET_GROUP_1": " ".join(["localhost"] * actors),
    }
