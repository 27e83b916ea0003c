"""Bugs of the protocol, each of which the simulator must find. The last ones were in the first version of the code."""

from __future__ import annotations

import dataclasses

from paceline.server.protocol.admission import Mode
from paceline.server.protocol.client import Session
from paceline.server.protocol.coordinator import Chain, Coordinator
from paceline.server.protocol.messages import Forward, Forwarded, Pushed, Update
from paceline.server.protocol.replica import Replica

MUTANTS = {}


def mutant(function):
    MUTANTS[function.__name__] = function
    return function


def wrap(patch, owner, name, around):
    plain = getattr(owner, name)
    patch.setattr(owner, name, lambda *arguments, **named: around(plain, *arguments, **named))


@mutant
def a_push_counts_twice(patch):
    def pushed(plain, self, push):
        if self.is_head and not self.mode.is_by_rounds and push.clock <= self._last_clock(push.segment, push.worker):
            return self._apply_and_forward(Update(push.segment, ((push.worker, push.clock),), None, push.payload))
        return plain(self, push)

    wrap(patch, Replica, "_on_push", pushed)


@mutant
def acknowledged_by_the_head(patch):
    def apply(plain, self, update):
        version = self.configuration.config_version
        told = [(worker, Pushed(version, clock, update.segment)) for worker, clock in update.pushes]
        return (told if self.is_head else []) + plain(self, update)

    wrap(patch, Replica, "_apply_and_forward", apply)


@mutant
def read_at_the_head(patch):
    patch.setattr(Replica, "is_tail", property(lambda self: self.is_head))


@mutant
def no_check_for_gaps(patch):
    def forwarded(plain, self, message):
        return plain(self, Forward(message.config_version, self.update_count, message.update))

    wrap(patch, Replica, "_on_forward", forwarded)


@mutant
def lost_acknowledgements_are_not_repeated(patch):
    wrap(patch, Replica, "_on_forward", lambda plain, self, m: [] if m.number < self.update_count else plain(self, m))


@mutant
def one_that_comes_back_keeps_what_it_had(patch):
    def configure(plain, self, new):
        if new.joining is not None:
            self.joined_at_version = new.joining[1]
        return plain(self, new)

    wrap(patch, Replica, "_on_configuration", configure)


@mutant
def nobody_waits(patch):
    patch.setattr(Mode, "may_read", lambda self, clock, rounds, applied: True)


@mutant
def a_round_closes_with_the_first(patch):
    patch.setattr(Mode, "is_complete", lambda self, here, active: bool(here))


@mutant
def the_middle_says_that_all_have_it(patch):
    def forwarded(plain, self, message):
        out = plain(self, message)
        return [*out, (self.predecessor, Forwarded(self.configuration.config_version, self.update_count))]

    wrap(patch, Replica, "_on_forward", forwarded)


@mutant
def a_joiner_takes_no_state(patch):
    def take_over(plain, self, state):
        return plain(self, dataclasses.replace(state, content=([0, 0], [])))

    wrap(patch, Replica, "_on_state", take_over)


@mutant
def promises_before_a_configuration_is_confirmed(patch):
    patch.setattr(Replica, "_is_confirmed", lambda self: True)


@mutant
def late_for_a_round_that_may_be_lost(patch):
    def pushed(plain, self, push):
        self.settled = dict(self.rounds)
        return plain(self, push)

    wrap(patch, Replica, "_on_push", pushed)


@mutant
def one_taken_for_dead_joins_before_the_others_are_known_to_live(patch):
    def add(plain, self, *arguments):
        kept = self.configuration
        self.configuration = dataclasses.replace(kept, confirmed=kept.config_version)
        out = plain(self, *arguments)
        if not out:
            self.configuration = kept
        return out

    wrap(patch, Chain, "_add_node", add)


@mutant
def a_gate_opens_before_all_have_told(patch):
    def stage(plain, self):
        now, _ = self._round_under_way()
        self.peer_partials[now] = {
            other: self.peer_partials.get(now, {}).get(other, 0.0) for other in range(self.gates)
        }
        return plain(self)

    wrap(patch, Replica, "_announce_round", stage)


@mutant
def a_head_forgets_what_it_told(patch):
    def hear(plain, self, message):
        self.partials = {past: value for past, value in self.partials.items() if past >= min(self.rounds.values())}
        return plain(self, message)

    wrap(patch, Replica, "_on_partial", hear)


@mutant
def a_new_worker_is_unknown_after_it_was_told_of_others(patch):
    def add(plain, self, now_s):
        return [] if all(heartbeat.config_version >= 0 for _, heartbeat in self.heard.values()) else plain(self, now_s)

    wrap(patch, Coordinator, "_add_worker", add)


@mutant
def a_silent_worker_is_left_out_of_sync(patch):
    patch.setattr(Coordinator, "_may_drop", lambda self, one, now_s: self._has_left(one) or self._is_silent(one, now_s))


@mutant
def a_round_of_sync_goes_on_without_one_that_was_replaced(patch):
    def add(plain, self, now_s):
        self.settings = dataclasses.replace(self.settings, waits_for_replacement=False)
        return plain(self, now_s)

    wrap(patch, Coordinator, "_add_worker", add)


@mutant
def a_new_head_counts_from_nothing(patch):
    def take_over(plain, self, state):
        return plain(self, dataclasses.replace(state, note=None))

    wrap(patch, Replica, "_on_state", take_over)


@mutant
def under_sync_a_worker_goes_on_from_the_least_clock(patch):
    def goes_on(self, now_s):
        return self.differ_since_s is not None and now_s - self.differ_since_s >= self.patience_s

    patch.setattr(Session, "_goes_on_from_least", goes_on)
