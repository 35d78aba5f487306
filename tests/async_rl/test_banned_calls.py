"""Nothing in the code turns data into code: read from the source, so that what runs rarely counts, too."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("async_rl", "actors", "learner", "scripts")

MODULES = {"pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib", "imp"}
BUILTINS = {"eval", "exec", "compile", "__import__"}
CALLS = {
    "os.system",
    "os.popen",
    "subprocess.getoutput",
    "subprocess.getstatusoutput",
    "tempfile.mktemp",
    "yaml.load",
    "yaml.full_load",
    "yaml.unsafe_load",
    "pandas.read_pickle",
    "torch.hub.load",
}
METHODS = {
    "recv_pyobj",
    "send_pyobj",
    "to_pickle",
    "broadcast_object_list",  # collectives of objects pickle them
    "all_gather_object",
    "gather_object",
    "scatter_object_list",
    "send_object_list",
    "recv_object_list",
}
NEVER = {"shell", "allow_pickle", "trust_remote_code"}
"""Keywords that may be given only as the constant False."""
TORCHSCRIPT = "torch.jit.load without weights_only=True"
ALLOWED = {
    f"async_rl/control/export.py: {TORCHSCRIPT}": "checks the file that it wrote a moment ago",
    f"actors/control/judges.py: {TORCHSCRIPT}": "episodes.reward names a program of the user's, like module:function",
}
"""``file: what`` to the reason. Not ours, and not seen here: torch.distributed's store, gymnasium's vector environments
in processes and vLLM's own processes pickle among the processes of one user on one host."""


def names_of(tree):
    """What the file's names stand for: ``np`` is numpy, ``load`` may be torch.load."""
    names = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.asname: a.name for a in node.names if a.asname}
        elif isinstance(node, ast.ImportFrom):
            names |= {a.asname or a.name: f"{node.module}.{a.name}" for a in node.names}
    return names


def dotted(node, names):
    """The full name of ``a.b.c``; empty for anything else."""
    if isinstance(node, ast.Attribute):
        before = dotted(node.value, names)
        return f"{before}.{node.attr}" if before else ""
    return names.get(node.id, node.id) if isinstance(node, ast.Name) else ""


def is_constant(node, value):
    return isinstance(node, ast.Constant) and node.value is value


def banned(source):
    """Each thing in a piece of source that must not be there, by name."""
    tree = ast.parse(source)
    names = names_of(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom):
            yield from [node.module] if (node.module or "").split(".")[0] in MODULES else []
            yield from (full for a in node.names if (full := f"{node.module}.{a.name}") in CALLS)
        elif isinstance(node, ast.Attribute):
            yield from [node.attr] if node.attr in METHODS else []
            yield from [full] if (full := dotted(node, names)) in CALLS else []
        elif isinstance(node, ast.Name):
            is_read = isinstance(node.ctx, ast.Load)  # passing it on counts, a field of that name does not
            yield from [node.id] if is_read and node.id in BUILTINS else []
        elif isinstance(node, ast.Call):
            yield from banned_in(node, dotted(node.func, names))


def banned_in(call, function):
    given = {keyword.arg: keyword.value for keyword in call.keywords}
    yield from (f"{name}=" for name in sorted(NEVER & given.keys()) if not is_constant(given[name], False))
    if function in ("torch.load", "torch.jit.load") and not is_constant(given.get("weights_only"), True):
        yield f"{function} without weights_only=True"
    reads_weights = function.startswith("transformers.AutoModel") and function.endswith(".from_pretrained")
    if reads_weights and not is_constant(given.get("use_safetensors"), True):
        yield f"{function} without use_safetensors=True"


def files():
    found = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert {path.relative_to(ROOT).parts[0] for path in found} == set(FOLDERS)
    return found


def test_no_code_comes_out_of_data():
    found = {
        f"{path.relative_to(ROOT)}: {what}" for path in files() for what in banned(path.read_text(encoding="utf-8"))
    }
    assert found - ALLOWED.keys() == set()
    assert ALLOWED.keys() - found == set(), "these are gone: take them off the list"


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("import pickle", "pickle"),
        ("def f():\n    from cloudpickle import loads", "cloudpickle"),
        ("eval(text)", "eval"),
        ("map(exec, texts)", "exec"),
        ("compile(text, '', 'eval')", "compile"),
        ("import torch\ntorch.load(path)", "torch.load without weights_only=True"),
        ("import torch as t\nt.load(path, weights_only=False)", "torch.load without weights_only=True"),
        ("from torch import load\nload(path, weights_only=flag)", "torch.load without weights_only=True"),
        ("import numpy as np\nnp.load(path, allow_pickle=True)", "allow_pickle="),
        ("import yaml\nyaml.load(text, Loader=yaml.Loader)", "yaml.load"),
        ("from yaml import unsafe_load as read", "yaml.unsafe_load"),
        ("import subprocess\nsubprocess.run(text, shell=True)", "shell="),
        ("import subprocess as s\ns.Popen(text, shell=flag)", "shell="),
        ("import os\nos.system(text)", "os.system"),
        ("import tempfile\ntempfile.mktemp()", "tempfile.mktemp"),
        ("from tempfile import mktemp", "tempfile.mktemp"),
        ("socket.recv_pyobj()", "recv_pyobj"),
        ("dist.broadcast_object_list(things)", "broadcast_object_list"),
        (
            "from transformers import AutoModel as M\nM.from_pretrained(path)",
            "transformers.AutoModel.from_pretrained without use_safetensors=True",
        ),
        ("Model.from_pretrained(path, trust_remote_code=True)", "trust_remote_code="),
    ],
)
def test_each_of_these_is_found(source, what):
    assert what in set(banned(source))


@pytest.mark.parametrize(
    "source",
    [
        "import re\nre.compile('x')",
        "model.eval()",
        "class Config:\n    eval: int = 3",
        "import torch\ntorch.load(path, weights_only=True)",
        "import numpy as np\nnp.load(path, allow_pickle=False)",
        "import yaml\nyaml.safe_load(text)",
        "import subprocess\nsubprocess.run(['ls'], shell=False)",
        "import tempfile\ntempfile.mkstemp()",
        "'eval(text)'",
    ],
)
def test_what_is_harmless_is_let_through(source):
    assert list(banned(source)) == []
