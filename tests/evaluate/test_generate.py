"""Sampling: the cache, greedy choice, the nucleus, seeds and refusals."""

from argparse import Namespace

import pytest
import torch

from meshwright.cli.generate import loaded
from meshwright.errors import ConfigError
from meshwright.models import KVCache, build_model, init_model
from meshwright.models.generate import generate, generate_tokens, nucleus, sample
from meshwright.models.hf import save_hf
from meshwright.spec.resolve import model_spec

BASE = {"vocab_size": 50, "dim": 32, "n_layers": 2, "n_heads": 4, "context": 40, "init_std": 0.3}
FAMILIES = {
    "llama": {"n_kv_heads": 2},
    "neox": {"family": "neox", "parallel_residual": True, "rotary_pct": 0.5},
}


@pytest.fixture(params=sorted(FAMILIES))
def model(request):
    spec = model_spec(**BASE, **FAMILIES[request.param])
    return init_model(build_model(spec, device="cpu"), spec, seed=0)


def prompt(*shape, seed=1):
    return torch.randint(0, 50, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("cuts", [[20], [1] * 20, [7, 1, 1, 11], [5, 15]])
def test_cached_logits_are_the_uncached(model, cuts):
    ids, cache, start, found = prompt(2, 20), KVCache(20), 0, []
    with torch.no_grad():
        for cut in cuts:
            found.append(model(ids[:, start : start + cut], cache=cache))
            start += cut
            assert cache.length == start
        torch.testing.assert_close(torch.cat(found, 1), model(ids), atol=1e-5, rtol=0)


def test_a_full_cache_is_refused(model):
    cache = KVCache(4)
    model(prompt(1, 3), cache=cache)
    with pytest.raises(ConfigError, match="holds 3 of at most 4 positions; 2 more do not fit"):
        model(prompt(1, 2), cache=cache)


def test_segments_and_cache_are_refused(model):
    with pytest.raises(ConfigError, match="segments"):
        model(prompt(1, 3), segments=torch.zeros(1, 3, dtype=torch.int64), cache=KVCache(4))


def test_greedy_is_the_argmax_without_a_cache(model):
    ids = prompt(3, 5)
    found = generate(model, ids, 12, temperature=0)
    expected = ids
    with torch.no_grad():
        for _ in range(12):
            expected = torch.cat([expected, model(expected)[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, expected)


def test_seed_repeats_and_matters(model):
    first, again, other = (generate(model, prompt(2, 4), 20, seed=s) for s in (5, 5, 6))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert first.shape == (2, 24)


def test_streaming_yields_what_generate_returns(model):
    ids = prompt(2, 4)
    stream = generate_tokens(model, ids, 8, seed=2)
    first = next(stream)
    assert torch.is_grad_enabled()  # the caller's own code between tokens is left alone
    rest = torch.stack([first, *stream], 1)
    assert torch.equal(rest, generate(model, ids, 8, seed=2)[:, 4:])


def test_nothing_is_kept_for_a_backward(model):
    seen = []
    model.layers["0"].register_forward_hook(lambda *args: seen.append(args[-1].requires_grad))
    generate(model, prompt(1, 4), 2)
    assert seen == [False, False]


def test_end_of_text(model):
    ids = prompt(2, 4)
    free = generate(model, ids, 12, temperature=0)
    eos = int(free[0, 6])
    found = generate(model, ids, 12, temperature=0, eos_id=eos)
    for row, whole in zip(found, free, strict=True):
        new = whole[4:].tolist()
        stop = new.index(eos) if eos in new else len(new)
        assert row[4 : 4 + stop].tolist() == new[:stop]
        assert (row[4 + stop :] == eos).all()
    alone = generate(model, ids[:1], 12, temperature=0, eos_id=eos)
    assert alone[0, -1] == eos  # it ended there
    assert alone.shape[1] <= 7
    assert (alone[0, 4:-1] != eos).all()


def test_nothing_new_is_the_prompt(model):
    ids = prompt(1, 4)
    assert torch.equal(generate(model, ids, 0), ids)


def test_nucleus_keeps_the_smallest_sufficient_set():
    p = torch.tensor([[0.1, 0.5, 0.05, 0.35], [0.25, 0.25, 0.25, 0.25]], dtype=torch.float64)
    assert nucleus(p, 0.5)[0].tolist() == [0, 0.5, 0, 0]
    assert nucleus(p, 0.8)[0].tolist() == [0, 0.5, 0, 0.35]
    assert nucleus(p, 0.9)[0].tolist() == [0.1, 0.5, 0, 0.35]
    assert nucleus(p, 1e-6)[0].tolist() == [0, 0.5, 0, 0]
    assert (nucleus(p, 0.5)[1] > 0).sum() == 2


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (1.0, 0.8), (2.0, 1.0), (0.5, 0.9)])
def test_samples_have_the_distribution(temperature, top_p):
    logits = torch.tensor([0.1, 0.5, 0.05, 0.35]).log()
    count = 20_000
    drawn = sample(logits.expand(count, 4), temperature, top_p, torch.Generator().manual_seed(0))
    weights = torch.tensor([0.1, 0.5, 0.05, 0.35]) ** (1 / temperature)
    expected = weights / weights.sum()
    kept = {1.0: 4, 0.8: 2, 0.9: 2}[top_p]  # at temperature 0.5 the two likeliest hold 0.97
    floor = expected.sort(descending=True).values[kept - 1]
    expected = torch.where(expected >= floor, expected, 0)
    expected = expected / expected.sum()
    found = torch.bincount(drawn, minlength=4) / count
    error = (expected * (1 - expected) / count).sqrt()
    assert ((found - expected).abs() <= 5 * error).all()


REFUSED = [
    ({"max_new_tokens": 37}, "prompt of 4 tokens and max_new_tokens = 37 exceed .* context of 40; "
     "nearest legal: max_new_tokens = 36"),
    ({"max_new_tokens": -1}, "max_new_tokens = -1"),
    ({"temperature": -0.1}, "temperature = -0.1"),
    ({"temperature": float("nan")}, "temperature = nan"),
    ({"top_p": 0.0}, "top_p = 0.0"),
    ({"top_p": 1.5}, "top_p = 1.5"),
]  # fmt: skip


@pytest.mark.parametrize(("settings", "message"), REFUSED)
def test_settings_out_of_range(model, settings, message):
    with pytest.raises(ConfigError, match=message):
        generate_tokens(model, prompt(1, 4), **{"max_new_tokens": 2, **settings})


def test_bad_prompts(model):
    with pytest.raises(ConfigError, match="at least one token"):
        generate(model, torch.zeros(1, 0, dtype=torch.int64), 2)
    with pytest.raises(ConfigError, match=r"token 50, .* 0\.\.49"):
        generate(model, torch.tensor([[3, 50]]), 2)
    with pytest.raises(ConfigError, match="Crop the prompt to 30 tokens"):
        generate(model, prompt(1, 41), 10)


def test_the_whole_context_can_be_used(model):
    assert generate(model, prompt(1, 4), 36).shape == (1, 40)


@pytest.mark.parametrize(("dim", "threads"), [(32, 1), (288, 2)])
def test_a_narrow_model_generates_by_one_thread(tmp_path, dim, threads):
    spec = model_spec(**{**BASE, "vocab_size": 257, "dim": dim})
    save_hf(init_model(build_model(spec, device="cpu"), spec, seed=0), tmp_path)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with loaded(Namespace(folder=str(tmp_path), tokenizer="bytes")):
            assert torch.get_num_threads() == threads
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
