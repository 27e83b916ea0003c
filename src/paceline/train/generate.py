"""Continue sequences of tokens with the model as the plan has it: `job.generate`.

Two ways compute the next tokens. Without a cache each token takes a pass over the whole sequence, padded on its right
to one length: a causal model does not see what follows, and a captured graph has one shape. With a cache of keys and
values each token takes a pass only over itself, by the model's own code: under `tensor` and `pipeline`, whose graphs
have no cache, on a whole copy of the model that each rank makes for the call.

A row's tokens don't depend on the others: greedy ones are those of the largest logit, and drawn ones come from a number
that the seed, the row and the position determine. Ranks take rows in turn, so any number of them gives the same.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from paceline.comm.collectives import AxisComm
from paceline.nouns.decoding import Decoding
from paceline.nouns.errors import WorkloadError
from paceline.train.agree import fail_together

Evaluate = Callable[[str, Any, Any], Any]
Rows = dict[int, torch.Tensor]  # by number: the prompts, or what is made of them


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Which rows this rank takes, and which ranks go on together.

    Attributes:
        part, parts: the number of this rank among those with different rows, and their number.
        alike: the communicator of the ranks with the same rows; they take the tokens of the first.
        together: the communicator of the ranks that call the model equally often; None: each goes at its own pace.
        world: the communicator of all ranks.
    """

    part: int
    parts: int
    alike: AxisComm
    together: AxisComm | None
    world: AxisComm


def generate(prompts: Rows, decoding: Decoding, step: Step, ranks: Ranks) -> list[torch.Tensor]:
    """Return each row with its new tokens, up to and with the first end token; the same on every rank. Collective.

    Args:
        prompts: the tokens of each row, a vector.
        decoding: the number of tokens, and the way in which they are chosen.
        step: the step that computes the logits.
        ranks: the ranks, and the rows of each.
    """
    generated: Rows = {}
    failure = None
    try:
        for group in step.groups(prompts):
            own_rows = group[ranks.part :: ranks.parts]
            if not own_rows and ranks.together is None:
                continue
            # A rank without a row of the group computes along with the first.
            rows = {row: prompts[row] for row in own_rows or group[:1]}
            found = _continue(rows, decoding, step, ranks)
            generated.update({row: found[row] for row in own_rows})
    except Exception as error:
        if ranks.together is not None:  # the others fail too, or wait for this rank elsewhere
            raise
        failure = error
    if ranks.together is None:
        fail_together("job.generate", failure, ranks.world)
    return _of_all(generated, len(prompts), ranks)


def _continue(rows: Rows, decoding: Decoding, step: Step, ranks: Ranks) -> Rows:
    """Return rows with their new tokens."""
    step.begin(rows, decoding.max_new_tokens)
    generated = {row: tokens.tolist() for row, tokens in rows.items()}
    lengths = {row: len(tokens) for row, tokens in rows.items()}
    ended: set[int] = set()
    for number in range(decoding.max_new_tokens):
        logits = step.logits()
        chosen = torch.tensor([decoding.choose(logits[at], row, number) for at, row in enumerate(rows)])
        ranks.alike.broadcast(chosen, 0)
        step.append(chosen)
        for row, token in zip(rows, chosen.tolist(), strict=True):
            generated[row].append(token)
            if token in decoding.end_tokens:
                ended.add(row)
        if decoding.end_tokens and _have_all_ended(len(ended) == len(rows), ranks):
            break
    return {row: torch.tensor(_up_to_end(generated[row], lengths[row], decoding.end_tokens)) for row in rows}


def _have_all_ended(is_done: bool, ranks: Ranks) -> bool:
    if ranks.together is None:
        return is_done
    flag = torch.tensor([int(not is_done)])
    ranks.together.all_reduce(flag)
    return int(flag) == 0


def _up_to_end(tokens: list[int], length: int, end_tokens: Sequence[int]) -> list[int]:
    for at in range(length, len(tokens)):
        if tokens[at] in end_tokens:
            return tokens[: at + 1]
    return tokens


def _of_all(generated: Rows, count: int, ranks: Ranks) -> list[torch.Tensor]:
    """Return every row on every rank. Collective."""
    numbers: list[int] = []
    for row, tokens in generated.items():
        numbers += [row, len(tokens), *tokens.tolist()]
    rows: Rows = {}
    for sent in ranks.world.all_gather(torch.tensor(numbers, dtype=torch.int64)):
        values = sent.tolist()
        at = 0
        while at < len(values):
            row, length = values[at : at + 2]
            rows[row] = torch.tensor(values[at + 2 : at + 2 + length])
            at += 2 + length
    return [rows[row] for row in range(count)]


