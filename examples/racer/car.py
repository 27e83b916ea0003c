"""Cars on tracks: a bicycle model with limited grip, DeepRacer's parameters and rewards, many cars at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from tracks import Track, Tracks

STEP_S = 1 / 15  # DeepRacer's camera has 15 pictures a second
PARTS = 3  # of a step, that the motion is computed in
WHEELBASE_M, WIDTH_M = 0.165, 0.19
GRIP_M_S2 = 8.0  # sideways: a friction of about 0.8
SPEED_UP_M_S2, BRAKE_M_S2 = 4.0, 8.0
STEERING_LAG_S = 0.08
STEERING_DEG = (-30, -20, -10, 0, 10, 20, 30)
SPEEDS_M_S = (1.3, 2.6, 4.0)
AHEAD_M = (0.3, 0.6, 1.0, 1.5, 2.2, 3.0)
WHEELS = np.array([(x * WHEELBASE_M / 2, y * WIDTH_M / 2) for x in (-1, 1) for y in (-1, 1)])

Reward = Callable[[dict[str, Any]], float]


class Cars:
    """Cars that drive until they leave the track, each with an episode of its own.

    Args:
        tracks: an episode's number chooses among them.
        reward: DeepRacer's: a function of its documented parameters.
        seed: with an episode's number it gives the track, the place and the speed at the beginning.
        is_lap: begin at the first waypoint, and end after one lap or `most_steps`; otherwise anywhere, without end.
        most_steps: of an episode.
    """

    observation_size = 2 * len(AHEAD_M) + 8
    actions = len(STEERING_DEG) * len(SPEEDS_M_S)

    def __init__(
        self, tracks: Sequence[Track], reward: Reward, seed: int, *, is_lap: bool = False, most_steps: int = 10**9
    ) -> None:
        self.tracks = Tracks(tracks)
        self.reward = reward
        self.seed = seed
        self.is_lap = is_lap
        self.most_steps = most_steps
        self.lines = [[tuple(point) for point in track.waypoints.tolist()] for track in tracks]

    def reset(self, episodes: Sequence[int]) -> np.ndarray:
        """Begin an episode for each number. Return what the cars see, (E, observation_size)."""
        count = len(episodes)
        self.track = np.zeros(count, np.int64)
        self.point = np.zeros(count, np.int64)
        self.place = np.zeros((count, 2))
        self.heading, self.speed, self.steering = np.zeros(count), np.zeros(count), np.zeros(count)
        self.yaw_rate, self.driven_m = np.zeros(count), np.zeros(count)
        self.steps = np.zeros(count, np.int64)
        for car, episode in enumerate(episodes):
            self.begin(car, episode)
        return self.look()

    def begin(self, car: int, episode: int) -> None:
        """Put one car at the beginning of an episode; `look` shows what it sees then."""
        random = np.random.default_rng([self.seed, episode])
        self.track[car] = track = episode % len(self.lines) if self.is_lap else random.integers(len(self.lines))
        self.point[car] = point = 0 if self.is_lap else random.integers(self.tracks.points[track])
        normal = self.tracks.normal[track, point]
        offset, turn, speed = (0.0, 0.0, 0.0) if self.is_lap else random.uniform((-0.2, -0.3, 0), (0.2, 0.3, 3))
        self.place[car] = self.tracks.centre[track, point] + offset * normal
        self.heading[car] = np.arctan2(-normal[0], normal[1]) + turn
        self.speed[car], self.steering[car], self.yaw_rate[car] = speed, 0, 0
        self.driven_m[car], self.steps[car] = 0, 0

    def step(self, actions: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
        """Drive for a fifteenth of a second.

        Args:
            actions: one for each car, (E,).

        Returns:
            What the cars see, their rewards, whether an episode ended by what the car did, and whether it was cut off.
        """
        wanted = np.deg2rad(np.array(STEERING_DEG))[actions // len(SPEEDS_M_S)]
        self._move(wanted, np.array(SPEEDS_M_S)[actions % len(SPEEDS_M_S)])
        self.steps += 1
        self._follow()
        is_on = self._wheels_on_track()
        is_off = ~is_on.any(1)
        rewards = self._rewards(is_on.all(1), is_off)
        has_lapped = self.is_lap & (self.driven_m >= self.tracks.points[self.track] * self.spacing)
        ended = is_off | has_lapped
        return self.look(), rewards, ended, (self.steps >= self.most_steps) & ~ended

    @property
    def spacing(self) -> np.ndarray:
        """Between points of each car's track, in metres."""
        return self.tracks.spacing_m[self.track]

    @property
    def progress(self) -> np.ndarray:
        """How much of a lap each car has driven, in percent."""
        return 100 * self.driven_m / (self.tracks.points[self.track] * self.spacing)

    def _move(self, steering: np.ndarray, speed: np.ndarray) -> None:
        part_s = STEP_S / PARTS
        for _ in range(PARTS):
            self.steering += (steering - self.steering) * min(part_s / STEERING_LAG_S, 1)
            self.speed += np.clip(speed - self.speed, -BRAKE_M_S2 * part_s, SPEED_UP_M_S2 * part_s)
            most = GRIP_M_S2 / np.maximum(self.speed, 0.1)  # a faster car understeers
            self.yaw_rate = np.clip(self.speed * np.tan(self.steering) / WHEELBASE_M, -most, most)
            middle = self.heading + self.yaw_rate * part_s / 2
            self.place += (self.speed * part_s)[:, None] * np.stack([np.cos(middle), np.sin(middle)], axis=1)
            self.heading += self.yaw_rate * part_s

    def _follow(self) -> None:
        """Find the nearest point near the last one: where a track crosses itself the nearest of all may be another."""
        near = np.arange(-4, 9)
        points = self.tracks.points[self.track]
        around = (self.point[:, None] + near) % points[:, None]
        away = self.tracks.centre[self.track[:, None], around] - self.place[:, None]
        moved = (away**2).sum(2).argmin(1)
        self.driven_m += near[moved] * self.spacing
        self.point = around[np.arange(len(around)), moved]

    def _lateral(self) -> np.ndarray:
        """How far left of the centre line each car is, in metres."""
        away = self.place - self.tracks.centre[self.track, self.point]
        return (away * self.tracks.normal[self.track, self.point]).sum(1)

    def _wheels_on_track(self) -> np.ndarray:
        """Whether each of the four wheels is between the borders, (E, 4)."""
        normal = self.tracks.normal[self.track, self.point]
        cos, sin = np.cos(self.heading), np.sin(self.heading)
        to_left = np.stack([normal[:, 0] * cos + normal[:, 1] * sin, normal[:, 1] * cos - normal[:, 0] * sin], axis=1)
        lateral = self._lateral()[:, None] + to_left @ WHEELS.T
        left, right = self.tracks.left[self.track, self.point], self.tracks.right[self.track, self.point]
        return (lateral <= left[:, None]) & (lateral >= -right[:, None])

    def look(self) -> np.ndarray:
        """What the cars see: the line ahead in the car's frame, where they are on the track, and how they move."""
        points = self.tracks.points[self.track]
        steps = np.rint(np.array(AHEAD_M) / self.spacing[:, None]).astype(np.int64)
        ahead = (self.point[:, None] + steps) % points[:, None]
        away = self.tracks.centre[self.track[:, None], ahead] - self.place[:, None]
        cos, sin = np.cos(self.heading)[:, None], np.sin(self.heading)[:, None]
        forward = away[..., 0] * cos + away[..., 1] * sin
        sideways = away[..., 1] * cos - away[..., 0] * sin
        distance = np.array(AHEAD_M)
        normal = self.tracks.normal[self.track, self.point]
        left, right = self.tracks.left[self.track, self.point], self.tracks.right[self.track, self.point]
        of_car = [
            self._lateral() / ((left + right) / 2),
            left,
            right,
            normal[:, 1] * cos[:, 0] - normal[:, 0] * sin[:, 0],  # the cosine of the angle to the track
            normal[:, 0] * cos[:, 0] + normal[:, 1] * sin[:, 0],  # and its sine
            self.speed / SPEEDS_M_S[-1],
            self.yaw_rate / 10,
            self.steering / np.deg2rad(STEERING_DEG[-1]),
        ]
        return np.concatenate([forward / distance, sideways / distance, np.stack(of_car, axis=1)], axis=1)

    def _rewards(self, all_wheels: np.ndarray, is_off: np.ndarray) -> np.ndarray:
        lateral = self._lateral()
        columns = {
            "x": self.place[:, 0],
            "y": self.place[:, 1],
            "heading": (np.rad2deg(self.heading) + 180) % 360 - 180,
            "speed": self.speed,
            "steering_angle": np.rad2deg(self.steering),
            "progress": self.progress,
            "steps": self.steps,
            "distance_from_center": np.abs(lateral),
            "is_left_of_center": lateral > 0,
            "track_width": self.tracks.left[self.track, self.point] + self.tracks.right[self.track, self.point],
            "track_length": self.tracks.points[self.track] * self.spacing,
            "all_wheels_on_track": all_wheels,
            "is_offtrack": is_off,
        }
        rows = zip(*(column.tolist() for column in columns.values()), strict=True)
        waypoints = self.tracks.waypoint[self.track, self.point].tolist()
        rewards = []
        for row, track, waypoint in zip(rows, self.track.tolist(), waypoints, strict=True):
            params = dict(zip(columns, row, strict=True))
            params["waypoints"] = self.lines[track]
            params["closest_waypoints"] = [waypoint, waypoint + 1]
            rewards.append(self.reward(params))
        return np.array(rewards, dtype=np.float64)
