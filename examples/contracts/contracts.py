"""Contracts with their labels: read, or made up from templates, and split so that near duplicates stay together."""

from __future__ import annotations

import hashlib
import itertools
import json
import lzma
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import solidity

from paceline.nouns.errors import DataError, UsageError

BENCHMARKS = "github.com/matteo-rizzo/reentrancy-detection-benchmarks"
SMARTBUGS = "github.com/smartbugs/smartbugs-curated"
_FIX = (
    f"clone {BENCHMARKS} to DIR/reentrancy-benchmarks and {SMARTBUGS} to DIR/smartbugs-curated, "
    "or leave --data out for made-up contracts"
)
SHINGLE = 5  # tokens
ALIKE = 0.8  # share of the shingles of two contracts that both have, from which they are near duplicates


@dataclass(frozen=True)
class Contract:
    """A source file; `group` is the same for near duplicates."""

    name: str
    source: str
    is_reentrant: bool
    group: int = -1


@dataclass(frozen=True)
class Data:
    """The training set, which is cross-validated, and the sets that only test what it taught."""

    name: str
    train: list[Contract]
    tests: dict[str, list[Contract]]


def load(folder: Path | None, seed: int, exact: bool = False) -> Data:
    """Return the contracts of a folder, or made-up ones, with near duplicates in groups; with `exact`, copies alone.

    Raises:
        UsageError: a file is missing.
        DataError: a file can't be read, or a set lacks one of the classes.
    """
    data = made_up(seed) if folder is None else read(folder)
    for name, rows in {data.name: data.train, **data.tests}.items():
        count = sum(row.is_reentrant for row in rows)
        if not 0 < count < len(rows):
            asked = f"{name} needs reentrant and safe contracts"
            raise DataError(asked, f"{count} of its {len(rows)} contracts are reentrant", "take the files anew")
    return grouped(data, exact)


def digest_of(rows: Sequence[Contract]) -> str:
    """Return a text that differs where the contracts do, or their labels."""
    return hashlib.sha256(repr([(row.name, row.source, row.is_reentrant) for row in rows]).encode()).hexdigest()


def read(folder: Path) -> Data:
    """Return what is in the two data sets' folders."""
    rows = _read_set(folder, "reentrancy-benchmarks", _benchmark_row, _benchmark_clone)
    bugs = _read_set(folder, "smartbugs-curated", _smartbugs_row, _smartbugs_clone)
    sets = {name: [row for of, row in rows if of == name] for name in ("aggregated", "RSD")}
    return Data("aggregated", sets["aggregated"], {"RSD": sets["RSD"], "SmartBugs": [row for _, row in bugs]})


def _read_set(folder: Path, name: str, row_of: Any, read_clone: Any) -> list[tuple[str, Contract]]:
    place = folder / name
    for path in (place / "contracts.jsonl", place / "contracts.jsonl.xz"):
        if path.is_file():
            return list(_read_lines(path, row_of))
    rows = list(read_clone(place))
    if not rows:
        found = "it has neither" if place.is_dir() else f"there is no folder {place}"
        raise UsageError(f"--data {folder} needs a clone or contracts.jsonl (or .xz) in {name}", found, _FIX)
    return rows


def _read_lines(path: Path, row_of: Any) -> Iterator[tuple[str, Contract]]:
    try:
        content = path.read_bytes()
        text = (lzma.decompress(content) if path.suffix == ".xz" else content).decode()
    except (lzma.LZMAError, UnicodeDecodeError) as error:
        raise DataError(f"{path} should be UTF-8 text, compressed as its name says", str(error), _FIX) from None
    for number, line in enumerate(text.split("\n"), start=1):
        if not line.strip():
            continue
        try:
            of, row = row_of(json.loads(line))
            if not isinstance(row.source, str):
                raise TypeError("its source is no text")
            if not solidity.read_tokens(row.source):
                raise ValueError("its source has no token")
        except (KeyError, TypeError, ValueError) as error:
            found = f"it lacks {error}" if isinstance(error, KeyError) else str(error)
            raise DataError(f"{path}, line {number}: a JSON object of a contract", found, "mend that line") from None
        yield of, row


def _benchmark_row(record: dict[str, Any]) -> tuple[str, Contract]:
    if record["label"] not in (0, 1):
        raise ValueError(f"its label is {record['label']!r}, not 0 or 1")
    if record["set"] not in ("aggregated", "RSD"):
        raise ValueError(f"its set is {record['set']!r}, not 'aggregated' or 'RSD'")
    return record["set"], Contract(record["name"], record["source"], record["label"] == 1)


