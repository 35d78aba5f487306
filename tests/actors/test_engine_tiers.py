"""Sequences of very different lengths through few slots: rows move from tier to tier, and nothing changes."""

import numpy as np
import pytest
import torch
from engine_models import MODELS, SIZES, drain, greedy, logprobs_of, make, plain, published, request
from transformers import Gemma2Config, Gemma2ForCausalLM, Qwen3Config, Qwen3ForCausalLM

from actors.engines import kv_cache, linear, torch_engine
from actors.engines.decoder import Decoder
from actors.engines.kv_cache import KVCache
from actors.engines.slots import Slots

QWEN3 = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}
BUILDS = MODELS | {"qwen3": lambda: Qwen3ForCausalLM(Qwen3Config(**SIZES, **QWEN3))}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, build in BUILDS.items():
        torch.manual_seed(3)
        made[name] = tmp_path_factory.mktemp(name)
        build().save_pretrained(made[name])
    return made


@pytest.fixture(autouse=True)
def short_tiers(monkeypatch):
    """Tiers of 16, 32, 48, ... positions: the sequences here pass through several."""
    monkeypatch.setattr(kv_cache, "_SHORTEST", 16)


def mixed(count, **changes):
    """Requests with prompts of 1 to 20 tokens, and up to 1 to 40 new ones, in groups of 1 to 3."""
    rng = np.random.default_rng(5)
    return [
        request(
            i, rng.integers(3, 40, rng.integers(1, 21)), int(rng.integers(1, 4)), int(rng.integers(1, 41)), **changes
        )
        for i in range(count)
    ]


@pytest.mark.parametrize("decoder", [True, False])
@pytest.mark.parametrize("name", BUILDS)
def test_logprobs_of_mixed_lengths_are_those_of_a_plain_forward(folders, name, decoder, monkeypatch):
    monkeypatch.setattr(torch_engine, "decodes", torch_engine.decodes if decoder else lambda model: False)
    model, engine = plain(folders[name]), make(folders[name], slots=7, stops=())
    assert (engine._decoder is not None) == decoder
    requests = mixed(14)
    engine.submit(requests)
    done = drain(engine)
    for r in requests:
        for sample in range(r.num_samples):
            c = done[r.id, sample]
            assert len(c.tokens) == r.max_new_tokens
            np.testing.assert_allclose(c.logprobs, logprobs_of(model, r.prompt, c.tokens), atol=1e-4)


def test_greedy_tokens_of_mixed_lengths_are_those_of_a_plain_forward(folders):
    model, engine = plain(folders["grouped"]), make(folders["grouped"], slots=5)
    requests = mixed(8, temperature=0.0)
    engine.submit(requests)
    for (request_id, _), c in drain(engine).items():
        assert c.tokens.tolist() == greedy(model, requests[request_id].prompt, requests[request_id].max_new_tokens)


def test_rows_in_all_tiers_are_read_again_when_weights_change(folders):
    engine = make(folders["grouped"], slots=12, kv_cache="recompute", stops=())
    requests = mixed(10)
    engine.submit(requests)
    for _ in range(9):
        engine.step(0.0)
    torch.manual_seed(4)
    newer = MODELS["grouped"]().eval()
    engine.load_weights(*published(newer, version=1))
    for (request_id, _), c in drain(engine).items():
        new = c.versions == 1
        np.testing.assert_allclose(
            c.logprobs[new], logprobs_of(newer, requests[request_id].prompt, c.tokens)[new], atol=1e-4
        )


def test_more_rows_than_one_program_of_onednn_has_are_padded_and_the_same(folders, monkeypatch):
    runs = []
    for fewest in (8, 1 << 30):
        monkeypatch.setattr(linear, "_FEWEST_ROWS", fewest)
        engine = make(folders["grouped"], slots=23, stops=())
        engine.submit(mixed(20))
        runs.append(drain(engine))
    assert runs[0].keys() == runs[1].keys()
    for key, c in runs[0].items():
        assert c.tokens.tolist() == runs[1][key].tokens.tolist()
        np.testing.assert_allclose(c.logprobs, runs[1][key].logprobs, atol=1e-4)


def test_a_model_whose_own_forward_gives_something_else_is_decoded_by_that_and_it_is_said(folders, monkeypatch, capsys):
    monkeypatch.setattr(Decoder, "agrees", lambda *_: False)
    assert make(folders["grouped"])._decoder is None
    assert "async-rl: warning: the engine's own decode step does not give" in capsys.readouterr().err


