"""Tokens that a model continues with, under every plan those of one process, and training as if they had not been."""

from __future__ import annotations

import functools
import json
import os
import warnings
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

import paceline
from paceline.comm import api
from paceline.nouns.decoding import Decoding
from paceline.nouns.errors import PacelineError, UsageError, WorkloadError
from paceline.nouns.plan import Plan
from paceline.train.generate import call_model, call_with_cache
from paceline.train.job import Job

from support.decoders import DECODERS, LENGTH, WORDS, Decoder, loss, model_of, samples, workload
from support.ranks import preload, run_ranks

preload("transformers.models.gpt2.modeling_gpt2", "transformers.models.llama.modeling_llama")

PROMPTS = [[1, 2, 3], [5, 7], [10, 12, 14, 16], [0], [40, 41, 42]]
NEW = 8
PLANS = ["replicate=2", "shard=2", "shard=2,zero=1", "shard=2,zero=2", "tensor=2", "pipeline=2", "replicate=2,tensor=2"]
SAMPLED = {"temperature": 1.3, "top_k": 20, "top_p": 0.9, "seed": 5}


def as_lists(rows):
    return [row.tolist() for row in rows]


def made(job):
    """Tokens in the middle of training: greedy and drawn, with and without a cache."""
    return {
        "greedy": as_lists(job.generate(PROMPTS, NEW, cache=False)),
        "greedy, cache": as_lists(job.generate(PROMPTS, NEW, cache=True)),
        "drawn": as_lists(job.generate(PROMPTS, NEW, **SAMPLED)),
        "to an end": as_lists(job.generate(PROMPTS, NEW, end=(9, 17, 43))),
    }


def train(job, at=3):
    losses, tokens = [], None
    for batch in job.batches():
        losses.append(job.step(batch))
        if job.step_number == at:
            tokens = made(job)
    return losses, tokens


def train_all(rank, cells):
    api.init()
    results = {}
    for name, plan in cells:
        job = Job(workload(name), Plan.parse(plan))
        results[name, plan] = train(job)
        job.close()
    return results


@functools.cache
def results(plan):
    return run_ranks(Plan.parse(plan).world_size, train_all, [(name, plan) for name in DECODERS], timeout_s=300)


@functools.cache
def by_hand(name):
    """Greedy tokens after three steps, one row after another, in a plain loop."""
    api.init()
    job = Job(workload(name), Plan())
    for batch in job.batches():
        job.step(batch)
        if job.step_number == 3:
            break
    job.model.eval()
    found = []
    for prompt in PROMPTS:
        row = list(prompt)
        for _ in range(NEW):
            with torch.no_grad():
                result = job.model(torch.tensor([row]))
            row.append(int(getattr(result, "logits", result)[0, -1].argmax()))
        found.append(row)
    return found


@pytest.mark.parametrize("name", DECODERS)
@pytest.mark.parametrize("plan", ["replicate=1", *PLANS])
def test_tokens_are_those_of_one_process(plan, name):
    expected = results("replicate=1")[0][name, "replicate=1"][1]
    assert expected["greedy"] == expected["greedy, cache"] == by_hand(name)
    assert expected["drawn"] != expected["greedy"]
    for answers in results(plan):
        assert answers[name, plan][1] == expected


@pytest.mark.parametrize("name", DECODERS)
def test_a_row_ends_with_its_end_token(name):
    found = results("replicate=1")[0][name, "replicate=1"][1]
    for row, whole, prompt in zip(found["to an end"], found["greedy"], PROMPTS, strict=True):
        ends = [at for at, token in enumerate(whole) if at >= len(prompt) and token in (9, 17, 43)]
        assert row == whole[: ends[0] + 1 if ends else None]


def train_twice(rank, plan):
    """The losses of a model that drops out, with and without tokens in between."""
    api.init()
    found = []
    for at in (3, 0):
        job = Job(workload("plain", model=lambda: Decoder(dropout=0.2)), Plan.parse(plan))
        losses, tokens = train(job, at)
        assert (tokens is None) == (at == 0)
        found.append(losses)
        job.close()
    return found


@pytest.mark.parametrize("plan", ["replicate=2", "shard=2", "tensor=2", "pipeline=2"])
def test_training_goes_on_bit_for_bit(plan):
    for with_tokens, without in run_ranks(2, train_twice, plan):
        assert with_tokens == without


def loop(rank, plan, is_generating):
    """A plain loop, whose gradients are summed early from the third step on."""
    os.environ["PACELINE_PLAN"] = json.dumps(asdict(Plan.parse(plan)))
    model = model_of("plain").double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    loader = DataLoader(samples(), batch_size=8, shuffle=True)
    job, model, optimizer, loader = paceline.prepare(model, optimizer, loader)
    tokens, losses = None, []
    for _ in job.epochs(3):
        for batch in loader:
            optimizer.zero_grad()
            total, weight = loss(model, batch)
            job.backward(total / weight)
            optimizer.step()
            if is_generating and job.step_number in (3, 6):
                tokens = as_lists(job.generate(PROMPTS, NEW)), as_lists(job.generate(PROMPTS, NEW, **SAMPLED))
            losses.append(total.item())
    return tokens, losses