def _smartbugs_row(record: dict[str, Any]) -> tuple[str, Contract]:
    return "SmartBugs", Contract(record["path"], record["source"], record["category"] == "reentrancy")


def _benchmark_clone(folder: Path) -> Iterator[tuple[str, Contract]]:
    for name in ("reentrant", "safe"):
        for path in sorted((folder / "benchmarks" / "aggregated-benchmark" / "src" / name).glob("*.sol")):
            yield "aggregated", Contract(path.name, _read_source(path), name == "reentrant")
    for path in sorted((folder / "benchmarks" / "RSD" / "src").glob("*.sol")):
        yield "RSD", Contract(path.name, _read_source(path), "_ree" in path.name)


def _smartbugs_clone(folder: Path) -> Iterator[tuple[str, Contract]]:
    for path in sorted((folder / "dataset").glob("*/*.sol")):
        yield "SmartBugs", Contract(f"{path.parent.name}/{path.name}", _read_source(path), _is_reentrancy(path))


def _is_reentrancy(path: Path) -> bool:
    return path.parent.name == "reentrancy"


def _read_source(path: Path) -> str:
    source = path.read_text(encoding="utf-8", errors="replace")
    if not solidity.read_tokens(source):
        raise DataError(f"{path} should be a contract", "it has no token", "take it anew")
    return source


# Near duplicates and folds


def grouped(data: Data, exact: bool = False) -> Data:
    """Return the data with near duplicates in groups, over all sets; what has a group already keeps it."""
    rows = [*data.train, *itertools.chain.from_iterable(data.tests.values())]
    if any(row.group < 0 for row in rows):
        rows = [replace(row, group=group) for row, group in zip(rows, groups_of(rows, exact), strict=True)]
    parts = iter(rows)
    train = list(itertools.islice(parts, len(data.train)))
    return Data(data.name, train, {name: list(itertools.islice(parts, len(of))) for name, of in data.tests.items()})


def groups_of(rows: Sequence[Contract], exact: bool = False) -> list[int]:
    """Return a number for each contract, the same for near duplicates: those that a chain of them links, too.

    Near duplicates have a function with an external call in common, or four fifths of their shingles. With `exact`
    only contracts with the same tokens are in one group.
    """
    group = list(range(len(rows)))

    def first(at: int) -> int:
        while group[at] != at:
            at = group[at]
        return at

    tokens = [solidity.read_tokens(row.source) for row in rows]
    pairs = _copies(tokens) if exact else itertools.chain(_with_a_call_in_common(tokens), _alike(tokens))
    for at, other in pairs:
        group[max(first(at), first(other))] = min(first(at), first(other))
    return [first(at) for at in range(len(rows))]


def _copies(tokens: Sequence[list[solidity.Token]]) -> Iterator[tuple[int, int]]:
    seen: dict[tuple[str, ...], int] = {}
    for at, each in enumerate(tokens):
        yield at, seen.setdefault(tuple(token.text for token in each), at)


def _with_a_call_in_common(tokens: Sequence[list[solidity.Token]]) -> Iterator[tuple[int, int]]:
    seen: dict[tuple[int, ...], int] = {}
    for at, each in enumerate(tokens):
        for part in filter(solidity.has_external_call, solidity.functions_of(each)):
            yield at, seen.setdefault(tuple(solidity.encode(part)), at)


def _alike(tokens: Sequence[list[solidity.Token]]) -> Iterator[tuple[int, int]]:
    sets = [shingles_of(each) for each in tokens]
    order = sorted(range(len(sets)), key=lambda at: len(sets[at]))
    for place, small in enumerate(order):
        for large in order[place + 1 :]:
            # The share that both have is at most the ratio of their sizes.
            if len(sets[small]) < ALIKE * len(sets[large]):
                break
            both = len(sets[small] & sets[large])
            if both >= ALIKE * (len(sets[small]) + len(sets[large]) - both):
                yield small, large


def shingles_of(tokens: Sequence[solidity.Token]) -> set[bytes]:
    """Return each five consecutive tokens, a byte each, without names."""
    kinds = bytes(solidity.kinds_of(tokens))
    return {kinds[at : at + SHINGLE] for at in range(max(1, len(kinds) - SHINGLE + 1))}


