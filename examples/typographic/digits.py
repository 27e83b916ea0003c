"""Digits from USPS's or MNIST's own files, or drawn with matplotlib's fonts: (N, 20, 20) in 0..1, and their labels."""

from __future__ import annotations

import gzip
import io
import lzma
import math
import struct
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from matplotlib import font_manager
from torch.nn import functional as F

from paceline.nouns.errors import DataError, UsageError

SIDE = 20
GENERATED = (4000, 1000)  # training and test digits without --data
_OWN_SPLIT = 8000  # of MNIST's 10,000 test digits, if these alone are there
_OPENERS: dict[str, Callable[[bytes], bytes]] = {"": bytes, ".gz": gzip.decompress, ".xz": lzma.decompress}
_WHERE = (
    "usps.h5 (https://www.kaggle.com/datasets/bistaumanga/usps-dataset), zip.train.gz and zip.test.gz "
    "(https://hastie.su.domains/ElemStatLearn/data.html), or MNIST's four files "
    "(https://github.com/cvdfoundation/mnist); without --data digits are generated"
)


class Digits(NamedTuple):
    """Pictures (N, 20, 20), float32 in 0..1, and labels (N,)."""

    pictures: torch.Tensor
    labels: torch.Tensor


class Source(NamedTuple):
    """What is trained on and tested on, and how to name it."""

    name: str
    train: Digits
    test: Digits


def read_digits(folder: Path | None) -> Source:
    """Read the digits of `folder`, or generate some where it is None.

    Raises:
        UsageError: the folder, a file of it or h5py is missing.
        DataError: a file is not what its name says.
    """
    if folder is None:
        return Source("generated digits", draw_digits(GENERATED[0], seed=1), draw_digits(GENERATED[1], seed=2))
    if not folder.is_dir():
        raise UsageError(f"--data {folder}", "there is no such folder", f"make it, with {_WHERE}")
    if _find(folder, "usps.h5"):
        return Source("USPS", *_read_hdf5(folder))
    if _find(folder, "zip.train"):
        return Source("USPS", _read_text(folder, "zip.train"), _read_text(folder, "zip.test"))
    if _find(folder, "train-images-idx3-ubyte"):
        return Source("MNIST", _read_idx(folder, "train"), _read_idx(folder, "t10k"))
    if _find(folder, "t10k-images-idx3-ubyte"):
        digits = _read_idx(folder, "t10k")
        parts = [Digits(*(part[rows] for part in digits)) for rows in (slice(_OWN_SPLIT), slice(_OWN_SPLIT, None))]
        return Source("MNIST's test files, split", *parts)
    there = ", ".join(sorted(path.name for path in folder.iterdir())) or "nothing"
    raise UsageError(f"--data {folder} should hold USPS or MNIST", f"it holds {there}", f"put there {_WHERE}")


def _find(folder: Path, name: str) -> Path | None:
    """The file of this name, plain or compressed."""
    return next((path for end in _OPENERS if (path := folder / f"{name}{end}").is_file()), None)


def _read(folder: Path, name: str) -> tuple[Path, bytes]:
    path = _find(folder, name)
    if path is None:
        raise UsageError(f"{folder / name} (or .gz, .xz)", "there is no such file", f"put there {_WHERE}")
    try:
        opener = _OPENERS.get(path.suffix, bytes)
        return path, opener(path.read_bytes())
    except (OSError, EOFError, lzma.LZMAError, zlib.error) as error:
        raise DataError(f"{path} should be compressed as its name says", str(error), "download it anew") from None


def _checked(path: Path, pictures: torch.Tensor, labels: torch.Tensor) -> Digits:
    """Digits of any size, scaled to 20 x 20."""
    if len(pictures) != len(labels):
        found = f"it has {len(pictures)} pictures and {len(labels)} labels"
        raise DataError(f"{path}: a label for each picture", found, "download it anew")
    if len(odd := labels[~((labels >= 0) & (labels <= 9))]):
        raise DataError(f"{path}: labels from 0 to 9", f"one is {odd[0]:g}", "download it anew")
    if pictures.shape[-1] < SIDE:  # USPS, 16 x 16: the digit fills it, so it gets a margin instead
        margin = (SIDE - pictures.shape[-1]) // 2
        pictures = F.pad(pictures, (margin,) * 4)
    else:
        pictures = F.interpolate(pictures[None], size=(SIDE, SIDE), mode="area")[0]
    return Digits(pictures.float().clamp(0, 1), labels.long())


