"""Models in shards make the updates, the versions and the checkpoints of one flat rank."""

import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import xxhash
from safetensors import safe_open

from async_rl.config import parse_config
from async_rl.errors import ConfigError
from async_rl.weights.manifest import combine
from learner.group import LearnerGroup, Placement
from learner.optimizer import even_part, overlap, owned
from learner.parts import create, read_part, write_parts
from learner.publisher import Publisher
from learner.together import _read_shards

WORKER = Path(__file__).with_name("sharded_worker.py")
ALONE = LearnerGroup(Placement(0, 1, torch.device("cpu")), timeout_s=60)


@pytest.fixture(scope="module")
def found(tmp_path_factory):
    """What the worker found, by number of ranks."""
    out = tmp_path_factory.mktemp("ranks")
    search = f"{WORKER.parents[2]}{os.pathsep}{WORKER.parent}"
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": str(out), "PYTHONPATH": search}
    done = subprocess.run([sys.executable, str(WORKER), str(out)], env=env, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-6000:]
    return {world: json.loads((out / f"{world}.json").read_text()) for world in (2, 4)}


@pytest.mark.real
@pytest.mark.parametrize("world", [2, 4])
def test_ranks_with_shards_make_the_updates_of_one_flat_rank_and_their_checkpoints_fit_any_number_of_ranks(
    found, world
):
    for name, update in found[world]["updates"].items():
        assert update["difference"] < 1e-5, name
        assert update["moved"] > 3e-4, name
        assert update["moments"] < 1e-4, name
        alone, together = update["metrics"]
        assert alone["grad_norm"] > 0.2, name  # it is clipped at 0.1
        for key, value in alone.items():
            assert together[key] == pytest.approx(value, rel=1e-3, abs=1e-6), (name, key)
    assert found[world]["zero"]["equal"]
    assert found[world]["zero"]["held"] < 1 / world + 0.02
    assert found[world]["checkpoint"] == {
        "to flat": 0,
        "back": 0,
        "on": 0,
        "folder": True,
        "tied": True,
        "sent": True,
    }


@pytest.mark.real
def test_ranks_with_shards_publish_skip_save_and_fail_as_flat_ones_do(found):
    two = found[2]
    assert two["skipped"]
    assert two["bfloat16"]["relative"] < 0.1  # sums in another order, of 8 bits; Adam makes much of tiny gradients
    ours, theirs = two["bfloat16"]["metrics"]
    assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=0.02)
    assert two["published"] == [{"equal": True, "most": 1}] * 2
    assert two["full"] == ["another rank could not write its part of it, see its log", "saved"]
    assert two["lost"].startswith("rank 0 has lost the others in a pass over the layers of step 7: one has died")


def test_slices_of_the_ranks_make_up_the_vector_and_its_end_belongs_to_all():
    # 330 = 3 · 96 + 42 elements: 96 is the largest multiple of 32 that three ranks can have each
    assert even_part(330, 3) == 96
    assert [owned(330, rank, 3) for rank in range(3)] == [
        [slice(0, 96), slice(288, 330)],
        [slice(96, 192), slice(288, 330)],
        [slice(192, 288), slice(288, 330)],
    ]
    assert even_part(60, 2) == 0  # too short to share
    assert overlap(slice(0, 10), slice(6, 20)) == slice(6, 10)
    nothing = overlap(slice(0, 3), slice(5, 9))
    assert nothing.start == nothing.stop


@pytest.mark.parametrize("shapes", [{"w": (8, 2)}, {"w": (2, 4)}, {"w": (4, 2), "b": (4,)}, {}])
def test_a_file_of_another_critic_is_refused_though_a_part_of_it_would_fit(tmp_path, shapes):
    create(tmp_path / "critic.safetensors", shapes)
    parameters = SimpleNamespace(slots=lambda role: [SimpleNamespace(name="w", shape=(4, 2))], of=lambda role: [])
    with pytest.raises(ConfigError, match="does not fit the critic"):
        _read_shards(tmp_path / "critic.safetensors", parameters, "critic")