def test_the_decoder_sees_a_forward_that_differs(folders, monkeypatch):
    engine = make(folders["grouped"])
    assert engine._decoder.agrees(engine._make_cache())
    monkeypatch.setattr(engine._decoder, "_scale", 1.0)  # 8**-0.5 is right
    assert not engine._decoder.agrees(engine._make_cache())
    monkeypatch.setattr(engine._decoder, "_scale", float("nan"))
    assert not engine._decoder.agrees(engine._make_cache())


def test_the_decoder_uses_onednn_only_where_the_model_does(folders, monkeypatch):
    """On CUDA there is no such operator."""

    def missing(*_):
        raise NotImplementedError("no kernel")

    monkeypatch.setattr(torch_engine, "use_onednn", lambda model: False)
    monkeypatch.setattr(linear.torch.ops.mkldnn, "_linear_pointwise", missing)
    engine = make(folders["grouped"], slots=64, stops=())
    assert engine._decoder is not None
    engine.submit([request(i, np.arange(3, 35), 2, 4) for i in range(32)])  # 32 prompts of 32 tokens
    done = drain(engine)
    assert len(done) == 64
    model, c = plain(folders["grouped"]), done[0, 0]
    np.testing.assert_allclose(c.logprobs, logprobs_of(model, np.arange(3, 35), c.tokens), atol=1e-4)


def test_the_decoder_is_tried_on_the_path_that_it_works_on(folders, monkeypatch):
    """Few rows do not reach oneDNN: what it gives wrong must be seen before it is used."""
    if not linear.use_onednn(plain(folders["grouped"])):
        pytest.skip("this CPU has no AVX-512")
    engine, right, calls = make(folders["grouped"]), torch.ops.mkldnn._linear_pointwise, []
    monkeypatch.setattr(linear.torch.ops.mkldnn, "_linear_pointwise", lambda *a: calls.append(1) or right(*a))
    assert engine._decoder.agrees(engine._make_cache())
    once = 7 * MODELS["grouped"]().config.num_hidden_layers
    assert len(calls) == 8 * once  # the model's own forward, a read, 6 decode steps


def test_architectures_of_another_shape_keep_their_own_forward(tmp_path):
    torch.manual_seed(1)
    config = Gemma2Config(**SIZES, **QWEN3, attn_logit_softcapping=None, final_logit_softcapping=None)
    Gemma2ForCausalLM(config).save_pretrained(tmp_path)
    model, engine = plain(tmp_path), make(tmp_path, slots=5, stops=())
    assert engine._decoder is None
    requests = mixed(6)
    engine.submit(requests)
    for (request_id, _), c in drain(engine).items():
        np.testing.assert_allclose(c.logprobs, logprobs_of(model, requests[request_id].prompt, c.tokens), atol=1e-4)


def test_memory_stays_within_twice_that_of_one_padded_tensor():
    cache = KVCache(layers=1, kv_heads=1, head_dim=1, dtype=torch.float32, device=torch.device("cpu"), tiers=True)
    for length in range(200):  # 32 rows in step, through all tiers
        tier = np.full(32, cache.tier_for(np.array([length + 1]))[0])
        cache.begin_decode(tier, np.full(32, length))
        cache.trim(tier)
        padded = 2 * 32 * int(cache._lengths[tier[0]]) * 4
        assert cache.nbytes <= 2 * padded


def test_slots_are_refilled_once_some_are_free_and_at_once_when_none_is_in_use():
    slots = Slots(64, ())
    slots.submit(request(0, num_samples=64, max_new_tokens=2))
    slots.submit(request(1, num_samples=8))
    slots.admit(0)
    slots._limit[:3] = 1  # three slots of 64 become free, four are waited for
    slots.record(np.zeros(64, np.int32), np.zeros(64, np.float32), 0)
    assert slots.admit(0) == []
    slots.record(np.zeros(61, np.int32), np.zeros(61, np.float32), 0)
    assert [r.id for r in slots.admit(0)] == [1]


def test_few_numbers_of_rows_are_given_to_onednn_and_little_is_padded():
    sizes = {rows: linear.padded(rows) for rows in range(1, 5_000)}
    assert all(size == rows for rows, size in sizes.items() if rows <= 32)
    larger = {rows: size for rows, size in sizes.items() if rows > 32}
    assert all(size % 16 == 0 and rows <= size < rows + max(16, rows / 8) for rows, size in larger.items())
    assert len(set(larger.values())) <= 56
