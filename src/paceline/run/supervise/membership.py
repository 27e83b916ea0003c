"""Choose the hosts on which a job runs, generation after generation: values in, values out, no I/O.

A generation is one set of hosts with the ranks on them. Whatever changes the set ends the generation, and the next one
goes on from the newest checkpoint. Ranks of an older generation are out: their host's agent ends them when it no longer
hears from the supervisor, and the supervisor waits for so long before it starts the next.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from paceline.launch.hosts import Host

RESTARTS = 10  # generations that may follow a failure
WAIT_S = 600.0  # the time to wait for enough hosts


@dataclass(frozen=True, slots=True)
class Rules:
    """The limits within which a job changes its hosts.

    Args:
        least, most: the smallest and the largest number of hosts that the job runs on.
        restarts: the number of generations that may follow a failure, in the whole job.
        patience: the number of failures of one host after which it is no longer asked, unless it leaves the list and
            comes back.
    """

    least: int = 1
    most: int = 1
    restarts: int = RESTARTS
    patience: int = 3


@dataclass(frozen=True, slots=True)
class Start:
    """Begin a generation on these hosts."""

    generation: int
    hosts: tuple[Host, ...]


@dataclass(frozen=True, slots=True)
class Regroup:
    """Let the ranks save and end: the next generation has other hosts."""

    reason: str


@dataclass(frozen=True, slots=True)
class Wait:
    """There are not enough hosts now."""

    reason: str


@dataclass(frozen=True, slots=True)
class GiveUp:
    """The job has failed."""

    reason: str


Decision = Start | Regroup | Wait | GiveUp | None


@dataclass(frozen=True, slots=True)
class Membership:
    """The hosts of a job at one time.

    Args:
        rules: the limits that the job keeps.
        generation: the number of the present generation, or of the last one.
        hosts: the hosts of the present generation; empty between two.
        known: the hosts that there are, in the order in which they were first seen.
        failures: the number of failures of each host, by its name.
        restarts: the number of restarts after failures, so far.
        is_regrouping: True while the present generation is ending since its hosts change.
    """

    rules: Rules
    generation: int = 0
    hosts: tuple[Host, ...] = ()
    known: tuple[Host, ...] = ()
    failures: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    restarts: int = 0
    is_regrouping: bool = False

    def discovered(self, hosts: Sequence[Host]) -> tuple[Membership, Decision]:
        """Take in that these are all the hosts that are there now."""
        # Hosts keep the order in which they were first seen, whatever order the discovery lists them in. `Host` has the
        # slots too, so a host with other slots compares as another one.
        slots = {host.name: host for host in hosts}
        names = [host.name for host in self.known if host.name in slots]
        names += [host.name for host in hosts if host.name not in names]
        now = replace(self, known=tuple(slots[name] for name in names))
        if not self.hosts:
            return now._begin()
        # With too few hosts left, what runs goes on: a list may be empty for a moment, and ranks that are really gone
        # end the generation by themselves.
        next_hosts = now._next_hosts()
        if self.is_regrouping or next_hosts == self.hosts or len(next_hosts) < self.rules.least:
            return now, None
        gone = [host.name for host in self.hosts if host not in next_hosts]
        come = [host.name for host in next_hosts if host not in self.hosts]
        changes = []
        if gone:
            changes.append(f"{', '.join(gone)} went or changed")
        if come:
            changes.append(f"{', '.join(come)} came")
        return replace(now, is_regrouping=True), Regroup(" and ".join(changes))

    def listed(self, names: Iterable[str]) -> Membership:
        """Forget the failures of hosts that have gone from the list: they may have been mended."""
        listed_names = set(names)
        failures = {name: count for name, count in self.failures.items() if name in listed_names}
        return replace(self, failures=MappingProxyType(failures))

    def not_ready(self, names: Iterable[str]) -> Membership:
        """Take in that the generation could not begin: these hosts can't be reached, or are not fit.

        No rank has run, so it counts against the hosts but not as a restart.
        """
        return replace(self, hosts=(), failures=self._counted(names), is_regrouping=False)

    def ended(self, names: Iterable[str] = (), is_failure: bool = True) -> tuple[Membership, Decision]:
        """Take in that the generation has ended before the job did; the present hosts are asked for next.

        Args:
            names: the names of hosts that were lost, or on which a rank was killed.
            is_failure: True where it ended by a failure; False after `Regroup`.
        """
        restarts = self.restarts + is_failure
        now = replace(self, hosts=(), failures=self._counted(names), restarts=restarts, is_regrouping=False)
        if restarts > self.rules.restarts:
            return now, GiveUp(f"it failed {restarts} times, and {self.rules.restarts} are allowed")
        return now, None

    def _counted(self, names: Iterable[str]) -> Mapping[str, int]:
        counts = dict(self.failures)
        for name in set(names):
            counts[name] = counts.get(name, 0) + 1
        return MappingProxyType(counts)

    def _fit(self) -> tuple[Host, ...]:
        return tuple(host for host in self.known if self.failures.get(host.name, 0) < self.rules.patience)

    def _next_hosts(self) -> tuple[Host, ...]:
        """Return the hosts for the next generation: those of the present one come first, in their order.

        So rank 0 stays on its host for as long as that is there.
        """
        order = {host.name: number for number, host in enumerate(self.hosts)}
        fit = sorted(self._fit(), key=lambda host: order.get(host.name, len(order)))  # stable: the others as they came
        return tuple(fit[: self.rules.most])

    def _begin(self) -> tuple[Membership, Decision]:
        next_hosts = self._next_hosts()
        if len(next_hosts) < self.rules.least:
            # Said so that nobody looks for a host that is up, and was left out for its failures.
            excluded = [name for name, count in self.failures.items() if count >= self.rules.patience]
            suffix = ""
            if excluded:
                suffix = f"; {', '.join(sorted(excluded))} failed {self.rules.patience} times"
            return self, Wait(f"{len(next_hosts)} of at least {self.rules.least} hosts are there{suffix}")
        # Numbers only rise: ranks of an older generation see the newer one in the run directory, and don't save.
        number = self.generation + 1
        return replace(self, generation=number, hosts=next_hosts, is_regrouping=False), Start(number, next_hosts)
