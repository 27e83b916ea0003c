"""Blocks of tokens: what is trained on, and what is held out."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset

from paceline.nouns.errors import DataError

PAD = -1  # behind a story's end
_PADDED_TO = 64  # so that there are few shapes: under tensor and pipeline each is captured


class Blocks(Dataset[Tensor]):
    """Every block of a text, by its first token, `stride` tokens apart: (block + 1,), for the last is predicted too.

    With a stride of 1 the data's order, which is a function of seed and position alone, makes them random blocks. With
    that of a block each token is predicted once.
    """

    def __init__(self, tokens: np.ndarray, block: int, stride: int = 1, what: str = "the text") -> None:
        if len(tokens) < block + 1:
            raise DataError(
                f"{what} should have a block of {block} tokens and one more",
                f"it has {len(tokens)}",
                f"take a longer text, or write --block {max(len(tokens) - 1, 1)} or less",
            )
        self.tokens, self.block, self.stride = torch.from_numpy(tokens.astype(np.int64)), block, stride

    def __len__(self) -> int:
        return (len(self.tokens) - self.block - 1) // self.stride + 1

    def __getitem__(self, number: int) -> Tensor:
        return self.tokens[number * self.stride : number * self.stride + self.block + 1]


class Stories(Dataset[Tensor]):
    """One story each, behind the token of a beginning, cut where it is longer than a block."""

    def __init__(self, stories: Sequence[np.ndarray], begin: int, block: int) -> None:
        self.rows = [torch.tensor([begin, *story[:block]]) for story in stories]

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> Tensor:
        return self.rows[number]


def pad_up_to(block: int) -> Callable[[list[Tensor]], Tensor]:
    """A collate that pads to a multiple of 64 tokens and one, at most to a block and one."""

    def collate(rows: list[Tensor]) -> Tensor:
        longest = max(len(row) for row in rows) - 1
        length = min(-(-longest // _PADDED_TO) * _PADDED_TO, block) + 1
        return torch.stack([F.pad(row, (0, length - len(row)), value=PAD) for row in rows])

    return collate


def loss_of(are_padded: bool) -> Callable[[torch.nn.Module, Tensor], tuple[Tensor, Tensor | int]]:
    """The workload's loss: the cross entropy of the next tokens added up, and how many there were."""

    def whole(model: torch.nn.Module, rows: Tensor) -> tuple[Tensor, int]:
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        return F.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten(), reduction="sum"), rows[:, 1:].numel()

    def padded(model: torch.nn.Module, rows: Tensor) -> tuple[Tensor, Tensor]:
        labels = rows[:, 1:]
        # What is padded stands behind everything that counts, and a causal model does not look there.
        logits = model(input_ids=rows[:, :-1].clamp(min=0), use_cache=False).logits
        total = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum", ignore_index=PAD)
        return total, (labels != PAD).sum()

    return padded if are_padded else whole
