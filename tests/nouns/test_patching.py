"""What was patched is put back, whatever happens in between."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from paceline.nouns.patching import patched, patched_items


class Base:
    def name(self):
        return "base"


class Heir(Base):
    pass


def test_own_and_inherited_attributes_are_put_back():
    owner = SimpleNamespace(kept=1, changed=None)
    with patched(owner, changed=2), patched(owner, changed=3), patched(Heir, name=lambda self: "patched"):
        assert (owner.kept, owner.changed, Heir().name(), Base().name()) == (1, 3, "patched", "base")
    assert (owner.changed, Heir().name(), "name" in vars(Heir)) == (None, "base", False)


def test_after_an_error_too():
    owner = SimpleNamespace(first=1, second=2)
    with pytest.raises(ValueError, match="on the way"), patched(owner, first=10, second=20):
        raise ValueError("on the way")
    assert vars(owner) == {"first": 1, "second": 2}


def test_a_name_that_nobody_would_look_up_is_refused():
    owner = SimpleNamespace(first=1)
    with pytest.raises(AttributeError), patched(owner, first=10, third=20):
        pass
    assert vars(owner) == {"first": 1}


def test_items_are_put_back_or_removed():
    mapping = {"kept": "1", "changed": "2"}
    with patched_items(mapping, {"changed": "3", "new": "4"}):
        assert mapping == {"kept": "1", "changed": "3", "new": "4"}
    assert mapping == {"kept": "1", "changed": "2"}