def test_a_file_that_ranks_fill_is_what_safetensors_reads(tmp_path):
    file = tmp_path / "model.safetensors"
    create(file, {"b": (2, 3), "a": (), "odd": (3,)})
    write_parts(file, [("b", 4, torch.tensor([5.0, 6.0])), ("a", 0, torch.tensor(7.0))], ALONE)
    write_parts(file, [("b", 0, torch.arange(4.0)), ("odd", 1, torch.ones(2)), ("odd", 0, torch.ones(0))], ALONE)
    with safe_open(file, "pt") as tensors:
        assert tensors.metadata() == {"format": "pt"}
        assert tensors.get_tensor("b").tolist() == [[0, 1, 2], [3, 5, 6]]
        assert tensors.get_tensor("a").item() == 7
        assert tensors.get_tensor("odd").tolist() == [0, 1, 1]
    assert read_part(file, "b", 3, 2).tolist() == [3, 5]
    assert read_part(file, "b", 6, 0).tolist() == []
    with pytest.raises(ConfigError, match="has no float32 b with 7 elements"):
        read_part(file, "b", 5, 2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_version_in_pieces_is_the_same_bytes_and_checksums_as_the_whole_vector(dtype):
    layout = [("a", (70,), 0, 70), ("b", (5, 3), 96, 15), ("c", (200,), 128, 200)]
    whole = torch.zeros(352)
    for _, _, first, count in layout:
        whole[first : first + count] = torch.randn(count, generator=torch.Generator().manual_seed(first))
    pieces = [(first, whole[first : first + count].view(shape)) for _, shape, first, count in layout]
    in_type = [(first, piece.to(getattr(torch, dtype))) for first, piece in pieces]
    publisher = Publisher(f"test-pieces-{dtype}", layout, 64, dtype)
    try:
        expected = publisher.publish(whole, 0, evaluated=False)
        raw = bytes(publisher._segments["0"].data)
        assert raw == whole[:328].to(getattr(torch, dtype)).view(torch.uint8).numpy().tobytes()
        chunks = tuple(xxhash.xxh3_64_intdigest(raw[i : i + 64]) for i in range(0, len(raw), 64))
        assert expected.chunks == chunks
        assert expected.checksum == combine(chunks)
        for version, parts in ((1, pieces), (2, in_type), (3, [*pieces, (352, torch.ones(9))])):
            found = publisher.publish_pieces(parts, version, evaluated=False)
            assert found.chunks == expected.chunks
            assert np.array_equal(bytes(publisher._segments[str(version % 2)].data), raw)
    finally:
        publisher.close()


@pytest.mark.parametrize(
    ("sections", "said"),
    [
        ({"learner": {"strategy": "fsdp"}}, r"learner\.ranks = 1: there is nobody to share with"),
        ({"learner": {"shard_optimizer": True}}, r"shard_optimizer = True has no effect with learner\.ranks = 1"),
        (
            {"learner": {"strategy": "fsdp", "ranks": 2, "shard_optimizer": True}},
            r"shard_optimizer = True has no effect with learner\.strategy = 'fsdp'",
        ),
        ({"learner": {"strategy": "fsdp", "ranks": 2, "compile": True}}, r"set learner\.compile = false"),
        ({"learner": {"strategy": "fsdp", "ranks": 2}, "lora": {"rank": 4}}, "only whole models are sharded"),
        (
            {
                "learner": {"strategy": "fsdp", "ranks": 2},
                "actors": {"placement": "colocated"},
                "buffer": {"max_staleness": 0},
            },
            "shards cannot give their device back",
        ),
    ],
)
def test_settings_that_shards_cannot_do_are_refused(sections, said):
    with pytest.raises(ConfigError, match=said):
        parse_config(sections)