class Step:
    """Computes the logits of the next token of each row, again and again."""

    def groups(self, prompts: Rows) -> list[list[int]]:
        """Return the groups of rows that go through the model together."""
        raise NotImplementedError

    def begin(self, rows: Rows, new_tokens: int) -> None:
        """Begin with these rows."""
        raise NotImplementedError

    def logits(self) -> torch.Tensor:
        """Return (rows, vocabulary): the logits of the token that follows each row."""
        raise NotImplementedError

    def append(self, tokens: torch.Tensor) -> None:
        """Add a token to each row."""
        raise NotImplementedError


class WholeStep(Step):
    """Computes each token from the whole sequence.

    Args:
        evaluate: a function that runs `function(model, batch)`, as `Parallel.evaluate` does.
        choose: a function that returns the model to call; it is handed the one that `evaluate` gives.
        device: the device of the model.
    """

    def __init__(self, evaluate: Evaluate, choose: Callable[[Any], Any], device: torch.device) -> None:
        self.evaluate = evaluate
        self.choose = choose
        self.device = device
        self.is_checked = False

    def groups(self, prompts: Rows) -> list[list[int]]:
        """Return one group: rows are padded."""
        return [list(prompts)]

    def begin(self, rows: Rows, new_tokens: int) -> None:
        """Pad the rows to the length that the longest will have."""
        lengths = [len(tokens) for tokens in rows.values()]
        self.tokens = torch.zeros(len(rows), max(lengths) + new_tokens, dtype=torch.int64, device=self.device)
        for number, tokens in enumerate(rows.values()):
            self.tokens[number, : len(tokens)] = tokens
        self.at = torch.tensor(lengths, device=self.device)

    def logits(self) -> torch.Tensor:
        """Return the logits at the last token of each row."""
        found = self._run(self.tokens)
        if not self.is_checked:
            self.is_checked = True
            self._check_is_causal(found)
        return found

    def _run(self, tokens: torch.Tensor) -> torch.Tensor:
        choose = self.choose

        def last(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            logits = call_model(choose(model), batch["tokens"])
            at = (batch["at"] - 1)[:, None, None].expand(-1, 1, logits.shape[-1])
            return {"logits": logits.gather(1, at).squeeze(1)}

        # Of one name: a graph is captured once for these shapes.
        found: torch.Tensor = self.evaluate("generate", last, {"tokens": tokens, "at": self.at})["logits"]
        return found.double().cpu()

    def _check_is_causal(self, logits: torch.Tensor) -> None:
        """Raise WorkloadError if padding changes the logits before it."""
        places = torch.arange(self.tokens.shape[1], device=self.device)
        is_padding = places >= self.at[:, None]
        changed = self._run(torch.where(is_padding, torch.ones_like(self.tokens), self.tokens))
        scale = logits.abs().max().clamp(min=1.0)
        if (changed - logits).abs().max() > 1e-2 * scale:
            raise WorkloadError(
                "job.generate needs a causal model, whose logits depend on the tokens before alone",
                "other tokens after a position changed its logits",
                "generate with a decoder; mask attention so that a position sees no later one",
            )

    def append(self, tokens: torch.Tensor) -> None:
        """Put a token after each row."""
        self.tokens[torch.arange(len(tokens), device=self.device), self.at] = tokens.to(self.device)
        self.at = self.at + 1


class CachedStep(Step):
    """Computes each token from a cache of the keys and values of those before.

    Args:
        evaluate, choose, device: the arguments of `WholeStep`; the model's own code runs.
    """

    def __init__(self, evaluate: Evaluate, choose: Callable[[Any], Any], device: torch.device) -> None:
        self.evaluate = evaluate
        self.choose = choose
        self.device = device

    def groups(self, prompts: Rows) -> list[list[int]]:
        """Return rows of one length together: a cache has one."""
        by_length: dict[int, list[int]] = {}
        for row, tokens in prompts.items():
            by_length.setdefault(len(tokens), []).append(row)
        return list(by_length.values())

    def begin(self, rows: Rows, new_tokens: int) -> None:
        """Begin with an empty cache."""
        self.tokens = torch.stack(list(rows.values())).to(self.device)
        self.cache: dict[Any, Any] = {}

    def logits(self) -> torch.Tensor:
        """Return the logits of the newest position, and keep the cache."""

        def last(model: Any, batch: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
            return {"logits": call_with_cache(self.choose(model), batch["tokens"], self.cache)[:, -1]}

        found: torch.Tensor = self.evaluate("generate", last, {"tokens": self.tokens})["logits"]
        return found.double().cpu()

    def append(self, tokens: torch.Tensor) -> None:
        """Have the next pass take only these tokens."""
        self.tokens = tokens[:, None].to(self.device)


def is_of_transformers(model: nn.Module) -> bool:
    """True for a model of transformers, or around one, as peft's: it takes `input_ids` and may keep a cache."""
    return callable(getattr(model, "prepare_inputs_for_generation", None)) and hasattr(model, "config")


def can_cache(model: nn.Module) -> bool:
    """True if the model's own code can go on from a cache."""
    if is_of_transformers(model):
        return True
    return "cache" in inspect.signature(model.forward).parameters


def check_generates(model: nn.Module, longest: int) -> None:
    """Raise WorkloadError for a model that tells by its config that it can't generate, or not so many tokens.

    Args:
        model: the user's model.
        longest: the number of tokens of the longest row with its new ones.
    """
    config = getattr(model, "config", None)
    can_generate = getattr(model, "can_generate", None)
    if hasattr(config, "to_json_string") and not (callable(can_generate) and can_generate()):
        raise WorkloadError(
            "job.generate needs a model that gives logits of the next token",
            f"{type(model).__name__} has no head for it",
            "take e.g. AutoModelForCausalLM in place of the model without a head",
        )
    limit = getattr(config, "max_position_embeddings", None) or getattr(config, "n_positions", None)
    if isinstance(limit, int) and longest > limit:
        raise WorkloadError(
            f"job.generate was asked for rows of {longest} tokens, their prompts included",
            f"the model has {limit} positions",
            "ask for fewer new tokens, or shorten the prompts",
        )


def call_model(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of every position: (rows, length) to (rows, length, vocabulary).

    Raises:
        WorkloadError: the model gives something else, or fails.
    """
    try:
        result = model(input_ids=tokens, use_cache=False) if is_of_transformers(model) else model(tokens)
    except (IndexError, TypeError) as error:
        raise _fails(tokens, error) from error
    return _checked(result, tokens)


def call_with_cache(model: nn.Module, tokens: torch.Tensor, cache: dict[Any, Any]) -> torch.Tensor:
    """Return the logits of `tokens`, which follow those in the cache, and have the cache hold them too.

    Raises:
        WorkloadError: the model gives something else, or fails.
    """
    try:
        if is_of_transformers(model):
            name = _name_of_cache(model)
            result = model(input_ids=tokens, use_cache=True, **{name: cache.get("past")})
            cache["past"] = getattr(result, name)
        else:
            result = model(tokens, cache=cache)
    except (IndexError, TypeError, ValueError) as error:
        raise _fails(tokens, error) from error
    return _checked(result, tokens)


def _name_of_cache(model: nn.Module) -> str:
    """Return the name of a transformers model's cache: newer versions warn of the older name."""
    return "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"


def _fails(tokens: torch.Tensor, error: Exception) -> WorkloadError:
    return WorkloadError(
        "job.generate calls model(tokens), with (rows, length) token numbers",
        f"with {tuple(tokens.shape)} it fails: {type(error).__name__}: {str(error).splitlines()[0]:.200}",
        "see that the model takes tokens alone, that they are below its vocabulary, and rows no longer than it takes; "
        "with a cache it is model(tokens, cache={}), and the model keeps in the dict what it needs",
    )


def _checked(result: Any, tokens: torch.Tensor) -> torch.Tensor:
    """Return the logits of what a model returns: it, its `logits`, or the one tensor of a tuple that can be them."""
    rows: list[Any] = [getattr(result, "logits", None)]
    if isinstance(result, torch.Tensor):
        rows = [result]
    elif isinstance(result, Mapping):
        rows = [result["logits"]] if "logits" in result else list(result.values())
    elif rows == [None] and isinstance(result, tuple | list):
        rows = list(result)
    found = [row for row in rows if _may_be_logits(row, tokens)]
    if len(found) != 1:
        described = "several tensors that could be them" if found else _described(result, rows)
        raise WorkloadError(
            "job.generate needs the logits of every position: (rows, length, vocabulary)",
            f"for tokens of shape {tuple(tokens.shape)} the model returns {described}",
            "return such a tensor, alone in a tuple such as (logits, loss), or an object with it as .logits",
        )
    return found[0]  # type: ignore[no-any-return]


def _may_be_logits(value: Any, tokens: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dim() == 3 and tuple(value.shape[:2]) == tuple(tokens.shape)


def _described(result: Any, rows: Sequence[Any]) -> str:
    """Return a description of a model's result that has no logits."""
    shapes = [f"{tuple(row.shape)}" for row in rows if isinstance(row, torch.Tensor)]
    if isinstance(result, torch.Tensor) or not shapes:
        return f"logits of shape {shapes[0]}" if shapes else f"a {type(result).__name__}"
    return f"a {type(result).__name__} with tensors of shape {' and '.join(shapes)}"


def whole_copy(
    make: Callable[[], nn.Module], parts: Mapping[str, Any], names: Mapping[str, str], comm: AxisComm
) -> nn.Module:
    """Return a model with the values that all ranks have parts of, whole on this rank. Collective.

    Args:
        make: the function that makes the model, with any values; its random numbers are drawn and put back.
        parts: this rank's parts of parameters and persistent buffers, as `snapshot.model_parts` gives them.
        names: the names of all of them, as `snapshot.names_of_state` gives them.
        comm: the communicator of all ranks.
    """
    from paceline.checkpoint.manifest import MODEL
    from paceline.train.python_state import state_tensors
    from paceline.train.whole_state import put_together

    with torch.random.fork_rng():
        model = make()
    with torch.no_grad():
        for name, tensor in state_tensors(model):
            if names.get(MODEL + name, MODEL + name) == MODEL + name:  # a tied one has its value by the first name
                put_together(tensor, parts.get(MODEL + name), comm)
    return model.eval()


class Evaluating(AbstractContextManager[None]):
    """Have a model in evaluation mode and without gradients; afterwards each module is as it was."""

    def __init__(self, model: nn.Module) -> None:
        self.modes = [(module, module.training) for module in model.modules()]
        self.model = model
        self.no_grad = torch.no_grad()

    def __enter__(self) -> None:
        """Change to evaluation mode."""
        self.model.eval()
        self.no_grad.__enter__()

    def __exit__(self, *error: object) -> None:
        """Put the modes back."""
        self.no_grad.__exit__(None, None, None)
        for module, was_training in self.modes:
            module.training = was_training


def checked_prompts(prompts: Any) -> Rows:
    """Return prompts as vectors of tokens by their number.

    Raises:
        WorkloadError: they are no tensor (rows, length) of whole numbers, and no list of vectors.
    """
    if isinstance(prompts, Mapping | str) or not hasattr(prompts, "__iter__"):
        raise _no_prompts(f"they are a {type(prompts).__name__}")
    rows: Rows = {}
    for number, prompt in enumerate(prompts):
        if isinstance(prompt, str):
            raise _no_prompts(f"row {number} is text")
        try:
            tokens = torch.as_tensor(prompt).detach().cpu()
        except (TypeError, ValueError, RuntimeError):
            raise _no_prompts(f"row {number} is a {type(prompt).__name__}") from None
        if tokens.dim() != 1 or tokens.numel() == 0 or tokens.is_floating_point() or tokens.dtype == torch.bool:
            raise _no_prompts(f"row {number} has the shape {tuple(tokens.shape)} and {tokens.dtype}")
        if bool((tokens < 0).any()):
            raise _no_prompts(f"row {number} has the token {int(tokens.min())}")
        rows[number] = tokens.to(torch.int64)
    if not rows:
        raise _no_prompts("there is none")
    return rows


def _no_prompts(found: str) -> WorkloadError:
    return WorkloadError(
        "job.generate needs prompts of token numbers: a tensor (rows, length), or a list of vectors",
        found,
        "encode text by the tokenizer first; a row needs at least one token, such as that of the beginning",
    )


def check_same_prompts(prompts: Rows, decoding: Decoding, comm: AxisComm) -> None:
    """Raise WorkloadError unless all ranks ask for the same. Collective."""
    text = repr(([tokens.tolist() for tokens in prompts.values()], decoding))
    number = int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little", signed=True)
    rows = comm.all_gather(torch.tensor([number]))
    for rank, row in zip(comm.peers, rows, strict=True):
        if int(row) != number:
            raise WorkloadError(
                "job.generate should be called with the same prompts and options on every rank",
                f"those of rank {comm.peers[comm.rank]} and rank {rank} differ",
                "hand in all rows on every rank: the ranks share them out",
            )
