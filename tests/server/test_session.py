"""A worker whose ranges stand at different steps: another took its place when a server was lost too."""

from __future__ import annotations

import pytest

from paceline.server.protocol.client import PATIENCE_S, Client, Session
from paceline.server.protocol.messages import Configuration, Pulled

WORKER = (0, 1)


def asking(is_exact):
    """A session of two ranges that waits for the parameters of step 4."""
    session = Session([Client(WORKER, 1, 4, 10) for _ in range(2)], is_exact=is_exact)
    for number in range(2):
        session.on(number, Configuration(0, (number,), {WORKER: 4}), 0.0)
    return session


def answer(session, number, clock, now_s):
    """The range's answer; what the session makes of it."""
    return session.on(number, Pulled(0, session.clients[number].request, clock, clock, None, None), now_s)[1]


@pytest.mark.parametrize("is_exact", [True, False])
def test_ranges_at_one_step_begin_it(is_exact):
    session = asking(is_exact)
    assert answer(session, 0, 4, 0.0) is None
    assert len(answer(session, 1, 4, 0.0)) == 2
    assert session.clock == 4


@pytest.mark.parametrize("is_exact", [True, False])
def test_session_begins_at_unequal_steps_only_if_not_exact(is_exact):
    session = asking(is_exact)
    assert answer(session, 0, 5, 0.0) is None
    assert answer(session, 1, 4, 0.0) is None
    late_s = 2 * PATIENCE_S
    session.repeat(late_s)
    began = answer(session, 1, 4, late_s)
    assert (began is None) is is_exact
    if is_exact:  # it waits for the range that is behind, and goes on where both are
        assert session.differ_since_s == 0.0
        assert len(answer(session, 1, 5, late_s)) == 2
        assert session.clock == 5
        assert session.differ_since_s is None
