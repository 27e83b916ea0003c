"""The dashboard's colours: enough contrast in light and dark, and apart for people of every colour vision."""

from __future__ import annotations

import itertools
import re
from importlib.resources import files

import numpy as np
import pytest

STATIC = files("paceline.dashboard") / "static"
LEAST_CONTRAST = 4.5  # WCAG 2.2, 1.4.3
LEAST_DISTANCE = 11.0  # of CIE L*a*b*: about five of the smallest that are seen
# Machado, Oliveira, Fernandes 2009, severity 1.0, on linear RGB.
VISIONS = {
    name: np.array(rows)
    for name, *rows in (
        ("usual", [1, 0, 0], [0, 1, 0], [0, 0, 1]),
        (
            "protanopia",
            [0.152286, 1.052583, -0.204868],
            [0.114503, 0.786281, 0.099216],
            [-0.003882, -0.048116, 1.051998],
        ),
        (
            "deuteranopia",
            [0.367322, 0.860646, -0.227968],
            [0.280085, 0.672501, 0.047413],
            [-0.01182, 0.04294, 0.968881],
        ),
        ("tritanopia", [1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]),
    )
}
XYZ = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])


def linear(colour: str) -> np.ndarray:
    values = np.array([int(colour[at : at + 2], 16) for at in (1, 3, 5)]) / 255
    return np.where(values <= 0.04045, values / 12.92, ((values + 0.055) / 1.055) ** 2.4)


def lab(rgb: np.ndarray) -> np.ndarray:
    x, y, z = XYZ @ np.clip(rgb, 0, 1) / (XYZ @ np.ones(3))
    f = [value ** (1 / 3) if value > 0.008856 else 7.787 * value + 16 / 116 for value in (x, y, z)]
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def contrast(one: str, other: str) -> float:
    lights = sorted(float(XYZ[1] @ linear(colour)) + 0.05 for colour in (one, other))
    return lights[1] / lights[0]


def themes() -> dict[str, dict[str, str]]:
    text = (STATIC / "dashboard.css").read_text()
    found = {"light": dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", text.split("}")[0]))}
    for name, begin in (
        ("dark", ':root[data-theme="dark"]'),
        ("dark of the system", ':root:not([data-theme="light"])'),
    ):
        block = text.split(begin + " {")[1].split("}")[0]
        found[name] = dict(re.findall(r"--([a-z]+): (#[0-9a-f]{6})", block))
    return found


@pytest.mark.parametrize("theme", themes())
@pytest.mark.parametrize("text", ["text", "soft", "link", "good", "bad", "busy"])
@pytest.mark.parametrize("back", ["back", "panel"])
def test_text_can_be_read(theme, text, back):
    colours = themes()[theme]
    assert contrast(colours[text], colours[back]) >= LEAST_CONTRAST


def test_both_ways_to_the_dark_theme_have_its_colours():
    assert themes()["dark"] == themes()["dark of the system"]


def kinds() -> dict[str, tuple[str, str]]:
    """Return the colour and the pattern of each kind of a bar."""
    text = (STATIC / "dashboard.js").read_text().split("const KINDS")[1].split("};")[0]
    return {name: (colour, shape) for name, colour, shape in re.findall(r'"([a-z ]+)": \["(#\w{6})", "(.?)"\]', text)}


@pytest.mark.parametrize("vision", VISIONS)
def test_kinds_of_bars_are_told_apart(vision):
    found = kinds()
    assert len(found) > 12
    work = ["data", "forward", "backward", "communication", "bubble", "optimizer", "checkpoint", "evaluation", "other"]
    memory = ["parameters", "buffers", "gradients", "optimizer state", "rest"]
    for group in (work, memory):
        for one, other in itertools.combinations(group, 2):
            if found[one][1] == found[other][1]:  # of one pattern
                distance = np.linalg.norm(
                    lab(VISIONS[vision] @ linear(found[one][0])) - lab(VISIONS[vision] @ linear(found[other][0]))
                )
                assert distance >= LEAST_DISTANCE, (one, other)


def test_each_of_several_runs_has_a_colour_and_a_dash_of_its_own():
    text = (STATIC / "dashboard.js").read_text()
    colours = re.findall(r'"(#\w{6})"', text.split("const LINES")[1].split("];")[0])
    dashes = re.findall(r'"(\w+)"', text.split("const DASHES")[1].split("];")[0])
    assert len(set(zip(colours, dashes, strict=True))) == 8
    for vision in VISIONS.values():
        for (one, dash), (other, other_dash) in itertools.combinations(zip(colours, dashes, strict=True), 2):
            if dash == other_dash:
                assert np.linalg.norm(lab(vision @ linear(one)) - lab(vision @ linear(other))) >= LEAST_DISTANCE


@pytest.mark.parametrize("vision", VISIONS)
def test_a_larger_lag_is_darker(vision):
    text = (STATIC / "dashboard.css").read_text()
    levels = [re.search(rf"--level-{number}: (#\w{{6}})", text)[1] for number in range(5)]
    lights = [lab(VISIONS[vision] @ linear(level))[0] for level in levels]
    assert all(lighter - darker >= LEAST_DISTANCE / 2 for lighter, darker in itertools.pairwise(lights))