@functools.cache
def looped(plan, is_generating=True):
    return run_ranks(Plan.parse(plan).world_size, loop, plan, is_generating, timeout_s=300)


LOOPS = ["replicate=2", "shard=2,zero=1", "shard=2,zero=2", "shard=2", "tensor=2", "replicate=4"]


@pytest.mark.parametrize("plan", LOOPS)
def test_a_loop_generates_between_its_steps(plan):
    ((expected, _),) = looped("replicate=1")
    without = looped(plan, is_generating=False)
    for (tokens, losses), (_, plain) in zip(looped(plan), without, strict=True):
        assert tokens == expected
        assert losses == plain


class Encoder(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.words = torch.nn.Embedding(WORDS, 8)
        self.head = torch.nn.Linear(8, 3)

    def forward(self, tokens):
        return self.head(self.words(tokens).mean(1))


class Looking(Encoder):
    """It sees the tokens that follow."""

    def forward(self, tokens):
        hidden = self.words(tokens)
        return self.head(hidden + hidden.mean(1, keepdim=True))


class NoTokens(Encoder):
    def forward(self, tokens, mask):
        return tokens


def job_of(model, **options):
    api.init()
    job, *_ = paceline.prepare(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return job


def bert():
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(vocab_size=WORDS, hidden_size=8, num_hidden_layers=1, num_attention_heads=2))


ERRORS = {
    "no logits of positions": (Encoder, {}, "the model returns logits of shape (1, 3)"),
    "not causal": (Looking, {}, "other tokens after a position changed its logits"),
    "no call with tokens alone": (NoTokens, {}, "missing 1 required positional argument: 'mask'"),
    "no head": (bert, {}, "BertModel has no head for it"),
    "too long": (lambda: model_of("gpt2"), {"max_new_tokens": LENGTH}, f"the model has {LENGTH} positions"),
    "too long for plain torch": (Decoder, {"max_new_tokens": LENGTH}, "IndexError"),
    "no cache": (Looking, {"cache": True}, "its forward takes no `cache`"),
    "text": (Decoder, {"prompts": ["a"]}, "row 0 is text"),
    "one text": (Decoder, {"prompts": "a"}, "they are a str"),
    "no row": (Decoder, {"prompts": []}, "there is none"),
    "an empty row": (Decoder, {"prompts": [[1], []]}, "row 1 has the shape (0,)"),
    "numbers": (Decoder, {"prompts": torch.rand(2, 3)}, "torch.float32"),
    "three dims": (Decoder, {"prompts": torch.zeros(2, 3, 4, dtype=torch.int64)}, "row 0 has the shape (3, 4)"),
    "a token below 0": (Decoder, {"prompts": [[1, -1]]}, "row 0 has the token -1"),
    "a token beyond the vocabulary": (Decoder, {"prompts": [[WORDS]]}, "IndexError"),
    "another model": (Decoder, {"model": Encoder()}, "should be one of the job's"),
    "misspelt": (Decoder, {"temp": 1.0}, "temperature"),
    "no tokens": (Decoder, {"max_new_tokens": 0}, "max_new_tokens"),
    "temperature": (Decoder, {"temperature": -1}, "temperature"),
    "top_p": (Decoder, {"temperature": 1, "top_p": 0}, "top_p"),
    "top_k": (Decoder, {"temperature": 1, "top_k": 0.5}, "top_k"),
    "end": (Decoder, {"end": "."}, "a token's number"),
    "no draws": (Decoder, {"top_k": 5}, "the temperature is 0"),
    "cache": (Decoder, {"cache": "yes"}, "cache of job.generate should be"),
}


@pytest.mark.parametrize("name", ERRORS)
def test_misuse_is_said_and_the_model_is_as_it_was(name):
    make, options, said = ERRORS[name]
    given = {"prompts": [[1, 2]], "max_new_tokens": 3, **options}
    job = job_of(make())
    with pytest.raises(PacelineError) as caught:
        job.generate(**given)
    assert said in str(caught.value)
    assert job.model.training


def test_of_several_models_one_is_named():
    api.init()
    first, second = Decoder(), Decoder()
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=0.1)
    job, first, second, optimizer = paceline.prepare(first, second, optimizer)
    with pytest.raises(WorkloadError, match=r"paceline\.prepare was handed 2"):
        job.generate([[1]], 3)
    assert as_lists(job.generate([[1]], 3, model=first)) == as_lists(job_of(first).generate([[1]], 3))
    assert as_lists(job.generate([[1]], 8, model=first)) != as_lists(job.generate([[1]], 8, model=second))


def ask_apart(rank):
    api.init()
    job = Job(workload("plain"), Plan.parse("replicate=2"))
    try:
        job.generate([[1 + rank]], 2)
    except WorkloadError as error:
        return str(error)


def test_other_prompts_on_a_rank_are_refused():
    for text in run_ranks(2, ask_apart):
        assert "the same prompts and options on every rank" in text


