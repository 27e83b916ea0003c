"""DeepRacer's tracks: read from their files, or made up, and laid out for many cars at once."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from paceline.nouns.errors import DataError, UsageError

WHERE = (
    "get the folder tracks of https://github.com/aws-deepracer-community/deepracer-analysis, "
    "or leave --data out to drive on tracks that are made up"
)
SPACING_M = 0.1
HELD_OUT_OF_5 = 1


@dataclass(frozen=True)
class Track:
    """A closed track.

    Args:
        name: of its file.
        waypoints: of the centre line, in metres, (N, 2); the last one is the first.
        centre, normal: of the line at equal distances of about 0.1 m, and the unit vector to its left, (M, 2).
        left, right: from the centre line to the borders, in metres, (M,).
        waypoint: the waypoint before each point, (M,).
        length_m: of the centre line.
    """

    name: str
    waypoints: np.ndarray
    centre: np.ndarray
    normal: np.ndarray
    left: np.ndarray
    right: np.ndarray
    waypoint: np.ndarray
    length_m: float

    @property
    def spacing_m(self) -> float:
        """The distance of two points of `centre`."""
        return self.length_m / len(self.centre)


def read_tracks(folder: Path | None) -> tuple[str, list[Track], list[Track]]:
    """Return the data's name, the tracks to learn on and those that are held out.

    A fifth is held out, chosen by name: a track and the same one driven the other way stand on one side.

    Raises:
        UsageError: there is no such folder, or no track in it to learn on or to test on.
        DataError: a file has none.
    """
    if folder is None:
        return "generated tracks", [generate(number) for number in range(24)], [generate(100 + n) for n in range(8)]
    if not folder.is_dir():
        raise UsageError(f"--data {folder}", "it is a file" if folder.exists() else "there is no such folder", WHERE)
    paths = sorted([*folder.glob("*.npy"), *folder.glob("tracks/*.npy")])
    if not paths:
        raise UsageError(f"--data {folder}", "there is no track (*.npy) in it or in its folder tracks", WHERE)
    train, held_out = [], []
    for path in paths:
        (held_out if is_held_out(path.stem) else train).append(read_track(path))
    if not train or not held_out:
        found = f"of {len(paths)} tracks {len(train)} are to learn on and {len(held_out)} are held out"
        raise UsageError(f"--data {folder}", found, f"both need one: {WHERE}")
    return "DeepRacer's tracks", train, held_out


def is_held_out(name: str) -> bool:
    """Return whether a track is for tests: the same for `NAME`, `NAME_cw`, `NAME_ccw` and `NAME_reversed`."""
    base = name.lower().removesuffix("_track")
    for end in ("_cw", "_ccw", "_reversed"):
        base = base.removesuffix(end).removesuffix("_track")
    return hashlib.sha256(base.encode()).digest()[0] % 5 < HELD_OUT_OF_5


def read_track(path: Path) -> Track:
    """Read one file: an array (N, 6) of the centre line's and the two borders' x and y.

    Raises:
        DataError: the file is something else.
    """
    try:
        # Arrays of Python objects would be unpickled.
        rows = np.load(path, allow_pickle=False)
    except (ValueError, OSError, EOFError) as error:
        raise DataError(f"can't read {path}", str(error), WHERE) from error
    found = None
    if not isinstance(rows, np.ndarray) or rows.ndim != 2 or rows.shape[1] != 6 or len(rows) < 4:
        found = f"its shape is {getattr(rows, 'shape', None)}"
    elif rows.dtype.kind != "f" or not np.isfinite(rows).all():
        found = f"it has values of {rows.dtype} that are no finite numbers"
    if found:
        raise DataError(f"can't read {path}", f"{found}, and should be (N, 6): centre, inner and outer x and y", WHERE)
    return lay_out(path.stem, rows.astype(np.float64))


def lay_out(name: str, rows: np.ndarray) -> Track:
    """Make a track of the rows of its file."""
    if not np.array_equal(rows[0], rows[-1]):
        rows = np.concatenate([rows, rows[:1]])
    moved = np.linalg.norm(np.diff(rows[:, :2], axis=0), axis=1)
    # Some files have a waypoint twice.
    rows = rows[np.concatenate([[True], moved > 1e-9])]
    ends = np.concatenate([[0.0], np.cumsum(np.linalg.norm(np.diff(rows[:, :2], axis=0), axis=1))])
    length = float(ends[-1])
    points = max(round(length / SPACING_M), 8)
    places = np.arange(points) * (length / points)
    even = np.stack([np.interp(places, ends, column) for column in rows.T], axis=1)
    centre = even[:, :2]
    ahead = np.roll(centre, -1, axis=0) - np.roll(centre, 1, axis=0)
    ahead /= np.linalg.norm(ahead, axis=1, keepdims=True)
    normal = np.stack([-ahead[:, 1], ahead[:, 0]], axis=1)
    # In some files a border's points don't stand across from the centre's, so their distance is the width.
    inner, outer = even[:, 2:4] - centre, even[:, 4:6] - centre
    is_left = (inner * normal).sum() > 0
    left, right = (inner, outer) if is_left else (outer, inner)
    return Track(
        name=name,
        waypoints=rows[:, :2],
        centre=centre,
        normal=normal,
        left=np.linalg.norm(left, axis=1),
        right=np.linalg.norm(right, axis=1),
        waypoint=np.searchsorted(ends, places, side="right") - 1,
        length_m=length,
    )


def generate(number: int) -> Track:
    """Make up a closed track: a circle whose radius is a sum of waves."""
    random = np.random.default_rng([number, 135])
    angle = np.linspace(0, 2 * np.pi, 160)
    radius = np.full_like(angle, 1.0)
    for wave in range(2, 6):
        radius += random.uniform(-0.5, 0.5) / wave * np.cos(wave * angle + random.uniform(0, 2 * np.pi))
    line = np.stack([np.cos(angle), np.sin(angle)], axis=1) * (random.uniform(2.5, 5) * radius)[:, None]
    if number % 2:
        line = line[::-1]  # clockwise
    line[-1] = line[0]
    ahead = np.gradient(np.concatenate([line[-2:-1], line, line[1:2]]), axis=0)[1:-1]
    ahead /= np.linalg.norm(ahead, axis=1, keepdims=True)
    normal = np.stack([-ahead[:, 1], ahead[:, 0]], axis=1)
    half = random.uniform(0.38, 0.6)
    return lay_out(f"generated {number}", np.concatenate([line, line + half * normal, line - half * normal], axis=1))


def digest_of(tracks: Sequence[Track]) -> str:
    """Return a text that differs where the tracks do."""
    found = hashlib.sha256()
    for track in tracks:
        found.update(track.name.encode() + track.waypoints.tobytes())
    return found.hexdigest()


class Tracks:
    """Several tracks in arrays of one length, so that cars on different tracks move together."""

    def __init__(self, tracks: Sequence[Track]) -> None:
        self.tracks = list(tracks)
        self.points = np.array([len(track.centre) for track in tracks])
        self.spacing_m = np.array([track.spacing_m for track in tracks])
        most = int(self.points.max())

        def together(name: str) -> np.ndarray:
            arrays = [getattr(track, name) for track in tracks]
            return np.stack([np.resize(array, (most, *array.shape[1:])) for array in arrays])

        self.centre, self.normal = together("centre"), together("normal")
        self.left, self.right = together("left"), together("right")
        self.waypoint = together("waypoint")
