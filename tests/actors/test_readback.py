"""Placing, loading and proving published tensors in a model with a fused and a padded parameter."""

from dataclasses import replace

import pytest
import torch

from actors.engines.readback import load, place, prove
from async_rl.errors import WeightsError
from async_rl.weights.manifest import Manifest, Tensor, chunk_checksums, combine

SHAPES = {"embed.weight": (3, 2), "a.k.weight": (1, 2), "a.q.weight": (2, 2), "a.v.weight": (1, 2), "norm.weight": (2,)}
PADDED = frozenset({"embed.weight"})


class Fused(torch.nn.Module):
    """q (2 rows), k (1) and v (1) in one parameter; the embedding is padded from 3 rows to 4."""

    packed_modules_mapping = {"qkv": ["q", "k", "v"]}  # noqa: RUF012
    rows = {"q": 0, "k": 2, "v": 3}  # noqa: RUF012

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.embed = torch.nn.Embedding(4, 2, dtype=dtype)
        self.a = torch.nn.Module()
        self.a.qkv = torch.nn.Linear(2, 4, bias=False, dtype=dtype)
        self.norm = torch.nn.Module()
        self.norm.weight = torch.nn.Parameter(torch.zeros(2, dtype=dtype))

    @torch.no_grad()
    def load_weights(self, tensors):
        for name, tensor in tensors:
            if name.startswith("a."):
                start = self.rows[name.split(".")[1]]
                self.a.qkv.weight[start : start + len(tensor)] = tensor
            else:
                self.get_parameter(name)[: len(tensor)] = tensor


def published(shapes=SHAPES, dtype=torch.float32, chunk_bytes=16):
    """With 4 bytes between two tensors, as a publisher may leave them; tensors start and end inside chunks."""
    tensors, data = [], bytearray()
    for i, (name, shape) in enumerate(shapes.items()):
        tensors.append(Tensor(name, str(dtype).removeprefix("torch."), shape, len(data)))
        values = torch.randn(shape, generator=torch.Generator().manual_seed(i)).to(dtype)
        data += values.reshape(-1).view(torch.uint8).numpy().tobytes() + b"gap!"
    chunks = chunk_checksums(memoryview(data), chunk_bytes)
    manifest = Manifest(
        version=4,
        run_id="r",
        tensors=tuple(tensors),
        nbytes=len(data),
        chunk_bytes=chunk_bytes,
        chunks=chunks,
        checksum=combine(chunks),
        segment="",
        host="",
    )
    return manifest, memoryview(data)


def test_each_part_of_a_fused_parameter_has_its_rows():
    assert place(Fused(), published()[0], PADDED) == {
        "embed.weight": ("embed.weight", 0),
        "a.q.weight": ("a.qkv.weight", 0),
        "a.k.weight": ("a.qkv.weight", 2),
        "a.v.weight": ("a.qkv.weight", 3),
        "norm.weight": ("norm.weight", 0),
    }


@pytest.mark.parametrize("chunk_bytes", [4, 12, 16, 20, 1000])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_checksum_of_what_was_loaded_is_the_published_one(dtype, chunk_bytes):
    manifest, data = published(dtype=dtype, chunk_bytes=chunk_bytes)
    model = Fused(dtype)
    places = place(model, manifest, PADDED)
    with pytest.raises(WeightsError, match="version 4"):
        prove(model, manifest, data, places)
    load(model, manifest, data)
    assert prove(model, manifest, data, places) == manifest.checksum


def test_a_model_may_hold_a_tensor_in_a_wider_type_but_not_in_a_narrower_one():
    manifest, data = published(dtype=torch.bfloat16)
    model = Fused(torch.float32)
    places = place(model, manifest, PADDED)
    load(model, manifest, data)
    assert prove(model, manifest, data, places) == manifest.checksum
    with pytest.raises(WeightsError, match=r"embed\.weight is torch\.float32, .* only torch\.bfloat16"):
        place(Fused(torch.bfloat16), published()[0], PADDED)


@pytest.mark.parametrize("row", range(4))
def test_one_wrong_bit_in_a_fused_row_names_the_tensor(row):
    manifest, data = published()
    model = Fused()
    places = place(model, manifest, PADDED)
    load(model, manifest, data)
    model.a.qkv.weight.data.view(torch.int32)[row, 1] ^= 1
    with pytest.raises(WeightsError, match=rf"hold a\.{'qqkv'[row]}\.weight as it was published"):
        prove(model, manifest, data, places)


def test_a_segment_that_is_overwritten_after_the_load_does_not_matter_and_before_it_is_named():
    manifest, data = published()
    model = Fused()
    places = place(model, manifest, PADDED)
    load(model, manifest, data)
    inside = next(t.offset for t in manifest.tensors if t.name == "a.q.weight")
    data[inside] ^= 1
    assert prove(model, manifest, data, places) == manifest.checksum
    load(model, manifest, data)
    with pytest.raises(WeightsError, match=rf"chunk {inside // 16} \(.*a\.q\.weight.*\) was overwritten"):
        prove(model, manifest, data, places)


def test_a_loader_that_mixes_up_the_order_of_rows_is_caught():
    manifest, data = published()
    model = Fused()
    model.rows = {"q": 0, "k": 3, "v": 2}
    load(model, manifest, data)
    with pytest.raises(WeightsError, match=r"a\.k\.weight"):
        prove(model, manifest, data, place(model, manifest, PADDED))


def test_tensors_that_share_bytes_are_refused():
    manifest, _ = published()
    first, second, *rest = manifest.tensors
    moved = Tensor(second.name, second.dtype, second.shape, first.offset + 4)
    with pytest.raises(WeightsError, match=r"a\.k\.weight overlaps embed\.weight"):
        place(Fused(), replace(manifest, tensors=(first, moved, *rest)), PADDED)


@pytest.mark.parametrize(
    ("change", "names"),
    [
        ({"a.z.weight": (1, 2)}, "a.z.weight"),
        ({"norm.weight": (1,)}, "1 rows of norm.weight"),
        ({"a.q.weight": (1, 2)}, "3 rows of a.qkv.weight"),
        ({"a.v.weight": (1, 3)}, "a.v.weight"),
        ({"embed.weight": (5, 2)}, "embed.weight"),
        ({"norm.weight": ()}, "norm.weight has no rows"),
        ({"a.v.weight": None}, "3 rows of a.qkv.weight"),
        ({"a.q.weight": None}, "a.k.weight"),
        ({"norm.weight": None}, "0 rows of norm.weight"),
    ],
)
def test_a_version_that_does_not_fit_the_model_is_refused_before_anything_is_written(change, names):
    manifest, _ = published({n: s for n, s in {**SHAPES, **change}.items() if s is not None})
    with pytest.raises(WeightsError, match=names.replace(".", r"\.")):
        place(Fused(), manifest, PADDED)


def test_whatever_a_loader_raises_is_a_weights_error():
    manifest, data = published()
    model = Fused()
    del model.norm
    with pytest.raises(WeightsError, match="version 4: vLLM does not take it: AttributeError"):
        load(model, manifest, data)
