"""A folder with an index of sentences: written after training, read by search.py.

index.usearch        the vectors, in an HNSW graph of usearch
sentences.txt        one line each; the line's number is its key in the index
model.safetensors    the encoder, as `paceline export` writes it
"""

from __future__ import annotations

from pathlib import Path

import encoder
import sentences
import torch
from safetensors.torch import load_file
from usearch.index import Index

from paceline.nouns.errors import UsageError

FILES = ("index.usearch", "sentences.txt", "model.safetensors")


def encode(model: torch.nn.Module, texts: list[str], device: torch.device | str = "cpu") -> torch.Tensor:
    """The embeddings of all sentences, float32 on the CPU."""
    parts = []
    with torch.no_grad():
        for begin in range(0, len(texts), 256):
            features = [sentences.padded(sentences.features_of(text)) for text in texts[begin : begin + 256]]
            parts.append(model(torch.stack(features).to(device)).float().cpu())
    return torch.cat(parts)


def build(vectors: torch.Tensor) -> Index:
    """An index of cosines, in float32. By one thread: then the graph is the same each time."""
    index = Index(ndim=vectors.shape[1], metric="cos", dtype="f32")
    index.add(torch.arange(len(vectors)).numpy(), vectors.numpy(), threads=1)
    return index


def recall(index: Index, vectors: torch.Tensor, queries: torch.Tensor, count: int) -> float:
    """Which share of the `count` true nearest neighbours, by brute force, the index finds."""
    nearest = (queries @ vectors.T).topk(count).indices.tolist()
    found = index.search(queries.numpy(), count).keys.tolist()
    hits = sum(len({*here} & {*there}) for here, there in zip(nearest, found, strict=True))
    return hits / (len(queries) * count)


def write(folder: Path, index: Index, texts: list[str]) -> None:
    """Write index and sentences. The folder has the model already."""
    index.save(str(folder / FILES[0]))
    (folder / FILES[1]).write_text("".join(f"{text}\n" for text in texts))


class Search:
    """An index that was written, and its encoder.

    Raises:
        UsageError: the folder or a file of it is missing.
    """

    def __init__(self, folder: Path) -> None:
        missing = [name for name in FILES if not (folder / name).is_file()]
        if missing:
            fix = f"write one with `python workload.py --index {folder}`"
            raise UsageError(f"{folder} should be an index", f"it has no {', '.join(missing)}", fix)
        state = {name.removeprefix("0."): tensor for name, tensor in load_file(folder / FILES[2]).items()}
        self.model = encoder.Encoder(state["up.weight"].shape[1]).to(state["up.weight"].dtype)
        self.model.load_state_dict(state)
        self.index = Index.restore(str(folder / FILES[0]))
        self.texts = (folder / FILES[1]).read_text().split("\n")[:-1]

    def nearest(self, query: str, count: int) -> list[tuple[float, str]]:
        """The nearest sentences and their cosines, best first."""
        vector = encode(self.model, [query])[0].numpy()
        found = self.index.search(vector, min(count, len(self.texts)))
        return [(1 - float(match.distance), self.texts[int(match.key)]) for match in found]
