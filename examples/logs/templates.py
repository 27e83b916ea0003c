"""Log templates of raw lines, by Drain (He, Zhu, Zheng and Lyu 2017, ICWS): a tree of fixed depth.

    python templates.py DIR

prints for each log of loghub's 2,000-line samples in DIR how many templates are found, and the grouping accuracy:
the share of lines whose group has exactly the lines of a group of the labelled file.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from files import open_lines, present, read_csv

from paceline.nouns.errors import DataError, UsageError

ANY = "<*>"
LOGHUB = "https://github.com/logpai/loghub"
_IP = r"(\d+\.){3}\d+"


@dataclass(frozen=True, kw_only=True)
class Format:
    """How a system writes a line, and how Drain groups it.

    Args:
        line: matches a line; its group `content` is what templates are made of, and `label`, where there is one,
            is "-" for a normal line.
        masks: what is a parameter wherever it stands.
        similarity: the share of equal tokens with which a line joins a group.
        tokens: how many of a line's first tokens the tree branches by.
        published: grouping accuracy of Drain on the sample (Zhu et al. 2019, ICSE-SEIP).
    """

    line: str
    masks: tuple[str, ...] = ()
    similarity: float = 0.5
    tokens: int = 2
    published: float | None = None


# Similarity and depth for each system are those with which Zhu et al. measured Drain.
FORMATS = {
    "Apache": Format(line=r"\[.*?\] \[\w+\] (?P<content>.*)", masks=(_IP,), published=1.0),
    "BGL": Format(line=r"(?P<label>\S+)( \S+){5} \S+ \S+ \S+ (?P<content>.*)", masks=(r"core\.\d+",), published=0.963),
    "Hadoop": Format(line=r"\S+ \S+ \S+ +\[.*?\] \S+?: (?P<content>.*)", masks=(_IP,), published=0.948),
    "HDFS": Format(
        line=r"\S+ \S+ \S+ \S+ \S+: (?P<content>.*)", masks=(r"blk_-?\d+", rf"{_IP}(:\d+)?"), published=0.998
    ),
    "Linux": Format(
        line=r"\S+ +\S+ \S+ \S+ .*?(\[\d+\])?: (?P<content>.*)",
        masks=(_IP, r"\d{2}:\d{2}:\d{2}"),
        similarity=0.39,
        tokens=4,
        published=0.690,
    ),
    "OpenSSH": Format(
        line=r"\S+ +\S+ \S+ \S+ sshd\[\d+\]: (?P<content>.*)",
        masks=(_IP, r"([\w-]+\.){2,}[\w-]+"),
        similarity=0.6,
        tokens=3,
        published=0.788,
    ),
    "OpenStack": Format(
        line=r"\S+ \S+ \S+ \S+ \S+ \S+ \[.*?\] (?P<content>.*)",
        masks=(rf"({_IP},?)+", r"/.+?\s", r"\d+"),
        tokens=3,
        published=0.733,
    ),
    "Thunderbird": Format(
        line=r"(?P<label>\S+)( \S+){7} .*?(\[\d+\])?: (?P<content>.*)", masks=(_IP,), published=0.955
    ),
}


@dataclass
class Group:
    """Lines of one template."""

    number: int
    tokens: list[str]


@dataclass
class Drain:
    """Groups lines one after the other; a group's number is its template's.

    Args:
        similarity: the share of equal tokens with which a line joins a group.
        tokens: how many of a line's first tokens the tree branches by.
        most_branches: of one node; what comes later shares one branch.
    """

    similarity: float = 0.5
    tokens: int = 2
    most_branches: int = 100
    groups: list[Group] = field(default_factory=list)
    _leaves: dict[tuple[str, ...], list[Group]] = field(default_factory=dict)
    _branches: dict[tuple[str, ...], set[str]] = field(default_factory=dict)

    def number_of(self, text: str) -> int:
        """Return the number of the line's template, from 0; a new one where none is similar enough."""
        words = text.split()
        leaf = self._leaves.setdefault(self._path(words), [])
        group = self._most_similar(leaf, words)
        if group is None:
            group = Group(len(self.groups), words)
            self.groups.append(group)
            leaf.append(group)
        else:
            group.tokens = [old if old == new else ANY for old, new in zip(group.tokens, words, strict=True)]
        return group.number

    def _path(self, words: Sequence[str]) -> tuple[str, ...]:
        path: tuple[str, ...] = (str(len(words)),)
        for word in words[: self.tokens]:
            branches = self._branches.setdefault(path, set())
            has_digit = any(letter.isdigit() for letter in word)
            if has_digit or (word not in branches and len(branches) >= self.most_branches):
                word = ANY
            branches.add(word)
            path = (*path, word)
        return path

    def _most_similar(self, groups: Sequence[Group], words: Sequence[str]) -> Group | None:
        best, best_score = None, (0.0, 0)
        for group in groups:
            equal = sum(old == new and old != ANY for old, new in zip(group.tokens, words, strict=True))
            score = (equal / max(1, len(words)), group.tokens.count(ANY))
            if score > best_score or best is None:
                best, best_score = group, score
        return best if best is not None and best_score[0] >= self.similarity else None


