"""Placing, loading and comparing published tensors in a model with a fused and a padded parameter."""

import pytest
import torch

from actors.engines.readback import compare, load, place
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


def published(shapes=SHAPES):
    tensors, data = [], bytearray()
    for i, (name, shape) in enumerate(shapes.items()):
        tensors.append(Tensor(name, "float32", shape, len(data)))
        data += (torch.randn(shape, generator=torch.Generator().manual_seed(i))).numpy().tobytes()
    chunks = chunk_checksums(memoryview(data), 16)
    manifest = Manifest(
        version=4,
        run_id="r",
        tensors=tuple(tensors),
        nbytes=len(data),
        chunk_bytes=16,
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_was_loaded_compares_equal_in_the_dtype_of_the_model(dtype):
    manifest, data = published()
    model = Fused(dtype)
    places = place(model, manifest, PADDED)
    with pytest.raises(WeightsError, match="version 4"):
        compare(model, manifest, data, places)
    load(model, manifest, data)
    compare(model, manifest, data, places)


@pytest.mark.parametrize("row", range(4))
def test_one_wrong_bit_in_a_fused_row_names_the_tensor(row):
    manifest, data = published()
    model = Fused()
    places = place(model, manifest, PADDED)
    load(model, manifest, data)
    model.a.qkv.weight.data.view(torch.int32)[row, 1] ^= 1
    with pytest.raises(WeightsError, match=rf"hold a\.{'qqkv'[row]}\.weight"):
        compare(model, manifest, data, places)


def test_a_loader_that_mixes_up_the_order_of_rows_is_caught():
    manifest, data = published()
    model = Fused()
    model.rows = {"q": 0, "k": 3, "v": 2}
    load(model, manifest, data)
    with pytest.raises(WeightsError, match=r"a\.k\.weight"):
        compare(model, manifest, data, place(model, manifest, PADDED))


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
