"""The typographic example: files are read or named, N ranks end where one does, and the defence is only in its part."""

from __future__ import annotations

import gzip
import lzma
import math
import struct
import sys
from pathlib import Path

import pytest

from paceline.nouns.errors import DataError, UsageError

from support.ranks import preload, run_ranks
from support.trainings import check_killed, check_plans, check_verified, load, play, run_main

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytest.importorskip("matplotlib")
preload("paceline.train.loop_job", "matplotlib.font_manager", "PIL.ImageFont")
ROOT = Path(__file__).parents[2]
SHARED = ROOT.parent / "shared" / "data" / "images"
TRAIN, TEST = 45, 13
SMALL = ("--batch-size", "11", "--epochs", "2", "--width", "4", "--embedding", "8", "--precision", "float64")
STEPS = 8
captions, digits, pictures, towers, figure, workload = load(
    "typographic", "captions", "digits", "pictures", "towers", "figure", "workload"
)


def idx(array: np.ndarray) -> bytes:
    """MNIST's format."""
    return struct.pack(f">{1 + array.ndim}I", 0x800 + array.ndim, *array.shape) + array.astype(np.uint8).tobytes()


def mnist(count: int, seed: int) -> tuple[bytes, bytes]:
    random = np.random.default_rng(seed)
    return idx(random.integers(256, size=(count, 28, 28))), idx(np.arange(count) % 10)


def text_row(label: float, value: float) -> str:
    return f"{label:.4f} " + " ".join([f"{value:.3f}"] * 256) + " \n"


@pytest.fixture
def data(tmp_path):
    """A folder of few digits in MNIST's format."""
    folder = tmp_path / "mnist"
    folder.mkdir()
    for part, count in (("train", TRAIN), ("t10k", TEST)):
        images, labels = mnist(count, seed=count)
        (folder / f"{part}-images-idx3-ubyte.gz").write_bytes(gzip.compress(images))
        (folder / f"{part}-labels-idx1-ubyte").write_bytes(labels)
    return folder


# Reading


def test_mnists_files_plain_and_compressed(data):
    name, train, test = digits.read_digits(data)
    assert (name, train.pictures.shape, test.pictures.shape) == ("MNIST", (TRAIN, 20, 20), (TEST, 20, 20))
    assert train.labels.tolist() == [row % 10 for row in range(TRAIN)]
    images, _ = mnist(TRAIN, seed=TRAIN)
    whole = np.frombuffer(images[16:], np.uint8).reshape(TRAIN, 28, 28)
    assert train.pictures.mean().item() == pytest.approx(whole.mean() / 255, abs=1e-3)


def test_mnists_test_files_alone_are_split(data, monkeypatch):
    for path in data.glob("train*"):
        path.unlink()
    monkeypatch.setattr(digits, "_OWN_SPLIT", 8)
    name, train, test = digits.read_digits(data)
    assert (name, train.labels.tolist(), test.labels.tolist()) == (
        "MNIST's test files, split",
        [*range(8)],
        [8, 9, 0, 1, 2],
    )


@pytest.mark.parametrize("end", ["", ".gz", ".xz"])
def test_usps_as_text(tmp_path, end):
    pack = {"": bytes, ".gz": gzip.compress, ".xz": lzma.compress}[end]
    (tmp_path / f"zip.train{end}").write_bytes(pack((text_row(6, -1) + text_row(0, 0.5)).encode()))
    (tmp_path / f"zip.test{end}").write_bytes(pack(text_row(9, 1).encode()))
    name, train, test = digits.read_digits(tmp_path)
    assert (name, train.labels.tolist(), test.labels.tolist()) == ("USPS", [6, 0], [9])
    assert train.pictures[:, 10, 10].tolist() == [0, 0.75]
    assert test.pictures[0].sum() == 16 * 16  # and a margin of 2


