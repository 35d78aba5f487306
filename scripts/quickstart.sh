#!/usr/bin/env bash
# From a fresh clone to a trained model and its report: sets up .venv if needed, runs the preset `arithmetic`.
# Arguments go to `async-rl run arithmetic`, e.g. --set actors.count=2
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
bash scripts/setup.sh

out="runs/quickstart-$(date +%Y%m%d-%H%M%S)"
.venv/bin/async-rl run arithmetic --out "$out" "$@"

echo
echo "report:   $PWD/$out/report.html"
echo "summary:  $PWD/$out/summary.json"
echo "trace:    $PWD/$out/trace.json   (open it in https://ui.perfetto.dev)"
