"""Write the pictures that the loop logs as PNG files."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import tempfile
from pathlib import Path
from typing import Any

import torch

from paceline.nouns.errors import UsageError
from paceline.nouns.parts import shown

FOLDER = "pictures"  # of the run directory
# What PNG has; Pillow writes no others.
_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "I;16")


class Pictures:
    """The pictures of a job.

    Args:
        run_dir: of the job. None: they are in a temporary folder until `close`.
    """

    def __init__(self, run_dir: Path | None) -> None:
        self.run_dir = run_dir
        self.temporary: tempfile.TemporaryDirectory[str] | None = None

    def write(self, name: str, picture: Any, step: int) -> str:
        """Write a picture as a PNG file; return its path, in the run directory where there is one.

        Args:
            name: of the picture.
            picture: a figure of matplotlib, an image of Pillow, or an array or tensor: (H, W), (H, W, 3) or (H, W, 4),
                of uint8, or of numbers from 0 to 1.
            step: to which it belongs.

        Raises:
            UsageError: it is none of these, or Pillow is missing.
            OSError: it can't be written; nothing is left of it.
        """
        write = _writer_of(name, picture)
        folder = self._folder()
        path = folder / f"{_file_name(name)}-{step:08}.png"
        # Whoever looks sees a whole picture: under another name until it is.
        unfinished = path.with_suffix(".unfinished")
        try:
            write(unfinished)
            os.replace(unfinished, path)
        except OSError:
            with contextlib.suppress(OSError):
                unfinished.unlink()
            raise
        return str(path if self.run_dir is None else path.relative_to(self.run_dir))

    def close(self) -> None:
        """Remove the temporary folder; what is in a run directory stays."""
        if self.temporary is not None:
            self.temporary.cleanup()
            self.temporary = None

    def _folder(self) -> Path:
        if self.run_dir is not None:
            folder = self.run_dir / FOLDER
            folder.mkdir(exist_ok=True)
            return folder
        if self.temporary is None:
            self.temporary = tempfile.TemporaryDirectory(prefix="paceline-pictures-", ignore_cleanup_errors=True)
        return Path(self.temporary.name)


def _writer_of(name: str, picture: Any) -> Any:
    """Return a function of a path that writes the picture there."""
    if hasattr(picture, "savefig"):
        return lambda path: picture.savefig(path, format="png")
    image = picture
    if not (hasattr(picture, "save") and hasattr(picture, "mode")):
        image = _image_of(name, picture)
    elif image.mode == "F":
        image = _image_of(name, _values_of(image))
    elif image.mode not in _MODES:
        image = image.convert("RGB")
    return lambda path: image.save(path, format="PNG")


def _file_name(name: str) -> str:
    """Return a name without what a path can't have; other names give other ones."""
    plain = re.sub(r"[^A-Za-z0-9_.-]+", "-", name).strip(".-")
    return plain if plain == name else f"{plain or 'picture'}-{hashlib.sha256(name.encode()).hexdigest()[:8]}"


def _values_of(picture: Any) -> torch.Tensor | None:
    """Return an array's values; None for what is none, or has none that can be drawn."""
    if isinstance(picture, torch.Tensor):
        return picture.detach().cpu()
    import numpy as np

    values = np.array(picture)  # a copy: one that can be written to, in order
    return torch.from_numpy(values) if values.dtype.kind in "biuf" and values.dtype.itemsize <= 8 else None


def _image_of(name: str, picture: Any) -> Any:
    """Return an array as an image of Pillow."""
    try:
        from PIL import Image
    except ImportError:
        fix = "pip install pillow, or hand in a figure of matplotlib"
        raise UsageError(f"can't log {name!r} as a picture", "Pillow is not installed", fix) from None
    values = _values_of(picture) if hasattr(picture, "shape") else None
    found = None
    if values is None:
        found = f"it is {shown(picture)}"
    elif not _is_picture(values.shape):
        found = f"its shape is {tuple(values.shape)}"
    elif values.is_complex():
        found = "its numbers are complex"
    elif not values.is_floating_point() and values.dtype != torch.uint8 and (values.min() < 0 or values.max() > 1):
        found = f"it has whole numbers of {values.dtype} from {values.min()} to {values.max()}"
    if found:
        fix = "hand in a figure of matplotlib, an image of Pillow, or an array of uint8, or of numbers from 0 to 1, of "
        raise UsageError(f"can't log {name!r} as a picture", found, f"{fix}height and width, and 3 or 4 channels")
    assert values is not None
    if values.dtype != torch.uint8:
        values = (values.double().nan_to_num(0).clamp(0, 1) * 255).round().to(torch.uint8)
    return Image.fromarray(values.numpy())


def _is_picture(shape: torch.Size) -> bool:
    return 0 not in shape and (len(shape) == 2 or (len(shape) == 3 and shape[2] in (3, 4)))
