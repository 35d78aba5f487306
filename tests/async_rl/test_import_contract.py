"""Who may import whom: read from the source, so that imports inside functions count, too."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ("async_rl", "actors", "learner")


def sources(package):
    found = sorted((ROOT / package).rglob("*.py"))
    assert found, f"no sources of {package} under {ROOT}"
    return found


def imported(source):
    """Absolute names of all modules that a piece of source imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "relative imports hide where a name comes from"
            names.append(node.module)
    return names


def importers(package, top_level_name):
    """Files of a package that import the named top-level package."""
    return [
        str(path.relative_to(ROOT))
        for path in sources(package)
        if any(name.split(".")[0] == top_level_name for name in imported(path.read_text()))
    ]


@pytest.mark.parametrize(
    ("package", "other"),
    [("async_rl", "actors"), ("async_rl", "learner"), ("actors", "learner"), ("learner", "actors")],
)
def test_packages_do_not_import_each_other_except_the_shared_one(package, other):
    assert importers(package, other) == []


def test_vllm_is_imported_only_by_the_engines_and_their_benchmark():
    files = [file for package in PACKAGES for file in importers(package, "vllm")]
    assert [file for file in files if not file.startswith(("actors/engines/", "actors/bench/"))] == []


def test_ray_is_imported_only_where_a_cluster_is_joined():
    files = [file for package in PACKAGES for file in importers(package, "ray")]
    assert files == ["async_rl/launch/ray_cluster.py"]


@pytest.mark.parametrize("package", PACKAGES)
@pytest.mark.parametrize("name", ["pickle", "cloudpickle", "dill", "marshal", "shelve"])
def test_nothing_that_unpickles_is_imported(package, name):
    assert importers(package, name) == []


@pytest.mark.parametrize("package", PACKAGES)
def test_no_call_asks_numpy_or_zmq_to_unpickle(package):
    for path in sources(package):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Attribute):
                assert node.attr not in ("recv_pyobj", "send_pyobj"), path
            if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
                assert isinstance(node.value, ast.Constant), path
                assert node.value.value is False, path


@pytest.mark.parametrize(
    "module", ["async_rl.cli", "async_rl.config", "async_rl.launch.session", "async_rl.doctor", "async_rl.report"]
)
def test_light_modules_import_no_torch_vllm_or_transformers(module):
    code = f"import sys, {module}; print([m for m in ('torch', 'vllm', 'transformers', 'wandb') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout.strip() == "[]", done.stderr


def test_the_walk_sees_imports_inside_functions():
    assert imported("def f():\n    import vllm.config\n    from learner import main\n") == ["vllm.config", "learner"]
