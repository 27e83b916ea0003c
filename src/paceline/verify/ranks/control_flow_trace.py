"""Record which way the user's code went where it looked at a tensor's value, with the line that looked."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch


class Branches:
    """A context that records in `taken` the (file:line, outcome) of every `if` on a tensor inside it."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, bool]] = []
        self.original: Any = None

    def __enter__(self) -> Branches:
        self.original = original = torch.Tensor.__bool__

        # `if tensor:` calls __bool__; the frame above is the line with the `if`.
        def recorded(tensor: torch.Tensor) -> bool:
            outcome: bool = original(tensor)
            caller = sys._getframe(1)
            self.taken.append((f"{caller.f_code.co_filename}:{caller.f_lineno}", outcome))
            return outcome

        torch.Tensor.__bool__ = recorded  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.Tensor.__bool__ = self.original  # type: ignore[method-assign]
