"""Write the software bill of materials of a release: Paceline, and what an installation of it brings along.

CycloneDX 1.6 as JSON. The versions are those that an environment has in which the wheel is installed, without extras.
The same environment gives the same file: its serial number is made of the wheel's hash, its time is the commit's.
"""

from __future__ import annotations

import json
import subprocess
import uuid
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from cyclonedx.model import HashAlgorithm, HashType
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import DisjunctiveLicense, LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator
from packageurl import PackageURL
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from paceline.nouns.errors import UsageError

# Run by the environment that is described: the first of two packages of a name is the one that it imports.
_LIST = """
import importlib.metadata, json
found = {}
for one in importlib.metadata.distributions():
    name = one.metadata["Name"]
    if name:
        license = one.metadata.get("License-Expression"), one.metadata.get("License")
        found.setdefault(name, {"version": one.version, "requires": one.requires or [], "license": license})
print(json.dumps(found))
"""
_LONGEST_LICENSE = 100  # characters: some packages have the whole text in the field


def installed(python: Path) -> dict[str, dict[str, Any]]:
    """Return version, requirements and license of every package that a Python has, by its normal name."""
    done = subprocess.run([str(python), "-c", _LIST], check=True, capture_output=True, text=True)
    return {canonicalize_name(name): entry for name, entry in json.loads(done.stdout).items()}


def required(root: str, packages: dict[str, dict[str, Any]]) -> dict[str, list[str]]:
    """Return what `root` needs, directly or not, each with what it needs itself.

    Raises:
        UsageError: something is not installed, or in a version that is not accepted.
    """
    needs: dict[str, list[str]] = {}
    waiting = [(root, frozenset[str]())]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen:
            continue
        seen.add((name, extras))
        direct = needs.setdefault(name, [])
        for line in packages[name]["requires"]:
            requirement = Requirement(line)
            if not _applies(requirement, extras):
                continue
            needed = canonicalize_name(requirement.name)
            _check_version(name, requirement, packages.get(needed))
            if needed not in direct:
                direct.append(needed)
            waiting.append((needed, frozenset(requirement.extras)))
    return {name: sorted(direct) for name, direct in sorted(needs.items())}


def _applies(requirement: Requirement, extras: frozenset[str]) -> bool:
    if requirement.marker is None:
        return True
    return any(requirement.marker.evaluate({"extra": extra}) for extra in ("", *extras))


def _check_version(name: str, requirement: Requirement, entry: dict[str, Any] | None) -> None:
    found = "it is not installed" if entry is None else f"{entry['version']} is installed"
    if entry is None or not requirement.specifier.contains(entry["version"], prereleases=True):
        raise UsageError(f"{name} needs {requirement}", found, "install the wheel anew, in an environment of its own")


def write_sbom(path: Path, wheel_sha256: str, commit_s: int, python: Path) -> None:
    """Write the bill of what the environment of `python` has of Paceline's requirements, and check its form.

    Args:
        path: of the file.
        wheel_sha256: of the wheel.
        commit_s: time of the commit, s since 1970.
        python: of the environment, in which the wheel is installed.

    Raises:
        UsageError: a requirement is not met there.
    """
    packages = installed(python)
    needs = required("paceline", packages)
    components = {name: _component(name, packages[name]) for name in needs}
    root = components["paceline"]
    root.type = ComponentType.FRAMEWORK
    root.hashes.add(HashType(alg=HashAlgorithm.SHA_256, content=wheel_sha256))
    serial = uuid.uuid5(uuid.NAMESPACE_URL, f"{root.purl}#{wheel_sha256}")
    bom = Bom(components=[one for one in components.values() if one is not root], serial_number=serial)
    bom.metadata.timestamp = datetime.fromtimestamp(commit_s, UTC)
    bom.metadata.component = root
    for name, direct in needs.items():
        bom.register_dependency(components[name], [components[other] for other in direct])
    text = JsonV1Dot6(bom).output_as_string(indent=1)
    if (fault := JsonStrictValidator(SchemaVersion.V1_6).validate_str(text)) is not None:
        raise UsageError("the bill of materials should be CycloneDX 1.6", f"{fault}", "mend scripts/release_sbom.py")
    path.write_text(text + "\n")


def _component(name: str, entry: dict[str, Any]) -> Component:
    purl = PackageURL("pypi", None, name, entry["version"].lower())
    licenses = []
    expression, text = entry["license"]
    if expression:
        licenses.append(LicenseExpression(expression))
    elif text and "\n" not in text and len(text) <= _LONGEST_LICENSE:
        licenses.append(DisjunctiveLicense(name=text))
    return Component(
        type=ComponentType.LIBRARY,
        name=name,
        version=entry["version"],
        purl=purl,
        bom_ref=str(purl),
        licenses=licenses,
    )
