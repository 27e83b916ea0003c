"""The coordinator's log: every decision is on the disk before anybody hears of it. One JSON object a line."""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from paceline.nouns.errors import CheckpointError
from paceline.nouns.reading import COUNT, parse_json, reason_of
from paceline.server.protocol.messages import Configuration, Worker

# A line is one of these decisions.
_CONFIGURATION = {
    "epoch": int,
    "chain": [int],
    "workers": [[int]],
    "joining": ([int], None),
    "confirmed": int,
    "holders": [int],
}
_LINE = ({"node": COUNT}, {"worker": [COUNT]}, {"job": [str]}, {"configurations": [_CONFIGURATION]})


@dataclass(slots=True)
class Log:
    """What is known of a job, and the file that keeps it.

    Args:
        path: of the file.
    """

    path: Path
    configurations: list[list[Configuration]] = field(default_factory=list)
    nodes: int = 0  # how many have been named
    incarnations: dict[int, int] = field(default_factory=dict)  # by worker: how many
    job: tuple[str, str] | None = None  # settings and layout
    file: Any = None

    @classmethod
    def open(cls, path: Path) -> Log:
        """Read what there is, and go on from it. A last line that a crash cut off is as if it was never written.

        Raises:
            CheckpointError: the file can't be read or written, or is damaged before its end.
        """
        log = cls(path)
        try:
            content = path.read_bytes() if path.exists() else b""
            whole = content[: content.rfind(b"\n") + 1]
            for line in whole.splitlines():
                log._take(parse_json(line, "a line of it", _LINE))
            log.file = path.open("r+b" if path.exists() else "w+b")
            log.file.truncate(len(whole))
            log.file.seek(len(whole))
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"the coordinator's log {path}",
                f"it can't be read or written ({reason_of(error)})",
                "go on from the last checkpoint: paceline run --resume",
            ) from None
        return log

    def begin(self, settings: str, layout: str) -> None:
        """The job's settings and layout."""
        self._write({"job": [settings, layout]})

    def name_node(self) -> int:
        """A new server's number: never used twice."""
        self._write({"node": self.nodes})
        return self.nodes - 1

    def name_worker(self, name: int) -> Worker:
        """A worker's new incarnation: never used twice."""
        self._write({"worker": [name, self.incarnations.get(name, 0)]})
        return name, self.incarnations[name] - 1

    def decide(self, configurations: Sequence[Configuration]) -> None:
        """A decision about all ranges."""
        self._write({"configurations": [_packed(one) for one in configurations]})

    def close(self) -> None:
        """Let go of the file."""
        self.file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self.file.write(json.dumps(entry).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        self._take(entry)

    def _take(self, entry: dict[str, Any]) -> None:
        if "node" in entry:
            self.nodes = entry["node"] + 1
        elif "worker" in entry:
            name, incarnation = entry["worker"]
            self.incarnations[name] = incarnation + 1
        elif "job" in entry:
            settings, layout = entry["job"]
            self.job = (settings, layout)
        else:
            self.configurations.append([_unpacked(one) for one in entry["configurations"]])


def _packed(one: Configuration) -> dict[str, Any]:
    return {**asdict(one), "workers": [[*worker, clock] for worker, clock in one.workers.items()]}


def _unpacked(value: dict[str, Any]) -> Configuration:
    workers = {(name, incarnation): clock for name, incarnation, clock in value["workers"]}
    joining = tuple(value["joining"]) if value["joining"] is not None else None
    chain, holders = tuple(value["chain"]), tuple(value["holders"])
    return Configuration(value["epoch"], chain, workers, joining, value["confirmed"], holders)  # type: ignore[arg-type]
