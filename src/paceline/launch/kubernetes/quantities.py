"""Read Kubernetes quantities such as 500m, 16 and 200Gi exactly, add them up and write them again."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from fractions import Fraction
from typing import Any

_BINARY = {"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40, "Pi": 2**50, "Ei": 2**60}
_DECIMAL = {"n": -9, "u": -6, "m": -3, "": 0, "k": 3, "M": 6, "G": 9, "T": 12, "P": 15, "E": 18}
_LONGEST = 64  # characters; Kubernetes' own numbers end at 2^63
# The grammar of k8s.io/apimachinery's resource.Quantity.
_QUANTITY = re.compile(
    r"(?P<number>[+-]?(?:\d+\.?\d*|\.\d+))(?:(?P<suffix>[numkMGTPE]|[KMGTPE]i)|[eE](?P<exponent>[+-]?\d{1,3}))?"
)


def read_quantity(text: object) -> Fraction | None:
    """Return the exact value of a quantity; None where it is none. A bare whole number is one too."""
    # Fractions are exact: sums of them are compared for equality with what a group states.
    if isinstance(text, int) and not isinstance(text, bool):
        return Fraction(text) if abs(text) < 10**_LONGEST else None
    if not isinstance(text, str) or len(text) > _LONGEST:
        return None
    match = _QUANTITY.fullmatch(text)
    if match is None:
        return None
    number = Fraction(match["number"])
    if match["exponent"]:
        return number * Fraction(10) ** int(match["exponent"])
    suffix = match["suffix"] or ""
    if suffix in _BINARY:
        return number * _BINARY[suffix]
    return number * Fraction(10) ** _DECIMAL[suffix]


def write_quantity(value: Fraction) -> str:
    """Write a quantity as users do: 800Gi, 64, 1500m."""
    if value.denominator > 1:
        milli = value * 1000
        return f"{-(-milli.numerator // milli.denominator)}m"  # rounded up, as Kubernetes does
    for suffix, unit in reversed(_BINARY.items()):
        if value and value % unit == 0:
            return f"{value // unit}{suffix}"
    return str(value)


def add_resources(amounts: Iterable[tuple[int, Mapping[str, object]]]) -> dict[str, Fraction]:
    """Return the sum of resources, each so many times; a quantity that can't be read counts as nothing."""
    total: dict[str, Fraction] = {}
    for times, resources in amounts:
        for name, text in resources.items():
            total[name] = total.get(name, Fraction(0)) + times * (read_quantity(text) or 0)
    return total


def pod_resources(spec: Mapping[str, Any]) -> dict[str, Fraction]:
    """Return the requests that a scheduler reserves for a pod: all containers' sum, or its largest init container's.

    A request that is not written is the limit; an init container that never ends counts as a container.
    """
    containers = list(spec.get("containers") or [])
    initial = list(spec.get("initContainers") or [])
    containers += [container for container in initial if container.get("restartPolicy") == "Always"]
    total = add_resources((1, _requests(container)) for container in containers)
    for container in initial:
        for name, value in add_resources([(1, _requests(container))]).items():
            total[name] = max(total.get(name, Fraction(0)), value)
    for name, value in add_resources([(1, spec.get("overhead") or {})]).items():
        total[name] = total.get(name, Fraction(0)) + value
    return total


def _requests(container: Mapping[str, Any]) -> dict[str, Any]:
    resources = container.get("resources") or {}
    limits = resources.get("limits") or {}
    requests = resources.get("requests") or {}
    return {**limits, **requests}