def folds_of(rows: Sequence[Contract], folds: int) -> list[int]:
    """Return each contract's fold. A group is in one fold; folds have about as many of each class.

    Raises:
        UsageError: there are fewer groups with a class than folds.
    """
    members: dict[int, list[int]] = {}
    for at, row in enumerate(rows):
        members.setdefault(row.group, []).append(at)
    for is_reentrant in (False, True):
        count = sum(any(rows[at].is_reentrant == is_reentrant for at in those) for those in members.values())
        if count < folds:
            kind = "reentrant" if is_reentrant else "safe"
            found = f"{count} groups of near duplicates have a {kind} contract, and each fold needs one"
            raise UsageError(f"--folds {folds}", found, f"write --folds {max(count, 2)} or less")
    sizes = [[0, 0] for _ in range(folds)]
    total = [sum(row.is_reentrant == kind for row in rows) for kind in (False, True)]
    found = [0] * len(rows)
    for those in sorted(members.values(), key=lambda those: (-len(those), those)):
        has = [sum(rows[at].is_reentrant == kind for at in those) for kind in (False, True)]
        # The one that has least of what this group brings, each class as a share of all there are.
        fold = min(range(folds), key=lambda k: sum(has[kind] * sizes[k][kind] / total[kind] ** 2 for kind in (0, 1)))
        for kind in (0, 1):
            sizes[fold][kind] += has[kind]
        for at in those:
            found[at] = fold
    return found


# Made-up contracts

_PLACES = (
    "mapping(address => uint) {balance};",
    "struct Account {{ uint {sum}; }} mapping(address => Account) {balance};",
)
_CALLS = (
    "msg.sender.call.value({amount})()",
    'msg.sender.call{{value: {amount}}}("")',
    "{target}.call.value({amount})()",
)
_CHECKS = ("require({entry} >= {amount});", "if ({entry} < {amount}) {{ revert(); }}", "assert({amount} <= {entry});")
_UPDATES = ("{entry} -= {amount};", "{entry} = {entry} - {amount};", "{entry} = 0;")
_OTHERS = (
    "function {other}() public view returns (uint) {{ return address(this).balance; }}",
    "function {other}(address a, uint b) public {{ require(msg.sender == {target}); {limit} = b; }}",
    "function {other}(uint a, uint b) internal pure returns (uint) {{ uint c = a + b; assert(c >= a); return c; }}",
)
_WORDS = "bank vault fund cash store pool credit share stake wallet deposit owner limit total value sum user key"
COPIES = 2  # of each contract of a template, with other names


def made_up(seed: int) -> Data:
    """Return contracts of 54 templates: withdrawals that call before or after they update, with and without a guard.

    A quarter of the templates is the second set, `unseen templates`.
    """
    draw = random.Random(seed)
    templates = list(itertools.product(_PLACES, _CALLS, _CHECKS, _UPDATES))
    draw.shuffle(templates)
    rows: list[list[Contract]] = [[], []]
    for number, template in enumerate(templates):
        for order, guard, copy in itertools.product(("before", "after"), (False, True), range(COPIES)):
            source = write(template, order == "before", guard, draw)
            name = f"{number}-{order}{'-guarded' * guard}-{copy}.sol"
            rows[number % 4 == 0].append(Contract(name, source, order == "before" and not guard, number))
    return Data("made-up", rows[0], {"unseen templates": rows[1]})


def write(template: Sequence[str], calls_first: bool, is_guarded: bool, draw: random.Random) -> str:
    """Return a contract of a template with names that are drawn."""
    place, call, check, update = template
    roles = ("balance", "sum", "amount", "target", "limit", "lock", "guard", "withdraw", "deposit", "title")
    names = {role: draw.choice(_WORDS.split()) + f"_{at}" for at, role in enumerate(roles)}
    names["entry"] = f"{names['balance']}[msg.sender]" + (f".{names['sum']}" if "struct" in place else "")
    names["other"] = "f"
    called = f"require({call});" if "{{value" not in call else f"(bool ok, ) = {call}; require(ok);"
    steps = [called, update] if calls_first else [update, called]
    lines = ["contract {title} {{", place, "address {target}; uint {limit}; bool {lock};"]
    if is_guarded:
        lines.append("modifier {guard}() {{ require(!{lock}); {lock} = true; _; {lock} = false; }}")
    functions = [
        "function {deposit}() public payable {{ {entry} += msg.value; }}",
        "function {withdraw}(uint {amount}) public "
        + "{guard} " * is_guarded
        + "{{\n"
        + "\n".join([check, *steps])
        + "\n}}",
        *draw.sample(_OTHERS, draw.randrange(3)),
    ]
    draw.shuffle(functions)
    return "\n".join([*lines, *functions, "}}"]).format(**names) + "\n"
