"""Append the coordinator's decisions to a log, one JSON object a line, and read it back after a restart.

Every decision is on the disk before it is sent to anybody.
"""

from __future__ import annotations

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from paceline.nouns.errors import CheckpointError
from paceline.nouns.reading import COUNT, parse_json, reason_of, regular
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
    """The decisions about a job, and the file that they are appended to.

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
        """Read the file if there is one, and append to it. A last line that a crash cut off is dropped.

        Raises:
            CheckpointError: the file can't be read or written, or is damaged before its end.
        """
        log = cls(path)
        try:
            log.file = open(path, "r+b" if path.exists() else "w+b", opener=regular)  # noqa: SIM115  `close` closes it
            content = log.file.read()
            # A crash cuts the last line off. Nobody has heard of that decision, as it is sent only after the sync.
            complete_lines = content[: content.rfind(b"\n") + 1]
            for line in complete_lines.splitlines():
                log._take(parse_json(line, "a line of it", _LINE))
            # Else the next line would be joined to the part that is left.
            log.file.truncate(len(complete_lines))
            log.file.seek(len(complete_lines))
        except (OSError, ValueError) as error:
            log.close()
            raise CheckpointError(
                f"the coordinator's log {path}",
                f"it can't be read or written ({reason_of(error)})",
                "go on from the last checkpoint: paceline run --resume",
            ) from None
        return log

    def begin(self, settings: str, layout: str) -> None:
        """Write the job's settings and layout."""
        self._write({"job": [settings, layout]})

    def name_node(self) -> int:
        """Return the number of a new server, after it is on the disk: no number is given twice."""
        self._write({"node": self.nodes})
        return self.nodes - 1

    def name_worker(self, name: int) -> Worker:
        """Return a worker's number and new incarnation, after they are on the disk: none is given twice."""
        self._write({"worker": [name, self.incarnations.get(name, 0)]})
        return name, self.incarnations[name] - 1

    def decide(self, configurations: Sequence[Configuration]) -> None:
        """Write a decision: the configurations of all ranges."""
        self._write({"configurations": [_to_json(configuration) for configuration in configurations]})

    def close(self) -> None:
        """Close the file."""
        if self.file is not None:
            self.file.close()

    def _write(self, entry: dict[str, Any]) -> None:
        self.file.write(json.dumps(entry).encode() + b"\n")
        self.file.flush()
        os.fsync(self.file.fileno())
        # After the sync: in memory there is nothing that a restart would not read.
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
            self.configurations.append([_of_json(value) for value in entry["configurations"]])


def _to_json(configuration: Configuration) -> dict[str, Any]:
    """Return the log's form of one configuration.

    `config_version` is written as "epoch": logs of earlier versions of Paceline have that key.
    """
    return {
        "epoch": configuration.config_version,
        "chain": configuration.chain,
        "workers": [[*worker, clock] for worker, clock in configuration.workers.items()],
        "joining": configuration.joining,
        "confirmed": configuration.confirmed,
        "holders": configuration.holders,
    }


def _of_json(value: dict[str, Any]) -> Configuration:
    """Read what `_to_json` made."""
    joining = value["joining"]
    if joining is not None:
        joining = tuple(joining)
    return Configuration(
        config_version=value["epoch"],
        chain=tuple(value["chain"]),
        workers={(name, incarnation): clock for name, incarnation, clock in value["workers"]},
        joining=joining,
        confirmed=value["confirmed"],
        holders=tuple(value["holders"]),
    )
