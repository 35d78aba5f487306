"""The GGUF reader, against values worked by hand and against the reference implementation."""

from pathlib import Path

import numpy as np
import pytest

from async_rl.errors import AsyncRLError
from async_rl.gguf import read_gguf

gguf = pytest.importorskip("gguf", reason="needs the reference implementation (extra: tasks)")


def write(path: Path, tensors: dict[str, tuple[np.ndarray, "gguf.GGMLQuantizationType"]]) -> Path:
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_block_count(2)
    writer.add_rope_freq_base(1e5)
    writer.add_token_list(["a", "é"])
    writer.add_add_bos_token(False)
    for name, (array, kind) in tensors.items():
        raw = gguf.quants.quantize(array, kind)
        writer.add_tensor(name, raw, raw_shape=raw.shape, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def test_metadata_keep_their_types(tmp_path: Path):
    kind = gguf.GGMLQuantizationType.F32
    metadata = read_gguf(write(tmp_path / "m.gguf", {"x": (np.zeros(3, np.float32), kind)})).metadata
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert metadata["llama.rope.freq_base"] == 1e5
    assert metadata["tokenizer.ggml.tokens"] == ["a", "é"]
    assert metadata["tokenizer.ggml.add_bos_token"] is False


@pytest.mark.parametrize("name", ["F32", "F16", "Q8_0", "Q4_1"])
def test_every_tensor_type_is_read_as_the_reference_reads_it(tmp_path: Path, name: str):
    kind = gguf.GGMLQuantizationType[name]
    array = np.random.default_rng(0).normal(size=(3, 64)).astype(np.float32)
    read = read_gguf(write(tmp_path / "m.gguf", {"odd": (np.ones(5, np.float32), gguf.GGMLQuantizationType.F32),
                                                 "x": (array, kind)})).tensors["x"]  # fmt: skip
    np.testing.assert_array_equal(read, gguf.quants.dequantize(gguf.quants.quantize(array, kind), kind))
    assert read.shape == (3, 64)
    assert np.abs(read - array).max() < {"F32": 1e-9, "F16": 2e-3, "Q8_0": 0.02, "Q4_1": 0.25}[name]


def test_a_q4_1_block_by_hand(tmp_path: Path):
    # values 1 .. 2.5 in steps of 0.1, twice: scale (2.5 - 1) / 15 = 0.1, minimum 1, codes 0..15 in both halves
    array = np.tile(1 + 0.1 * np.arange(16, dtype=np.float32), 2)[None]
    kind = gguf.GGMLQuantizationType.Q4_1
    read = read_gguf(write(tmp_path / "m.gguf", {"x": (array, kind)})).tensors["x"]
    np.testing.assert_allclose(read, array, atol=5e-4)  # the scale is a float16


@pytest.mark.parametrize(
    "damage", [lambda raw: b"GGML" + raw[4:], lambda raw: raw[:-100], lambda raw: raw[:40], lambda raw: b""]
)
def test_a_damaged_file_is_refused(tmp_path: Path, damage):
    kind = gguf.GGMLQuantizationType.F32
    path = write(tmp_path / "m.gguf", {"x": (np.zeros(100, np.float32), kind)})
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(AsyncRLError, match=r"m.gguf"):
        read_gguf(path)
