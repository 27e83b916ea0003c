"""Choose the tokens that `job.generate` makes: their number, and the rule for each."""

from __future__ import annotations

import dataclasses
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from paceline.nouns.errors import UsageError, did_you_mean


@dataclass(frozen=True, slots=True, kw_only=True)
class Decoding:
    """The number of tokens to make, and the rule that chooses each. All numbers are checked when it is made.

    Args:
        max_new_tokens: the largest number of tokens for each row.
        temperature: the divisor of the logits from which tokens are drawn; 0 takes the token of the largest logit.
        top_k: the number of the largest logits among which a token is drawn; 0: among all.
        top_p: the share of the probability that the largest logits must have together; a token is drawn among these
            (Holtzman et al. 2019).
        end: a token, or several, after which a row ends.
        seed: the seed of the draws. A row's draws depend only on it, the row's number and the position.
        cache: True to reuse the keys and values of the tokens before, by the model's own code; None: if the model can,
            and the plan leaves it whole or sharded.

    Raises:
        UsageError: an argument is no such number, or has no effect.

    Examples:
        >>> from paceline.nouns.decoding import Decoding
        >>> Decoding(max_new_tokens=5, temperature=0.7, end=3).end_tokens
        (3,)
    """

    max_new_tokens: int
    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    end: int | tuple[int, ...] | None = None
    seed: int = 0
    cache: bool | None = None

    def __post_init__(self) -> None:
        """Check every number."""
        for name, least in (("max_new_tokens", 1), ("top_k", 0), ("seed", None)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or (least is not None and value < least):
                bound = "" if least is None else f", {least} or more"
                raise _refused(name, value, f"a whole number{bound}")
        if not _is_number(self.temperature) or not 0 <= self.temperature < float("inf"):
            raise _refused("temperature", self.temperature, "a number, 0 or more")
        if not _is_number(self.top_p) or not 0 < self.top_p <= 1:
            raise _refused("top_p", self.top_p, "above 0 and at most 1")
        if self.cache not in (None, True, False):
            raise _refused("cache", self.cache, "True, False or None")
        for token in self.end_tokens:
            if isinstance(token, bool) or not isinstance(token, int) or token < 0:
                raise _refused("end", self.end, "a token's number, or a tuple of them")
        if self.temperature == 0 and (self.top_k or self.top_p < 1 or self.seed):
            raise UsageError(
                "top_k, top_p and seed of job.generate are for tokens that are drawn",
                "the temperature is 0, which takes the token of the largest logit",
                "give a temperature above 0, or leave them out",
            )

    @property
    def end_tokens(self) -> tuple[int, ...]:
        """Return the tokens after which a row ends."""
        if self.end is None:
            return ()
        return self.end if isinstance(self.end, tuple) else (self.end,)

    @classmethod
    def of(cls, max_new_tokens: Any, options: Mapping[str, Any]) -> Decoding:
        """Return the settings from the arguments of `job.generate`.

        Raises:
            UsageError: an option is unknown, or has a value that it can't have.
        """
        known = [field.name for field in dataclasses.fields(cls)]
        for name in options:
            if name not in known:
                fix = did_you_mean(name, known, f"take one of {', '.join(known)}")
                raise UsageError("job.generate takes other options", f"{name!r} is none of them", fix)
        settings = dict(options)
        if isinstance(settings.get("end"), list):
            settings["end"] = tuple(settings["end"])
        return cls(max_new_tokens=max_new_tokens, **settings)

    def choose(self, logits: Any, row: int, number: int) -> int:
        """Return the next token.

        Args:
            logits: the logits of the next token, of shape (vocabulary), in float64.
            row: the number of the row among all prompts.
            number: the number of the new token in the row, from 0.
        """
        if self.temperature == 0:
            return int(logits.argmax())
        # In the order of the logits, so that a cut keeps a beginning; equal ones in that of the vocabulary.
        ordered, tokens = logits.sort(descending=True, stable=True)
        shares = (ordered / self.temperature).softmax(0)
        if self.top_k:
            shares = shares[: self.top_k]
        if self.top_p < 1:
            before = shares.cumsum(0) / shares.sum() - shares / shares.sum()
            shares = shares[before < self.top_p]
        sums = shares.cumsum(0)
        place = int((sums <= self._draw(row, number) * float(sums[-1])).sum())
        return int(tokens[min(place, len(shares) - 1)])

    def _draw(self, row: int, number: int) -> float:
        """Return a number from 0 to below 1 that depends only on the seed, the row and the number."""
        digest = hashlib.sha256(f"{self.seed}/{row}/{number}".encode()).digest()
        return float(int.from_bytes(digest[:8], "little") >> 11) / float(2**53)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _refused(name: str, value: Any, expected: str) -> UsageError:
    return UsageError(f"{name} of job.generate should be {expected}", f"it is {value!r:.60}", "write such a number")