def test_usps_as_hdf5(tmp_path):
    h5py = pytest.importorskip("h5py")
    with h5py.File(tmp_path / "usps.h5", "w") as file:
        for part, labels in (("train", [6, 0, 1]), ("test", [9])):
            file[f"{part}/data"] = np.full((len(labels), 256), 0.5, np.float32)
            file[f"{part}/target"] = np.array(labels, np.int32)
    name, train, test = digits.read_digits(tmp_path)
    assert (name, train.labels.tolist(), test.labels.tolist()) == ("USPS", [6, 0, 1], [9])
    assert train.pictures[:, 10, 10].tolist() == [0.5] * 3


@pytest.mark.skipif(not (SHARED / "usps").is_dir(), reason="the real USPS is not here")
def test_real_usps():
    pytest.importorskip("h5py")
    _, train, test = digits.read_digits(SHARED / "usps")
    assert train.labels.bincount().tolist() == [1194, 1005, 731, 658, 652, 556, 664, 645, 542, 644]
    assert test.labels.bincount().tolist() == [359, 264, 198, 166, 200, 160, 170, 147, 166, 177]
    assert (train.pictures.min(), train.pictures.max()) == (0, 1)


GOOD, FEW = mnist(4, 0), mnist(3, 0)
# The files of a folder, and what the error says: asked, found, fix.
BROKEN = {
    "nothing": ({}, "should hold USPS or MNIST", "it holds nothing", "usps.h5 (https://"),
    "one part": (
        {"train-images-idx3-ubyte": GOOD[0]},
        "train-labels-idx1-ubyte (or .gz, .xz)",
        "no such file",
        "https://",
    ),
    "another format": (
        {"train-images-idx3-ubyte": b"PNG"},
        "an IDX file of 3 dimensions",
        "3 bytes",
        "download it anew",
    ),
    "torn": ({"train-images-idx3-ubyte": GOOD[0][:-1]}, "an IDX file of 3 dim", "3,151 bytes", "download it anew"),
    "torn archive": (
        {"train-images-idx3-ubyte.gz": gzip.compress(GOOD[0])[:-9]},
        "compressed as its name says",
        "ended",
        "download it anew",
    ),
    "no archive": ({"zip.train.xz": b"6 -1" * 9}, "compressed as its name says", "format", "download it anew"),
    "fewer labels": (
        {"train-images-idx3-ubyte": GOOD[0], "train-labels-idx1-ubyte": FEW[1]},
        "a label for each picture",
        "4 pictures and 3 labels",
        "download it anew",
    ),
    "an odd label": (
        {"train-images-idx3-ubyte": FEW[0], "train-labels-idx1-ubyte": idx(np.array([0, 10, 1]))},
        "labels from 0 to 9",
        "one is 10",
        "download it anew",
    ),
    "a short row": (
        {"zip.train": (text_row(1, 0) + "6 -1 -1\n").encode()},
        "zip.train, line 2: a label and 256 numbers",
        "it has 3",
        "download it anew",
    ),
    "no digit": (
        {"zip.train": text_row(math.nan, 0).encode(), "zip.test": b""},
        "labels from 0 to 9",
        "one is nan",
        "download it anew",
    ),
    "no number": ({"zip.train": b"six -1\n"}, "zip.train, line 1: numbers", "'six'", "download it anew"),
    "no HDF5": ({"usps.h5": b"6 -1"}, "should be HDF5 with train/data", "file signature", "download it anew"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_file_is_named(case, tmp_path):
    files, asked, found, fix = BROKEN[case]
    if case == "no HDF5":
        pytest.importorskip("h5py")
    for name, content in files.items():
        (tmp_path / name).write_bytes(content)
    with pytest.raises((DataError, UsageError)) as caught:
        digits.read_digits(tmp_path)
    assert asked in caught.value.asked
    assert found in caught.value.found
    assert fix in caught.value.fix


def test_without_h5py_its_package_is_named(tmp_path, monkeypatch):
    (tmp_path / "usps.h5").write_bytes(b"")
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UsageError, match="run `pip install h5py`"):
        digits.read_digits(tmp_path)


# What is asked for on the command line, and what the error says: asked, found, fix.
REFUSED = {
    "no such folder": (["--data", "nowhere"], "--data nowhere", "no such folder", "usps.h5 (https://"),
    "one sample": (["--batch-size", "1"], "--batch-size 1", "compares a sample with others", "2 or more"),
    "a batch larger than the data": (["--batch-size", "99"], "--batch-size 99", "45 training digits", "smaller batch"),
    "cold": (["--temperature", "0"], "--temperature 0.0", "should be above 0", "--temperature 0.07"),
    "not a number": (["--temperature", "nan"], "--temperature nan", "should be above 0", "--temperature 0.07"),
    "a long word": (["--font-size", "14"], "'three' should fit on 32 x 12 pixels", "takes", "smaller --font-size"),
    "no share": (["--random-words", "1.5"], "--random-words 1.5", "a share", "from 0 to 1"),
    "no steps": (["--steps", "0"], "--steps 0", "at least 1", "--steps 1 or more"),
    "no rate": (["--lr", "0"], "--lr 0.0", "above 0", "--lr 3e-3"),
    "no folder": (["--picture", "no/p.png"], "--picture no/p.png", "there is no folder no", "make the folder"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_flag_is_refused_before_training(case, data, monkeypatch):
    words, asked, found, fix = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        run_main("typographic", ["--data", data, *words])
    assert asked in caught.value.asked
    assert found in caught.value.found
    assert fix in caught.value.fix


# Pictures and captions


def test_typographic_caption_names_digit_and_defence_other_words():
    torch.manual_seed(0)
    blank = digits.Digits(torch.zeros(600, 20, 20), torch.arange(600) % 10)
    data = pictures.Training(blank, font_size=10, random_words=0.7)
    names = {index: word for word, index in captions._NUMBER.items()}
    seen_own = seen_other = 0
    for index in range(len(data)):
        plain, guarded, tokens = data[index]
        words = [names[int(token)] for token in tokens if token]
        assert captions.NAMES[index % 10] in words
        assert plain[:, :20].sum() == guarded[:, :20].sum() == 0  # words are below the digit
        seen_own += bool(plain.sum() > 0)
        seen_other += bool(guarded.sum() > 0)
        if "word" in words or "sign" in words:
            assert plain.sum() > 0
            assert torch.equal(plain, guarded)
    alone, own = pictures.WORD_ALONE, pictures.OWN_WORD
    assert seen_own / 600 == pytest.approx(alone + own, abs=0.07)
    assert seen_other / 600 == pytest.approx(alone + (1 - alone) * 0.7, abs=0.07)


def test_the_attack_never_writes_the_right_word():
    blank = digits.draw_digits(200, seed=3)
    tests = pictures.Tests(blank, font_size=10)
    assert not (tests.written == tests.labels).any()
    assert tests.written.bincount(minlength=10).min() > 0
    seen, label, _ = tests[5]
    clean, attacked, other, alone = seen
    assert label == blank.labels[5]
    assert torch.equal(clean[:, :20], attacked[:, :20])
    assert torch.equal(attacked[:, 21:], alone[:, 21:])
    assert not torch.equal(attacked, other)
    assert clean[:, 21:].sum() == 0 == alone[:, :20].sum()


def test_words_differ():
    drawn = [pictures.draw_word(name, 10) for name in captions.NAMES]
    shapes = [tuple(word.shape) for word in drawn]
    assert all(height <= 12 and width <= 32 for height, width in shapes)
    for row, word in enumerate(drawn):
        assert all(word.shape != other.shape or not torch.equal(word, other) for other in drawn[:row])


def test_padding_does_not_change_a_caption():
    tower = towers.TextTower(16, 8).double()
    tokens = captions.tokens_of("the number seven")
    with torch.no_grad():
        padded = tower(tokens[None])
        tower.places.weight.data[3:] = 7  # the places of the padding
        tower.words.weight.data[0] = 7
        torch.testing.assert_close(tower(tokens[None]), padded, rtol=0, atol=1e-14)


def test_typographic_loss_and_gradients_are_those_of_clip():
    class OneRank:
        data_rank = 0

        def all_gather(self, tensor, grad=False):
            return tensor if grad else tensor.detach()

    torch.manual_seed(0)
    clip = workload.Clip(
        towers.ImageTower(2, 8).double(), towers.TextTower(8, 8).double(), towers.Temperature(0.1).double()
    )
    seen = torch.rand(5, 1, 32, 32, dtype=torch.float64)
    tokens = torch.stack([captions.tokens_of(f"the number {name}") for name in captions.NAMES[:5]])
    parameters = [parameter for part in clip for parameter in part.parameters()]
    here = torch.autograd.grad(workload.contrastive_loss(OneRank(), clip, seen, tokens), parameters)
    similar = clip.image(seen) @ clip.text(tokens).T * clip.temperature.log_scale.exp()
    loss = -(similar.log_softmax(0) + similar.log_softmax(1)).diagonal().mean() / 2
    torch.testing.assert_close(here, torch.autograd.grad(loss, parameters), rtol=0, atol=1e-12)


def test_the_figure_is_small_and_colours_what_is_said(tmp_path):
    tests = pictures.Tests(digits.draw_digits(40, seed=3), font_size=10)
    rows = [int((tests.labels == digit).nonzero()[0]) for digit in range(10)]
    seen, labels, written = torch.utils.data.default_collate([tests[row] for row in rows])
    fooled = torch.stack([labels, written, written, written], dim=1)
    right = labels[:, None].expand(-1, 4)
    scores = {name: dict.fromkeys(figure.SHOWN, 0.5) for name in ("no defence", "random words")}
    guesses = {"no defence": fooled, "random words": right}
    figure.draw(tmp_path / "figure.png", "made-up digits", (seen, labels, written), guesses, scores)
    from PIL import Image

    assert (tmp_path / "figure.png").stat().st_size < 50_000
    with Image.open(tmp_path / "figure.png") as picture:
        colours = {colour for _, colour in picture.convert("RGB").getcolors(1 << 20)}
    for colour in (figure.RIGHT, figure.FOOLED):
        asked = bytes.fromhex(colour[1:])  # and some colour of the file is nearly that
        assert min(max(abs(a - b) for a, b in zip(asked, there, strict=True)) for there in colours) < 12


# Whole jobs


def check_plan(folder: Path, data: Path, plans: tuple[str, ...]) -> None:
    """Each plan ends with the parameters and scores of one rank."""
    result = check_plans(folder, "typographic", ("--data", data, *SMALL), plans)
    assert result["steps"] == STEPS
    assert result["data"] == f"MNIST, {TRAIN} training and {TEST} test digits"
    assert all(0 <= score <= 1 for score in result["scores"].values())


@pytest.mark.slow
def test_two_ranks_end_as_one_does(tmp_path, data):
    check_plan(tmp_path, data, ("replicate=2", "shard=2,zero=1", "shard=2"))


@pytest.mark.integration
@pytest.mark.complete  # other plans end as one rank does above
def test_more_ranks_end_as_one_does(tmp_path, data):
    check_plan(tmp_path, data, ("replicate=4", "tensor=2", "replicate=2,shard=2"))


VERIFIED = [
    pytest.param("replicate=2", marks=pytest.mark.slow),
    *(pytest.param(plan, marks=pytest.mark.integration) for plan in ("shard=2", "tensor=2")),
]


@pytest.mark.parametrize("plan", VERIFIED)
@pytest.mark.complete  # loops that are verified: test_loops.py, test_racer.py
def test_verify_finds_the_steps_of_two_ranks_those_of_one(tmp_path, data, plan):
    check_verified(tmp_path, "typographic", ("--data", data, *SMALL), plan)


@pytest.mark.integration
@pytest.mark.complete  # loops that are killed: test_loops.py, test_distil.py
def test_a_killed_job_goes_on_where_it_was(tmp_path, data):
    check_killed(tmp_path, "typographic", ("--data", data, *SMALL), every=2, kill_at=5)


@pytest.mark.slow
def test_a_batch_smaller_than_the_ranks_is_refused(tmp_path, data):
    words = ["--data", str(data), *SMALL, "--batch-size", "2"]
    with pytest.raises(AssertionError, match="3 ranks share it, and each needs a sample of its own\n  fix: write 3 or"):
        run_ranks(3, play, "typographic", words, "replicate=3")