def test_draws_are_of_the_logits_shares():
    logits = torch.tensor([1.0, 3.0, 2.0, -1.0], dtype=torch.float64)
    draws = 4000

    def shares(**options):
        decoding = Decoding(max_new_tokens=1, **options)
        counts = torch.bincount(torch.tensor([decoding.choose(logits, row, 0) for row in range(draws)]), minlength=4)
        return counts / draws

    assert torch.allclose(shares(temperature=1.0), logits.softmax(0).float(), atol=0.03)
    assert torch.allclose(shares(temperature=2.0), (logits / 2).softmax(0).float(), atol=0.03)
    assert torch.allclose(shares(temperature=1.0, seed=1), logits.softmax(0).float(), atol=0.03)
    two = torch.tensor([0.0, 3.0, 2.0, 0.0]).double()
    expected = torch.where(two > 0, two, -torch.inf).softmax(0).float()
    assert torch.allclose(shares(temperature=1.0, top_k=2), expected, atol=0.03)
    assert torch.allclose(shares(temperature=1.0, top_p=0.7), expected, atol=0.03)  # 0.66 and 0.24
    assert shares(temperature=1.0, top_p=0.6).tolist() == [0, 1, 0, 0]
    with pytest.raises(UsageError):
        Decoding(max_new_tokens=1, temperature=True)


class OfOlderTransformers(torch.nn.Module):
    """As models of transformers are called whose cache is `past_key_values`."""

    config = None
    prepare_inputs_for_generation = print

    def forward(self, input_ids, past_key_values=None, use_cache=None):
        past = [*(past_key_values or []), *input_ids[0].tolist()]
        return SimpleNamespace(logits=torch.zeros(*input_ids.shape, 2), past_key_values=past)


def test_generate_cache_has_its_name_in_installed_transformers():
    cache = {}
    for token in (3, 4):
        call_with_cache(OfOlderTransformers(), torch.tensor([[token]]), cache)
    assert cache["past"] == [3, 4]
    model = model_of("gpt2").eval()
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("error")  # none about a name that will go
        cache = {}
        call_with_cache(model, torch.tensor([[3]]), cache)
        last = call_with_cache(model, torch.tensor([[4]]), cache)[:, -1]
        torch.testing.assert_close(last, call_model(model, torch.tensor([[3, 4]]))[:, -1])


class Returning(Decoder):
    """Logits among other things."""

    def __init__(self, form):
        super().__init__()
        self.form = form

    def forward(self, tokens, cache=None):
        logits = super().forward(tokens, cache)
        return self.form(logits)


FORMS = {
    "with a loss": lambda logits: (logits, None),
    "after a loss": lambda logits: (logits.mean(), logits),
    "with what it keeps": lambda logits: [logits, (logits, logits)],
    "a dict": lambda logits: {"loss": logits.mean(), "logits": logits},
    "a dict by another name": lambda logits: {"scores": logits, "loss": logits.mean()},
    "an object": lambda logits: SimpleNamespace(logits=logits, hidden=logits),
}


@pytest.mark.parametrize("form", FORMS)
def test_logits_are_found_in_what_a_model_returns(form):
    torch.manual_seed(3)
    plain = Decoder()
    other = Returning(FORMS[form])
    other.load_state_dict(plain.state_dict())
    for cache in (False, True):
        expected = as_lists(job_of(plain).generate(PROMPTS, 3, cache=cache))
        assert as_lists(job_of(other).generate(PROMPTS, 3, cache=cache)) == expected


NO_LOGITS = {
    "two that could be them": (lambda logits: (logits, logits), "several tensors that could be them"),
    "those of the last position": (lambda logits: (logits[:, [-1]], None), "a tuple with tensors of shape (1, 1, 48)"),
    "none": (lambda logits: (None, "x"), "the model returns a tuple"),
    "another name": (lambda logits: SimpleNamespace(scores=logits), "the model returns a SimpleNamespace"),
}


@pytest.mark.parametrize("form", NO_LOGITS)
def test_what_may_be_no_logits_is_refused(form):
    make, said = NO_LOGITS[form]
    with pytest.raises(WorkloadError) as caught:
        job_of(Returning(make)).generate([[1, 2]], 3, cache=False)
    assert said in caught.value.found


def pairs(rank, plan):
    api.init()
    job = Job(workload("plain", model=lambda: Returning(FORMS["with a loss"]), loss=loss_of_pair), Plan.parse(plan))
    for batch in job.batches():
        job.step(batch)
    found = as_lists(job.generate(PROMPTS, NEW))
    job.close()
    return found


def loss_of_pair(model, batch):
    return loss(lambda tokens: model(tokens)[0], batch)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["shard=2", "tensor=2", "pipeline=2"])
def test_a_pair_is_understood_under_every_plan(plan):
    torch.manual_seed(3)
    (expected,) = run_ranks(1, pairs, "replicate=1")
    for found in run_ranks(2, pairs, plan, timeout_s=300):
        assert found == expected
