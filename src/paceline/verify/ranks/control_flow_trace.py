"""Which way the person's code went where it looked at a tensor's value, with the line that looked."""

from __future__ import annotations

import sys
from types import TracebackType
from typing import Any

import torch


class Branches:
    """A context: `taken` are (file:line, outcome) of every `if` on a tensor inside it."""

    def __init__(self) -> None:
        self.taken: list[tuple[str, bool]] = []
        self.plain: Any = None

    def __enter__(self) -> Branches:
        self.plain = plain = torch.Tensor.__bool__

        def noted(tensor: torch.Tensor) -> bool:
            outcome: bool = plain(tensor)
            frame = sys._getframe(1)
            self.taken.append((f"{frame.f_code.co_filename}:{frame.f_lineno}", outcome))
            return outcome

        torch.Tensor.__bool__ = noted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        torch.Tensor.__bool__ = self.plain  # type: ignore[method-assign]
