"""The embedded engine against plain forwards of the same model."""

import numpy as np
import pytest
import torch
from engine_models import MODELS, STOP, VOCAB, drain, greedy, logprobs_of, make, plain, published, request, various
from transformers import Qwen2ForCausalLM

from actors.engines import torch_engine
from actors.engines.decoder import Decoder
from actors.engines.torch_engine import TorchEngine, _chunks
from async_rl.errors import AsyncRLError, WeightsError
from async_rl.weights.manifest import Tensor


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, build in MODELS.items():
        torch.manual_seed(1)
        made[name] = tmp_path_factory.mktemp(name)
        build().save_pretrained(made[name])
    return made


def forcing(folder, token):
    """A model that gives ``token`` a probability next to 1 whatever it reads."""
    model = plain(folder)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.fill_(1.0 if "norm" in name or "embed" in name else 0.0)
        model.lm_head.weight[token] = 1.0  # hidden states are all ones: logit 32 against 0
    return model


@pytest.mark.parametrize("name", MODELS)
def test_greedy_completions_are_those_of_a_plain_forward(folders, name):
    model, engine = plain(folders[name]), make(folders[name], slots=5)
    requests = various(temperature=0.0)
    engine.submit(requests)
    done = drain(engine)
    for r in requests:
        for sample in range(3):
            assert done[r.id, sample].tokens.tolist() == greedy(model, r.prompt, 10)
            expected = logprobs_of(model, r.prompt, done[r.id, sample].tokens)
            np.testing.assert_allclose(done[r.id, sample].logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_logprobs_are_those_of_a_plain_forward_at_the_temperature(folders, name, temperature):
    model, engine = plain(folders[name]), make(folders[name], slots=7)
    requests = various(12, temperature=temperature)
    engine.submit(requests)
    done = drain(engine)
    assert len(done) == 36
    for r in requests:
        for sample in range(3):
            c = done[r.id, sample]
            np.testing.assert_allclose(c.logprobs, logprobs_of(model, r.prompt, c.tokens, temperature), atol=1e-4)
            assert c.versions.tolist() == [0] * len(c.tokens)
            assert (c.tokens.dtype, c.logprobs.dtype, c.versions.dtype) == (np.int32, np.float32, np.int32)
    assert len({tuple(c.tokens) for c in done.values()}) > 12  # samples of a prompt differ


def test_models_that_bring_their_own_attention_are_decoded_too(folders, monkeypatch):
    monkeypatch.setattr(Qwen2ForCausalLM, "_supports_attention_backend", False)
    engine = make(folders["grouped"])
    assert engine._model.config._attn_implementation == "sdpa"
    engine.submit(various(temperature=0.0))
    model = plain(folders["grouped"])
    for (request_id, _), c in drain(engine).items():
        assert c.tokens.tolist() == greedy(model, various()[request_id].prompt, 10)


def test_tokens_do_not_depend_on_slots_nor_on_what_is_decoded_beside_them(folders):
    runs = []
    for slots, batches in ((2, 1), (64, 1), (9, 3)):
        engine, done = make(folders["grouped"], slots=slots), {}
        requests = various(9)
        for start in range(0, 9, 9 // batches):
            engine.submit(requests[start : start + 9 // batches])
            for c in engine.step(0.0):
                done[c.request_id, c.sample] = c
        runs.append({k: c.tokens.tolist() for k, c in (done | drain(engine)).items()})
    assert runs[0] == runs[1] == runs[2]
    alone = make(folders["grouped"])
    alone.submit([various(9)[4]])
    assert all(c.tokens.tolist() == runs[0][key] for key, c in drain(alone).items())


def test_completions_end_at_a_stop_token_or_at_the_limit(folders):
    engine = make(folders["grouped"], stops=(STOP, *range(3, 12)))
    engine.submit([request(0, num_samples=16, max_new_tokens=4), request(1, num_samples=4, max_new_tokens=1)])
    reasons = set()
    for (request_id, _), c in drain(engine).items():
        stopped = [int(t) in (STOP, *range(3, 12)) for t in c.tokens]
        assert not any(stopped[:-1])
        assert c.finish_reason == ("stop" if stopped[-1] else "length")
        assert stopped[-1] or len(c.tokens) == (4, 1)[request_id]
        reasons.add(c.finish_reason)
    assert reasons == {"stop", "length"}


def test_each_prompt_is_read_once_and_equal_prefixes_are_decoded_once(folders, monkeypatch):
    shapes = []
    read, decode = Decoder.read, Decoder.decode

    def prefilled(decoder, ids, *args):
        shapes.append(tuple(ids.shape))
        return read(decoder, ids, *args)

    def decoded(decoder, tokens, *args):
        shapes.append((len(tokens), 1))
        return decode(decoder, tokens, *args)

    engine = make(folders["grouped"], stops=())
    monkeypatch.setattr(Decoder, "read", prefilled)
    monkeypatch.setattr(Decoder, "decode", decoded)
    engine.submit([request(i, (5, 6, 7), 8, 3, temperature=0.0) for i in range(2)])
    drain(engine)
    assert shapes == [(2, 3), (2, 1), (2, 1)]  # 16 samples: 2 prompts, then 2 distinct prefixes a step
    shapes.clear()
    engine.submit([request(0, (5, 6, 7), 8, 3)])
    done = drain(engine)
    prefixes = [{tuple(c.tokens[:n]) for c in done.values()} for n in (1, 2)]
    assert shapes == [(1, 3), (len(prefixes[0]), 1), (len(prefixes[1]), 1)]


def test_more_requests_than_slots_and_more_samples_than_slots(folders):
    engine = make(folders["grouped"], slots=3)
    engine.submit([request(0, num_samples=8), *various(6, num_samples=2)[1:]])
    assert engine.num_running == 18
    assert len(drain(engine)) == 18
    wide = make(folders["grouped"], slots=18)
    wide.submit([request(0, num_samples=8)])
    engine.submit([request(0, num_samples=8)])  # the id is free again; in three admissions the samples are the same
    assert {k: c.tokens.tolist() for k, c in drain(wide).items()} == {
        k: c.tokens.tolist() for k, c in drain(engine).items()
    }


def test_tokens_after_a_swap_carry_the_new_version_and_come_from_it(folders):
    engine = make(folders["grouped"], stops=())
    engine.submit([request(0, num_samples=6)])
    for _ in range(4):
        engine.step(0.0)
    manifest, data = published(forcing(folders["grouped"], 33), version=7)
    assert engine.load_weights(manifest, data) == manifest.checksum
    assert engine.version == 7
    for c in drain(engine).values():
        assert c.versions.tolist() == [0] * 4 + [7] * 6
        assert c.tokens[4:].tolist() == [33] * 6
        assert c.tokens[:4].tolist() != [33] * 4


@pytest.mark.parametrize("kv_cache", ["keep", "recompute"])
def test_recompute_reads_running_sequences_again_and_keep_does_not(folders, kv_cache):
    engine = make(folders["grouped"], slots=64, kv_cache=kv_cache, stops=())
    requests = various(5, num_samples=4)
    engine.submit(requests)
    for _ in range(3):
        engine.step(0.0)
    torch.manual_seed(2)
    newer = MODELS["grouped"]().eval()
    engine.load_weights(*published(newer, version=1))
    old, deltas = plain(folders["grouped"]), []
    done = drain(engine)
    for r in requests:
        for sample in range(4):
            c = done[r.id, sample]
            np.testing.assert_allclose(c.logprobs[:3], logprobs_of(old, r.prompt, c.tokens)[:3], atol=1e-4)
            deltas.append(np.abs(c.logprobs[3:] - logprobs_of(newer, r.prompt, c.tokens)[3:]).max())
    assert (max(deltas) < 1e-4) == (kv_cache == "recompute")


def test_aborted_requests_yield_nothing_and_others_go_on_unchanged(folders):
    engine, undisturbed = make(folders["grouped"], slots=9, stops=()), make(folders["grouped"], stops=(), slots=64)
    undisturbed.submit(various(6))
    expected = drain(undisturbed)
    engine.submit(various(6))
    for _ in range(3):
        engine.step(0.0)
    engine.abort([1, 4, 99])  # running and queued
    assert engine.num_running == 12
    done = drain(engine)
    assert {r for r, _ in done} == {0, 2, 3, 5}
    assert all(c.tokens.tolist() == expected[key].tokens.tolist() for key, c in done.items())
    engine.submit(various(6))
    engine.step(0.0)
    engine.abort(range(6))
    assert (engine.num_running, engine.step(0.0)) == (0, [])


def test_what_cannot_be_done_is_refused_at_submit_all_or_none(folders):
    engine = make(folders["grouped"], context=12)
    engine.submit([request(1, max_new_tokens=2)])
    for bad, reason in [
        (request(2, range(3, 6), max_new_tokens=10), "3 tokens and 10 new ones do not fit the model's context of 12"),
        (request(1, max_new_tokens=2), "request 1 is in flight"),
        (request(2, (), max_new_tokens=2), "empty prompt"),
        (request(2, (1, VOCAB), max_new_tokens=2), "outside the vocabulary"),
        (request(2, (-1,)), "outside the vocabulary"),
        (request(2, num_samples=0, max_new_tokens=2), "out of range"),
        (request(2, max_new_tokens=0), "out of range"),
    ]:
        with pytest.raises(ValueError, match=reason):
            engine.submit([request(3, (4, 5), max_new_tokens=2), bad])
        assert engine.num_running == 1
    engine.submit([request(2, (3, 4), max_new_tokens=10)])
    assert len(drain(engine)) == 2


def test_a_long_context_costs_no_memory_before_it_is_used(folders):
    engine = make(folders["grouped"], context=1_000_000, slots=4096)
    engine.submit([request(0, num_samples=4)])
    drain(engine)
    # at most 16 rows of 32 positions, keys and values of 2 layers, 2 heads of 8 float32
    assert 0 < engine._cache.nbytes <= 16 * 32 * 2 * 2 * 2 * 8 * 4


def test_weights_of_another_model_are_refused_and_nothing_changes(folders):
    engine = make(folders["grouped"])
    manifest, data = published(plain(folders["grouped"]), version=1)
    first, *rest = manifest.tensors
    renamed = Tensor("model.other", first.dtype, first.shape, first.offset)
    for tensors, reason in [
        (rest, r"lacks \['model\.embed_tokens\.weight'\]"),
        ([renamed, *rest], r"lacks .*embed_tokens.* has \['model\.other'\]"),
        ([Tensor(first.name, first.dtype, (32, VOCAB), 0), *rest], r"embed_tokens\.weight is float32 \[32, 40\]"),
        ([Tensor(first.name, "bfloat16", first.shape, 0), *rest], "is bfloat16"),
        ([Tensor(first.name, first.dtype, first.shape, 2), *rest], "inside an element"),
        ([first, *manifest.tensors], "names a tensor twice"),
    ]:
        bad, _ = published(plain(folders["grouped"]), version=1, tensors=tuple(tensors))
        with pytest.raises(WeightsError, match=reason):
            engine.load_weights(bad, data)
    with pytest.raises(WeightsError, match="the manifest says"):
        engine.load_weights(manifest, data[:-4])
    engine.submit([request()])
    assert drain(engine)[0, 0].versions.tolist()[0] == 0


def test_nothing_is_sampled_from_weights_without_proof(folders):
    engine = TorchEngine(
        folders["grouped"], device=torch.device("cpu"), dtype=torch.float32, slots=4, context=64, stop_token_ids=(STOP,)
    )
    assert engine.version == -1
    engine.submit([request()])
    with pytest.raises(WeightsError, match="no proven version"):
        engine.step(0.0)
    manifest, data = published(plain(folders["grouped"]))
    torn = bytearray(data)
    torn[1234] ^= 1
    with pytest.raises(WeightsError, match="the engine holds"):
        engine.load_weights(manifest, memoryview(torn))
    with pytest.raises(WeightsError, match="no proven version"):
        engine.step(0.0)
    engine.load_weights(manifest, data)
    assert len(drain(engine)) == 1
    broken = plain(folders["grouped"])
    with torch.no_grad():
        broken.lm_head.weight[3] = torch.nan
    engine.load_weights(*published(broken, version=4))
    engine.submit([request()])
    with pytest.raises(WeightsError, match=r"version 4 .* not numbers"):
        engine.step(0.0)


def test_a_sleeping_engine_holds_no_memory_and_samples_nothing_before_a_new_version_is_proven(folders):
    engine = make(folders["tied"])
    engine.submit(various(3))
    with pytest.raises(AsyncRLError, match="9 samples run"):
        engine.sleep()
    expected = drain(engine)
    assert engine._cache.nbytes > 0
    engine.sleep()
    engine.sleep()
    storages = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in engine._model.parameters()}
    assert sum(storages.values()) + engine._cache.nbytes + engine._weights._flat.nbytes < 1000
    assert not engine.proven
    engine.wake()
    engine.wake()
    engine.submit(various(3))
    with pytest.raises(WeightsError, match="no proven version"):
        engine.step(0.0)
    engine.load_weights(*published(plain(folders["tied"]), version=1))
    assert engine.proven
    assert 0 < engine.last_pause_s < 10
    for key, c in drain(engine).items():
        assert c.tokens.tolist() == expected[key].tokens.tolist()
        assert set(c.versions.tolist()) == {1}


def test_a_version_of_another_model_does_not_wake_it(folders):
    engine = make(folders["tied"])
    engine.sleep()
    manifest, data = published(plain(folders["tied"]), version=1)
    first, *rest = manifest.tensors
    wrong, _ = published(plain(folders["tied"]), tensors=(Tensor(first.name, first.dtype, (32, VOCAB), 0), *rest))
    with pytest.raises(WeightsError, match=r"embed_tokens\.weight is float32 \[32, 40\]"):
        engine.load_weights(wrong, data)
    assert not engine.proven
    engine.load_weights(manifest, data)
    assert engine.proven


def test_a_bfloat16_model_gives_float32_logprobs(folders):
    engine, model = make(folders["grouped"], dtype=torch.bfloat16), plain(folders["grouped"], torch.bfloat16)
    requests = various(4)
    engine.submit(requests)
    for (request_id, _), c in drain(engine).items():
        expected = logprobs_of(model, requests[request_id].prompt, c.tokens)
        assert np.abs(c.logprobs - expected).mean() < 0.1  # bfloat16 has 8 bits; logits here reach 10
        assert c.logprobs.dtype == np.float32


def test_long_prompts_are_read_in_chunks_of_bounded_size():
    assert list(_chunks([], 10)) == []
    assert list(_chunks([3, 3, 3, 3], 10)) == [(0, 3), (3, 4)]
    assert list(_chunks([1, 1, 9, 1], 10)) == [(0, 2), (2, 3), (3, 4)]  # padding counts: 2 x 9 > 10
    assert list(_chunks([50, 2], 10)) == [(0, 1), (1, 2)]


def test_chunks_of_prompts_and_logits_change_nothing(folders, monkeypatch):
    runs = []
    for prefill_tokens, logits in ((16_384, 1 << 23), (4, 3 * VOCAB)):
        monkeypatch.setattr(torch_engine, "_PREFILL_TOKENS", prefill_tokens)
        monkeypatch.setattr(torch_engine, "_LOGITS", logits)
        engine = make(folders["grouped"], slots=64)
        engine.submit(various(9))
        runs.append({key: c.tokens.tolist() for key, c in drain(engine).items()})
    assert runs[0] == runs[1]
