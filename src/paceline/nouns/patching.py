"""Replace functions of other libraries, or variables, for a while.

For running code under other conditions than it expects: on fake tensors, in float64, as another rank. Paceline's own
objects have observers and arguments for that, and are not patched. The one exception is the public name
`paceline.prepare`: where `paceline plan` and `paceline verify` run a user's file, they answer its call themselves.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import contextmanager
from typing import Any

_MISSING = object()


@contextmanager
def patched(owner: Any, **attributes: Any) -> Iterator[None]:
    """Give a module or class other attributes, and put back what it had.

    Raises:
        AttributeError: it has no such attribute, so nothing would look the replacement up.
    """
    for name in attributes:
        getattr(owner, name)
    # What the owner itself has: an inherited attribute is put back by deleting the replacement.
    before = {name: vars(owner).get(name, _MISSING) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            if value is not _MISSING:
                setattr(owner, name, value)
            elif name in vars(owner):
                delattr(owner, name)


@contextmanager
def patched_items(mapping: MutableMapping[str, str], values: Mapping[str, str]) -> Iterator[None]:
    """Give a mapping such as `os.environ` other items, and put back what it had."""
    before = {name: mapping.get(name) for name in values}
    try:
        mapping.update(values)
        yield
    finally:
        for name, value in before.items():
            if value is not None:
                mapping[name] = value
            else:
                mapping.pop(name, None)
