"""A folder with an index of sentences: written after training, read by search.py.

model.safetensors    the encoder
index.usearch        the sentences' embeddings, in an HNSW graph of usearch
sentences.txt        one line each; the line's number is the key in the index
manifest.json        the version of this format, and the SHA-256 of the three files

None of them holds code. The checksums find what is damaged or was mixed with another model's files; they are no
signature.
"""

from __future__ import annotations

import hashlib
import json
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import encoder
import sentences
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from paceline.nouns.errors import DataError, UsageError

try:
    from usearch.index import Index
except ImportError as error:
    raise UsageError("an index of sentences", "usearch is not installed", "pip install usearch") from error

VERSION = 1
EXPANSION = 128  # candidates of a search; usearch's default, 64, finds 0.96 of STS-B's ten nearest instead of 0.99
MODEL, INDEX, TEXTS, MANIFEST = "model.safetensors", "index.usearch", "sentences.txt", "manifest.json"


def encode(model: Callable[[torch.Tensor], torch.Tensor], texts: list[str], device: Any = "cpu") -> torch.Tensor:
    """Return the embeddings of all sentences (N, width), float32 on the CPU. Every rank computes all of them."""
    parts = []
    with torch.no_grad():
        for begin in range(0, len(texts), 256):
            features = [sentences.padded(sentences.features_of(text)) for text in texts[begin : begin + 256]]
            parts.append(model(torch.stack(features).to(device)).float().cpu())
    return torch.cat(parts)


def build(embedded: torch.Tensor) -> Index:
    """Return an index of cosines, in float32. One thread adds them: then the graph is the same each time."""
    index = Index(ndim=embedded.shape[1], metric="cos", dtype="f32", expansion_search=EXPANSION)
    index.add(torch.arange(len(embedded)).numpy(), embedded.numpy(), threads=1)
    return index


def recall(index: Index, embedded: torch.Tensor, queries: torch.Tensor, count: int) -> float:
    """Return the share of the `count` true nearest neighbours, by brute force, that the index finds.

    One as near as the last of these counts: sentences that differ by capitals alone have the same embedding.
    """
    count = min(count, len(embedded))
    cosines = queries @ embedded.T
    furthest = cosines.topk(count).values[:, -1:]
    matches = index.search(queries.numpy(), count)
    # A row may have fewer than it was asked for; what is behind those is no key.
    is_found = torch.arange(count) < torch.from_numpy(matches.counts.astype("int64"))[:, None]
    keys = torch.from_numpy(matches.keys.astype("int64")).where(is_found, 0)
    return float(((cosines.gather(1, keys) >= furthest - 1e-6) & is_found).double().mean())


def check_may_write(folder: Path) -> None:
    """Raise UsageError unless `folder` is new, empty or an index that was written before."""
    if folder.is_file() or (folder.is_dir() and any(folder.iterdir()) and not (folder / MANIFEST).is_file()):
        raise UsageError(f"--index {folder}", "there is something else", "name a new folder; nothing was written")


def write(folder: Path, index: Index, texts: list[str]) -> None:
    """Write index, sentences and manifest beside the model, which the folder has already."""
    index.save(str(folder / INDEX))
    (folder / TEXTS).write_bytes("".join(f"{text}\n" for text in texts).encode())
    sums = {name: _sha256(folder / name) for name in (MODEL, INDEX, TEXTS)}
    (folder / MANIFEST).write_text(json.dumps({"version": VERSION, "sha256": sums}, indent=1) + "\n")


class Search:
    """An index that was written, and its encoder.

    Raises:
        UsageError: the folder or a file of it is missing.
        DataError: a file is damaged, or belongs to another index.
    """

    def __init__(self, folder: Path) -> None:
        self._fix = f"write it anew: paceline run workload.py --index {shlex.quote(str(folder))}"
        _check_files(folder, self._fix)
        try:
            state = load_file(folder / MODEL)
            self.model = encoder.Encoder(state["up.weight"].shape[1]).to(state["up.weight"].dtype)
            self.model.load_state_dict(state)
            self.index = Index.restore(str(folder / INDEX))
            self.index.expansion_search = EXPANSION  # the file does not have it
            self.texts = (folder / TEXTS).read_bytes().decode().split("\n")[:-1]
        except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
            raise DataError(f"{folder} can't be read as an index", str(error), self._fix) from None
        counts = (self.index.ndim, len(self.index)), (self.model.up.in_features, len(self.texts))
        if counts[0] != counts[1]:
            (width, count), (model_width, lines) = counts
            found = f"{INDEX} has {count} of {width} numbers, the model makes {model_width} of {lines} sentences"
            raise DataError(f"{folder} should be an index", found, self._fix)

    def nearest(self, query: str, count: int) -> list[tuple[float, str]]:
        """Return the nearest sentences and their cosines, best first."""
        found = self.index.search(encode(self.model, [query])[0].numpy(), min(count, len(self.texts)))
        return [(1 - float(match.distance), self.texts[int(match.key)]) for match in found]


def _check_files(folder: Path, fix: str) -> None:
    """Raise unless every file is there, and is the one that was written."""
    if not folder.is_dir():
        raise UsageError(f"{folder} should be an index", "there is no such folder", fix)
    missing = [name for name in (MANIFEST, MODEL, INDEX, TEXTS) if not (folder / name).is_file()]
    if missing:
        raise UsageError(f"{folder} should be an index", f"it has no {', '.join(missing)}", fix)
    try:
        manifest = json.loads((folder / MANIFEST).read_bytes())
        version, sums = manifest["version"], dict(manifest["sha256"])
    except (ValueError, KeyError, TypeError):
        found = "it is not what workload.py writes"
        raise DataError(f"{folder / MANIFEST} can't be read", found, fix) from None
    if version != VERSION:
        raise DataError(f"{folder} should be an index of version {VERSION}", f"its version is {version}", fix)
    if sums.get(MODEL) != _sha256(folder / MODEL):
        found = f"{MODEL} is another one, or damaged: its SHA-256 is not the manifest's"
        raise DataError(f"{folder} should have the model that made its index", found, fix)
    for name in (INDEX, TEXTS):
        if sums.get(name) != _sha256(folder / name):
            raise DataError(f"{folder / name} is damaged", "its SHA-256 is not the manifest's", fix)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
