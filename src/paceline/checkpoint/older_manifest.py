"""Bring the manifest of an older version to today's form, in memory; the files stay as they are. No torch.

docs/formats.md says what each version has. Versions 1 and 2 saved every tensor whole, in one of the files, and the
manifest does not say in which: the headers of the files do. They have no hash of a tensor either, so what was loaded is
not hashed again; the SHA-256 of the files are checked as ever.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from paceline.checkpoint.tensor_file import TensorFile

WITHOUT_OWN_HASH = 1  # the version whose manifests have no SHA-256 of themselves
WITH_WHOLE_TENSORS = (1, 2)
NO_HASH = ""  # of a tensor that was saved without one


def upgraded(manifest: Mapping[str, Any], folder: Path) -> dict[str, Any]:
    """Return a manifest as one of today's version; one of today's version as it is.

    Args:
        manifest: of a version that can be read; its form and the names of its files are checked, its tensors are not.
        folder: the checkpoint's.

    Raises:
        CheckpointError: a file is missing, or is no file of tensors.
    """
    if manifest["version"] not in WITH_WHOLE_TENSORS:
        return dict(manifest)
    files: dict[str, str] = {}
    for entry in manifest["files"]:
        for key in TensorFile.open(folder / entry["name"]).header:
            files[key] = entry["name"]
    tensors = {name: _in_one_part(name, entry, files.get(name)) for name, entry in manifest["tensors"].items()}
    return {**manifest, "tensors": tensors}


def _in_one_part(name: str, entry: Any, file: str | None) -> Any:
    """Return the entry of a tensor that lies whole in one file; what is no entry is left to the check that follows."""
    if not isinstance(entry, dict) or file is None:
        return entry
    placement: dict[str, Any] = {"shape": entry.get("shape"), "cuts": []}
    part = {"file": file, "key": name, "placement": placement}
    return {**entry, "hash": NO_HASH, "parts": [part]}