def _read_hdf5(folder: Path) -> tuple[Digits, Digits]:
    path, content = _read(folder, "usps.h5")
    try:
        import h5py
    except ImportError:
        raise UsageError(f"can't read {path}", "h5py is not installed", "run `pip install h5py`") from None
    arrays = []
    try:
        with h5py.File(io.BytesIO(content)) as file:
            for part in ("train", "test"):
                arrays.append([torch.from_numpy(file[part][name][:]) for name in ("data", "target")])
    except (OSError, KeyError) as error:
        asked = f"{path} should be HDF5 with train/data, train/target, test/data and test/target"
        raise DataError(asked, str(error).splitlines()[0], "download it anew") from None
    train, test = (_checked(path, pictures.view(-1, 16, 16), labels) for pictures, labels in arrays)
    return train, test


def _read_text(folder: Path, name: str) -> Digits:
    """Lines of a label and 256 numbers from -1 to 1."""
    path, content = _read(folder, name)
    rows = []
    for number, line in enumerate(content.decode("ascii", "replace").splitlines(), start=1):
        try:
            rows.append([float(cell) for cell in line.split()])
        except ValueError as error:
            raise DataError(f"{path}, line {number}: numbers", str(error), "download it anew") from None
        if len(rows[-1]) != 257:
            found = f"it has {len(rows[-1])} numbers"
            raise DataError(f"{path}, line {number}: a label and 256 numbers", found, "download it anew")
    table = torch.tensor(rows).view(-1, 257)
    return _checked(path, (table[:, 1:].view(-1, 16, 16) + 1) / 2, table[:, 0])


def _read_idx(folder: Path, part: str) -> Digits:
    """MNIST's format: a magic number, the sizes, then a byte for each value."""
    arrays = []
    for name, dims in (("images-idx3", 3), ("labels-idx1", 1)):
        path, content = _read(folder, f"{part}-{name}-ubyte")
        head = 4 + 4 * dims
        magic, *sizes = struct.unpack(f">{1 + dims}I", content[:head].ljust(head, b"\0"))
        if magic != 0x800 + dims or len(content) != head + math.prod(sizes):
            found = f"it has {len(content):,} bytes and the magic number {magic}"
            raise DataError(f"{path} should be an IDX file of {dims} dimensions", found, "download it anew")
        arrays.append(torch.frombuffer(bytearray(content), dtype=torch.uint8, offset=head).view(sizes))
    return _checked(folder / f"{part}-images-idx3-ubyte", arrays[0].float() / 255, arrays[1])


_FONTS = [
    (family, style, weight)
    for family in ("DejaVu Sans", "DejaVu Serif", "DejaVu Sans Mono", "STIXGeneral")
    for style in ("normal", "italic")
    for weight in ("normal", "bold")
]


def draw_digits(count: int, seed: int) -> Digits:
    """Draw digits in the fonts of matplotlib: other sizes, slants, thicknesses, places, and noise."""
    import numpy as np
    from PIL import Image, ImageDraw, ImageFont

    random = np.random.default_rng(seed)
    files = [
        font_manager.findfont(font_manager.FontProperties(family=family, style=style, weight=weight))
        for family, style, weight in _FONTS
    ]
    fonts = [ImageFont.truetype(file, size) for file in files for size in (52, 60, 68)]
    labels = random.integers(10, size=count)
    pictures = np.empty((count, SIDE, SIDE), np.float32)
    for row, label in enumerate(labels):
        large = Image.new("L", (3 * SIDE, 3 * SIDE))
        font = fonts[random.integers(len(fonts))]
        place = tuple(3 * SIDE / 2 + random.uniform(-4, 4, size=2))
        stroke = int(random.integers(4))
        ImageDraw.Draw(large).text(place, str(label), 255, font, anchor="mm", stroke_width=stroke)
        large = large.rotate(random.uniform(-20, 20), Image.Resampling.BILINEAR)
        pictures[row] = np.asarray(large.resize((SIDE, SIDE), Image.Resampling.BOX), np.float32) / 255
    pictures = pictures * random.uniform(0.6, 1, size=(count, 1, 1)) + random.normal(0, 0.1, size=pictures.shape)
    return Digits(torch.from_numpy(pictures).float().clamp(0, 1), torch.from_numpy(labels))
