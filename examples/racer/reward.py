"""The reward, as DeepRacer asks for it: a function of what the car's step ended in."""

from __future__ import annotations

import math
from typing import Any


def reward_function(params: dict[str, Any]) -> float:
    """Return more the faster the car follows the track, less with a wheel off it, and nothing once it has left it."""
    if params["is_offtrack"]:
        return 1e-3
    before, after = (params["waypoints"][index] for index in params["closest_waypoints"])
    direction = math.atan2(after[1] - before[1], after[0] - before[0])
    along = params["speed"] * math.cos(math.radians(params["heading"]) - direction)
    if not params["all_wheels_on_track"]:
        along *= 0.3
    return max(along / 4, 1e-3)
