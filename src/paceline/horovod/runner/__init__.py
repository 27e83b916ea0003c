"""Run a function on several processes: `horovod.runner.run`."""

from paceline.horovod.runner.gathered_call import run

__all__ = ["run"]