def find_format(name: str) -> Format:
    """Return how the lines of a log are written.

    Raises:
        UsageError: its format is not known.
    """
    if name not in FORMATS:
        raise UsageError(
            f"--log {name}", f"its format is not known; known are {', '.join(FORMATS)}", "name one of them"
        )
    return FORMATS[name]


def parse(name: str, folder: Path) -> tuple[list[int], list[bool] | None, Drain]:
    """Return each line's template, whether it is an alert (None where the log has no labels), and the parser.

    Raises:
        UsageError: the log is not there, or its format is not known.
        DataError: a line is not in the log's format.
    """
    form = find_format(name)
    path = present(folder, f"{name}_2k.log", f"take {name}/{name}_2k.log from {LOGHUB}")
    return parse_lines(open_lines(path), form, str(path))


def parse_lines(
    lines: Iterable[tuple[int, str]], form: Format, path: str
) -> tuple[list[int], list[bool] | None, Drain]:
    """Do the same with lines and their numbers."""
    pattern = re.compile(form.line)
    masks = [re.compile(mask) for mask in form.masks]
    drain = Drain(form.similarity, form.tokens)
    numbers, alerts = [], []
    for number, line in lines:
        match = pattern.fullmatch(line.rstrip())
        if match is None:
            raise DataError(
                f"{path}, line {number}: a line in the log's format",
                f"it is {line[:80]!r}",
                "mend that line or take it out",
            )
        content = match["content"]
        for mask in masks:
            content = mask.sub(ANY, content)
        numbers.append(drain.number_of(content))
        if "label" in pattern.groupindex:
            alerts.append(match["label"] != "-")
    return numbers, alerts if "label" in pattern.groupindex else None, drain


def grouping_accuracy(found: Sequence[int], truth: Sequence[str]) -> float:
    """Return the share of lines whose group is exactly a true group."""
    by_found: dict[int, set[int]] = {}
    by_truth: dict[str, set[int]] = {}
    for line, (one, other) in enumerate(zip(found, truth, strict=True)):
        by_found.setdefault(one, set()).add(line)
        by_truth.setdefault(other, set()).add(line)
    return sum(len(lines) for lines in by_found.values() if by_truth[truth[min(lines)]] == lines) / len(found)


def main() -> None:
    """Print the table."""
    if len(sys.argv) != 2:
        sys.exit("usage: python templates.py DIR")
    folder = Path(sys.argv[1])
    print(f"{'log':<12} {'templates':>9} {'true':>5} {'accuracy':>9} {'published':>10}")
    for name, form in FORMATS.items():
        numbers, _, drain = parse(name, folder)
        where = f"take {name}/{name}_2k.log_structured.csv from {LOGHUB}"
        truth = [row["EventId"] for row in read_csv(present(folder, f"{name}_2k.log_structured.csv", where))]
        accuracy = grouping_accuracy(numbers, truth)
        print(f"{name:<12} {len(drain.groups):>9} {len(set(truth)):>5} {accuracy:>9.3f} {form.published:>10.3f}")


if __name__ == "__main__":
    main()
