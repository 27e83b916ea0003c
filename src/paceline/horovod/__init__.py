"""Horovod's names on Paceline's ranks: a script that says `import horovod.torch as hvd` runs as it is.

docs/horovod.md says how such a script is started, and what differs.
"""

from paceline.horovod.runner.gathered_call import run

__all__ = ["run"]
