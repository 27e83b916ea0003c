"""The racing example: tracks are read or named, the car moves as a car does, and N ranks learn what one does."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path

import psutil
import pytest

from paceline.nouns.errors import DataError, UsageError

from support.jobs import paceline, start, wait_for
from support.ranks import preload, run_ranks
from support.trainings import EXAMPLES, check_killed, check_plans, check_verified, load, play, run_main

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
preload("paceline.train.loop_job", "gymnasium", "matplotlib.pyplot")
SHARED = EXAMPLES.parents[1] / "shared" / "data" / "deepracer"
car, cartpole, figure, reward, rollouts, tasks, tracks, policies = load(
    "racer", "car", "cartpole", "figure", "reward", "rollouts", "tasks", "tracks", "policy"
)
# Three rollouts of six updates each, of five environments.
SMALL = ("--environments", "5", "--length", "12", "--epochs", "2", "--parts", "3", "--rollouts", "3", "--width", "8")
SMALL = (*SMALL, "--precision", "float64")
STEPS = 18


def rows_of(track):
    """What a file of a track has."""
    left = track.centre + track.normal * track.left[:, None]
    right = track.centre - track.normal * track.right[:, None]
    rows = np.concatenate([track.centre, right, left], axis=1)
    return np.concatenate([rows, rows[:1]])


@pytest.fixture
def data(tmp_path):
    """A folder of six tracks, of which one is held out."""
    folder = tmp_path / "deepracer"
    (folder / "tracks").mkdir(parents=True)
    names = ("Bowtie_track", "Oval_track", "Oval_track_cw", "Spain_track", "reinvent_base", "Canada_Training")
    for number, name in enumerate(names):
        np.save(folder / "tracks" / f"{name}.npy", rows_of(tracks.generate(number)))
    return folder


# Tracks


def test_a_track_is_laid_out_at_equal_distances_with_its_borders():
    made = tracks.generate(3)
    read = tracks.lay_out("again", rows_of(made))
    assert read.length_m == pytest.approx(made.length_m, rel=1e-3)
    steps = np.linalg.norm(np.diff(read.centre, axis=0), axis=1)
    assert steps.min() > 0.98 * read.spacing_m
    assert steps.max() < 1.02 * read.spacing_m
    assert read.spacing_m == pytest.approx(0.1, rel=0.01)
    np.testing.assert_allclose(read.left, made.left.mean(), rtol=0.02)
    np.testing.assert_allclose(read.right, made.right.mean(), rtol=0.02)
    assert read.waypoint[0] == 0
    assert read.waypoint[-1] <= len(read.waypoints) - 2


def test_the_inner_border_may_be_on_either_side():
    rows = rows_of(tracks.generate(4))
    rows[:, 4:6] += 0.3 * (rows[:, 4:6] - rows[:, :2])  # the left side is wider
    other = rows[:, [0, 1, 4, 5, 2, 3]]
    ways = [tracks.lay_out("way", each) for each in (rows, other)]
    np.testing.assert_allclose(ways[0].left, ways[1].left)
    np.testing.assert_allclose(ways[0].right, ways[1].right)
    np.testing.assert_allclose(ways[0].left, 1.3 * ways[0].right, rtol=0.02)


def test_the_same_track_the_other_way_stands_on_the_same_side():
    for base in ("reinvent_base", "Bowtie_track", *(f"2022_{number}_pro" for number in range(40))):
        sides = {tracks.is_held_out(base + end) for end in ("", "_cw", "_ccw", "_CW", "_reversed")}
        assert len(sides) == 1, base


def test_files_of_a_folder_are_split(data):
    name, train, held_out = tracks.read_tracks(data)
    assert name == "DeepRacer's tracks"
    assert [track.name for track in held_out] == ["Bowtie_track"]
    assert len(train) == 5


@pytest.mark.skipif(not SHARED.is_dir(), reason="DeepRacer's tracks are not here")
def test_deepracers_tracks():
    _, train, held_out = tracks.read_tracks(SHARED)
    assert (len(train), len(held_out)) == (109, 26)
    by_name = {track.name: track for track in [*train, *held_out]}
    base = by_name["reinvent_base"]
    assert base.length_m == pytest.approx(17.71, abs=0.02)
    assert np.median(base.left + base.right) == pytest.approx(0.76, abs=0.02)
    assert by_name["reInvent2019_track"].length_m == pytest.approx(23.12, abs=0.02)
    assert min(min(track.left.min(), track.right.min()) for track in by_name.values()) > 0.15


GOOD = rows_of(tracks.generate(0))
# The content of a file, and what the error says that was found.
BROKEN = {
    "no track at all": (None, "there is no track"),
    "text": (b"0 0 1 1 2 2\n", "pickle"),
    "torn": ("torn", "file"),
    "four columns": (GOOD[:, :4], r"its shape is \(\d+, 4\)"),
    "three points": (GOOD[:3], r"its shape is \(3, 6\)"),
    "whole numbers": (GOOD.astype(int), "int64"),
    "not finite": (np.where(GOOD.max() == GOOD, np.nan, GOOD), "no finite numbers"),
    "objects": (GOOD.astype(object), "Object arrays|pickle"),
}


@pytest.mark.parametrize("case", BROKEN)
def test_a_broken_track_is_named(case, tmp_path):
    content, found = BROKEN[case]
    path = tmp_path / "Oval_track.npy"
    if isinstance(content, bytes):
        path.write_bytes(content)
    elif isinstance(content, str):
        np.save(path, GOOD)
        path.write_bytes(path.read_bytes()[:-100])
    elif content is not None:
        np.save(path, content, allow_pickle=True)
    with pytest.raises(UsageError if content is None else DataError) as caught:
        tracks.read_tracks(tmp_path)
    assert re.search(found, caught.value.found), caught.value.found
    assert "deepracer-analysis" in caught.value.fix
    assert str(tmp_path) in caught.value.asked


def test_a_folder_without_a_held_out_track_is_refused(tmp_path):
    np.save(tmp_path / "Oval_track.npy", GOOD)
    with pytest.raises(UsageError, match="of 1 tracks 1 are to learn on and 0 are held out"):
        tracks.read_tracks(tmp_path)


# The car


def straight(length=40):
    """A long track that begins with a straight: an oval."""
    turn = np.linspace(-np.pi / 2, np.pi / 2, 60)
    right_end = np.stack([length / 2 + 3 * np.cos(turn), 3 * np.sin(turn)], axis=1)
    line = np.concatenate([np.linspace((0, -3), (length / 2, -3), 100)[:-1], right_end])
    line = np.concatenate([line, -line[1:-1], line[:1]])
    ahead = np.gradient(np.concatenate([line[-2:-1], line, line[1:2]]), axis=0)[1:-1]
    ahead /= np.linalg.norm(ahead, axis=1, keepdims=True)
    normal = np.stack([-ahead[:, 1], ahead[:, 0]], axis=1)
    return tracks.lay_out("oval", np.concatenate([line, line + 0.5 * normal, line - 0.5 * normal], axis=1))


def action(steering, speed):
    return np.array([car.STEERING_DEG.index(steering) * len(car.SPEEDS_M_S) + car.SPEEDS_M_S.index(speed)])


def test_a_car_speeds_up_drives_straight_on_and_counts_its_way():
    cars = car.Cars([straight()], reward.reward_function, 0, is_lap=True)
    cars.reset([0])
    for _ in range(30):
        _, rewards, ended, cut = cars.step(action(0, 4.0))
    assert cars.speed[0] == pytest.approx(4.0)
    # It speeds up by 4 m/s2 for a second: 2 m, and drives 4 m in the next.
    assert cars.place[0] == pytest.approx((6.0, -3.0), abs=0.15)
    assert cars.driven_m[0] == pytest.approx(cars.place[0][0], abs=0.1)
    assert cars.progress[0] == pytest.approx(100 * cars.driven_m[0] / straight().length_m)
    assert (rewards[0], ended[0], cut[0]) == (pytest.approx(1.0, abs=1e-3), False, False)


def test_racer_slow_car_turns_as_a_bicycle_and_fast_car_by_grip():
    cars = car.Cars([straight()] * 2, reward.reward_function, 0, is_lap=True)
    cars.reset([0, 1])
    for _ in range(25):
        cars.step(np.concatenate([action(10, 1.3), action(30, 4.0)]))
    bicycle = 1.3 * np.tan(np.deg2rad(10)) / car.WHEELBASE_M
    assert cars.yaw_rate == pytest.approx([bicycle, car.GRIP_M_S2 / 4.0], rel=0.02)


def test_racer_leaving_the_track_ends_the_episode_without_reward():
    cars = car.Cars([straight()], reward.reward_function, 0, is_lap=True)
    cars.reset([0])
    steps = [cars.step(action(20, 1.3)) for _ in range(40)]
    ends = [bool(ended[0]) for _, _, ended, _ in steps]
    assert not any(ends[:5])
    assert any(ends)
    assert steps[ends.index(True)][1][0] == 1e-3


def test_a_lap_ends_after_a_lap_and_a_slow_one_is_cut_off():
    cars = car.Cars([straight(4)], reward.reward_function, 0, is_lap=True, most_steps=400)
    cars.reset([0])
    cars.driven_m[:] = straight(4).length_m - 0.3
    ends = [cars.step(action(0, 4.0))[2][0] for _ in range(15)]
    assert sum(ends) >= 1
    slow = car.Cars([straight()], reward.reward_function, 0, is_lap=True, most_steps=3)
    slow.reset([0])
    assert [slow.step(action(0, 1.3))[3][0] for _ in range(3)] == [False, False, True]


def test_where_a_track_crosses_itself_the_car_stays_on_its_part():
    angle = np.linspace(0, 2 * np.pi, 200)
    line = np.stack([4 * np.sin(angle), 4 * np.sin(angle) * np.cos(angle)], axis=1)
    line[-1] = line[0]
    ahead = np.gradient(np.concatenate([line[-2:-1], line, line[1:2]]), axis=0)[1:-1]
    normal = np.stack([-ahead[:, 1], ahead[:, 0]], axis=1) / np.linalg.norm(ahead, axis=1, keepdims=True)
    eight = tracks.lay_out("eight", np.concatenate([line, line + 0.4 * normal, line - 0.4 * normal], axis=1))
    cars = car.Cars([eight], reward.reward_function, 0, is_lap=True)
    cars.reset([0])
    begin = len(eight.centre) // 2 - 8
    cars.point[:] = begin
    cars.place[0] = eight.centre[begin]
    cars.heading[:] = np.arctan2(-eight.normal[begin, 0], eight.normal[begin, 1])
    points = []
    for _ in range(12):
        cars.step(action(0, 2.6))
        points.append(int(cars.point[0]))
    assert begin <= points[0] < begin + 8 < points[-1] < begin + 40
    assert np.diff(points).max() <= 3


def test_a_reward_gets_deepracers_parameters():
    seen = []
    cars = car.Cars([straight()], lambda params: seen.append(params) or 0.5, 0, is_lap=True)
    cars.reset([0])
    assert cars.step(action(0, 2.6))[1].tolist() == [0.5]
    (params,) = seen
    assert set(params) >= {
        "all_wheels_on_track", "closest_waypoints", "distance_from_center", "heading", "is_left_of_center",
        "is_offtrack", "progress", "speed", "steering_angle", "steps", "track_length", "track_width", "waypoints",
        "x", "y",
    }  # fmt: skip
    before, after = params["closest_waypoints"]
    assert params["waypoints"][before][0] <= params["x"] <= params["waypoints"][after][0]
    assert params["track_width"] == pytest.approx(1.0, rel=0.01)
    assert (params["all_wheels_on_track"], params["is_offtrack"], params["steps"]) == (True, False, 1)
    assert json.loads(json.dumps(params)) == {**params, "waypoints": [list(point) for point in params["waypoints"]]}


# Rollouts


def test_advantages_are_those_of_the_paper():
    """GAE by its sum (Schulman et al. 2016, equation 16), where an episode ends in the middle and one at the end."""
    random = np.random.default_rng(0)
    rewards, values = (torch.from_numpy(random.normal(size=(2, 7))) for _ in range(2))
    is_last = torch.zeros(2, 7, dtype=torch.bool)
    is_last[0, 3] = is_last[:, 6] = True
    found = rollouts.advantages(rewards, values, is_last, 0.9, 0.8)
    for row in range(2):
        for step in range(7):
            total, factor = 0.0, 1.0
            for later in range(step, 7):
                following = 0.0 if is_last[row, later] else values[row, later + 1]
                total += factor * (rewards[row, later] + 0.9 * following - values[row, later])
                factor *= 0.9 * 0.8
                if is_last[row, later]:
                    break
            assert found[row, step].item() == pytest.approx(float(total))


def test_racer_draws_follow_probabilities_and_environment_number():
    logits = torch.tensor([[0.0, 1.0, 2.0]]).repeat(3000, 1)
    drawn = rollouts.Draws((0, 1), range(3000), 1).choose(logits, 0)
    shares = np.bincount(drawn, minlength=3) / 3000
    assert shares == pytest.approx(logits[0].softmax(0).numpy(), abs=0.03)
    some = rollouts.Draws((0, 1), [7, 2999], 1).choose(logits[:2], 0)
    assert some.tolist() == [drawn[7], drawn[2999]]
    certain = rollouts.Draws((0, 1), range(3000), 1).choose(torch.tensor([[-1e9, -1e9, 0.0]]).repeat(3000, 1), 0)
    assert set(certain) == {2}


@pytest.mark.parametrize("task", ["racer", "cartpole"])
def test_an_environment_plays_the_same_beside_any_others(task):
    if task == "cartpole":
        pytest.importorskip("gymnasium")
    torch.manual_seed(0)
    made = (lambda: cartpole.Poles(0)) if task == "cartpole" else lambda: car.Cars([straight()], lambda _: 1.0, 0)
    policy = policies.Policy(made().observation_size, made().actions, 8).double()
    options = {"key": (0, 2), "length": rollouts.Length(40, 0.9, 0.9)}
    together = rollouts.play(policy, made(), range(5), **options)
    some = rollouts.play(policy, made(), [1, 4], **options)
    for here, there in zip(some[:6], together[:6], strict=True):
        torch.testing.assert_close(here, there[[1, 4]], rtol=0, atol=1e-12)
    # Episodes end within it, and the next one begins elsewhere.
    assert len(together.returned) > 2


# What is asked for on the command line, and what the error says: asked, found, fix.
REFUSED = {
    "no such folder": (["--data", "nowhere"], "--data nowhere", "there is no such folder", "deepracer-analysis"),
    "tracks for a pole": (["--task", "cartpole", "--data", "."], "--data with --task", "tracks", "leave --data out"),
    "a pole's reward": (["--task", "cartpole", "--reward", "a.py"], "--reward with", "tracks", "leave --reward out"),
    "a pole's lines": (["--task", "cartpole", "--picture", "a.png"], "--picture with", "tracks", "leave --picture"),
    "both lengths": (["--steps", "5", "--rollouts", "2"], "--steps with --rollouts", "gives the other", "one of them"),
    "no rollout": (["--rollouts", "0"], "--rollouts 0", "at least 1", "--rollouts 1 or more"),
    "no environment": (["--environments", "0"], "--environments 0", "at least 1", "1 or more"),
    "uneven parts": (["--length", "10", "--parts", "3"], "--length 10 with --parts 3", "as many steps", "divides"),
    "no rate": (["--lr", "0"], "--lr 0.0", "above 0", "leave it out"),
    "not a number": (["--lr", "nan"], "--lr nan", "above 0", "leave it out"),
    "a clip of nothing": (["--clip", "0"], "--clip 0.0", "above 0", "leave it out"),
    "a trace above 1": (["--trace", "1.5"], "--trace 1.5", "at most 1", "leave it out"),
    "a negative seed": (["--seed", "-1"], "--seed -1", "0 or more", "--seed 0"),
    "no folder": (["--picture", "no/p.png"], "--picture no/p.png", "there is no folder", "make the folder"),
    "no reward": (["--reward", "no.py"], "--reward no.py", "no such file", "reward_function"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_flag_is_refused_before_training(case):
    words, asked, found, fix = REFUSED[case]
    with pytest.raises(UsageError) as caught:
        run_main("racer", words)
    assert asked in caught.value.asked
    assert found in caught.value.found
    assert fix in caught.value.fix


# A reward's file, and what the error says that was found.
REWARDS = {
    "no function": ("def reward(params): return 1.0", "AttributeError"),
    "an unknown parameter": ("def reward_function(params): return params['objects']", "KeyError: 'objects'"),
    "not finite": ("def reward_function(params): return float('nan')", "its reward is nan"),
    "torn": ("def reward_function(", "SyntaxError"),
}


@pytest.mark.parametrize("case", REWARDS)
def test_a_reward_that_fails_is_refused_before_training(case, tmp_path):
    text, found = REWARDS[case]
    path = tmp_path / "reward.py"
    path.write_text(text)
    with pytest.raises(UsageError) as caught:
        tasks.read_reward(path)
    assert found in caught.value.found
    assert "reward_function" in caught.value.fix or "finite" in caught.value.fix


def test_without_gymnasium_it_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "gymnasium", None)
    with pytest.raises(UsageError, match="pip install gymnasium"):
        run_main("racer", ["--task", "cartpole"])


def test_more_ranks_than_environments_are_refused():
    words = [*SMALL, "--environments", "2"]
    with pytest.raises(AssertionError, match=r"there are 3 parts of them.*\n  fix: write --environments 3 or more"):
        run_ranks(3, play, "racer", list(words), "replicate=3")


# Whole jobs


@pytest.mark.slow
def test_two_ranks_end_as_one_does(tmp_path, data):
    words = ("--data", data, *SMALL)
    result = check_plans(tmp_path, "racer", words, ("replicate=2", "shard=2,zero=1", "shard=2"))
    assert result["steps"] == STEPS
    assert result["data"] == "DeepRacer's tracks, 5 to learn on and 1 held out"
    assert set(result["scores"]) == {"laps, learned", "laps, held out", "metres a second"}


@pytest.mark.slow
def test_two_ranks_learn_to_hold_a_pole_as_one_does(tmp_path):
    pytest.importorskip("gymnasium")
    result = check_plans(tmp_path, "racer", ("--task", "cartpole", *SMALL), ("replicate=2", "shard=2,zero=2"))
    assert 5 < result["scores"]["mean return"] <= 500


@pytest.mark.integration
@pytest.mark.complete  # other plans end as one rank does above
def test_more_ranks_end_as_one_does(tmp_path, data):
    check_plans(tmp_path, "racer", ("--data", data, *SMALL), ("replicate=4", "tensor=2", "replicate=2,shard=2"))


VERIFIED = [
    pytest.param("replicate=2", marks=pytest.mark.slow),
    *(pytest.param(plan, marks=pytest.mark.integration) for plan in ("shard=2", "tensor=2")),
]


@pytest.mark.parametrize("plan", VERIFIED)
def test_verify_finds_the_steps_of_two_ranks_those_of_one(tmp_path, plan):
    check_verified(tmp_path, "racer", SMALL, plan)


@pytest.mark.integration
def test_racer_killed_during_a_rollout_resumes_where_it_was(tmp_path):
    """A rollout has six updates. Its checkpoints are after 4 and 8, so it is played again, as it was."""
    whole, killed = check_killed(tmp_path, "racer", SMALL, every=4, kill_at=10)
    assert whole["curve"] == killed["curve"]


@pytest.mark.integration
@pytest.mark.complete  # that a policy learns: the pole above
def test_it_learns_to_drive(tmp_path):
    """A tenth of the usual size."""
    output = tmp_path / "result.json"
    words = ("--environments", "32", "--rollouts", "30", "--output", output)
    ended = paceline(tmp_path, "run", "-n", "2", EXAMPLES / "racer" / "workload.py", *words)
    assert ended.code == 0, ended.err
    scores = json.loads(output.read_text())["scores"]
    assert scores["laps, learned"] > 0.5
    assert scores["metres a second"] > 2.5


# Asynchronous actors


@pytest.mark.integration
def test_actors_learn_by_parameter_servers(tmp_path):
    plan = "server=2,mode=stale,staleness=2"
    output = tmp_path / "result.json"
    words = ("--steps", "150", "--environments", "24", "--output", output)
    ended = paceline(tmp_path, "run", "-n", "2", "--plan", plan, EXAMPLES / "racer" / "actors.py", *words)
    assert ended.code == 0, ended.err
    assert "left out 0 of 300 gradients" in ended.err
    scores = json.loads(output.read_text())["scores"]
    assert scores["laps, learned"] > 0.2  # without learning there is none


@pytest.mark.integration
def test_a_killed_actor_is_replaced_and_the_others_go_on(tmp_path):
    words = ("--steps", "150", "--environments", "8", "--output", tmp_path / "result.json")
    run = tmp_path / "runs" / "a"
    file = EXAMPLES / "racer" / "actors.py"
    job = start(tmp_path, "run", "-n", "2", "--plan", "server=1,mode=async", "--job", "a", file, *words)
    assert wait_for(lambda: '"step": 30' in _read(run / "events.jsonl"), 60)
    (fork_server,) = psutil.Process(job.pid).children()
    os.kill(fork_server.children()[1].pid, signal.SIGKILL)
    _, err = job.communicate(timeout=120)
    assert job.returncode == 0, err
    assert "worker 1 was ended by SIGKILL; another takes its place" in err
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == 150


def _read(path: Path) -> str:
    return path.read_text() if path.exists() else ""


def test_a_synchronous_server_is_refused(tmp_path):
    ended = paceline(tmp_path, "run", "-n", "2", "--plan", "server=1", EXAMPLES / "racer" / "actors.py")
    assert ended.code == 2
    assert "write mode=async or mode=stale" in ended.err


def test_the_figure_is_small(tmp_path):
    task = tasks.make_task(_arguments())
    torch.manual_seed(0)
    policy = policies.Policy(car.Cars.observation_size, car.Cars.actions, 8)
    curve = [(number, number / 10, None) for number in range(5)]
    figure.draw(tmp_path / "figure.png", task, policy, {}, curve)
    assert 5_000 < (tmp_path / "figure.png").stat().st_size < 80_000


def _arguments():
    import argparse

    return argparse.Namespace(task="racer", data=None, reward=None, seed=0)
