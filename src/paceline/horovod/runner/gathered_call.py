"""Call a function on several processes of this host: `horovod.run`. No torch here, but in the ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from paceline.nouns.errors import UsageError
from paceline.run.notebook import launch

# Arguments of horovod.run that change nothing here: ranks are joined without them.
_WITHOUT_EFFECT = ("start_timeout", "disable_cache", "verbose", "use_gloo")


@dataclass(frozen=True, slots=True)
class GatheredCall:
    """A function and its arguments.

    Args:
        function: the function of the user to call.
        arguments, keywords: the arguments of the call.
    """

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __call__(self) -> list[Any]:
        """Call the function, and return the results of all ranks, in rank order. Collective."""
        from paceline.horovod import import_alias
        from paceline.horovod.torch.functions import allgather_object  # only in the ranks: the caller needs no torch
        from paceline.horovod.torch.mpi_ops import init

        import_alias.install()
        result = self.function(*self.arguments, **self.keywords)
        init()
        return allgather_object(result)


def run(
    func: Callable[..., Any],
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    num_proc: int | None = None,
    np: int | None = None,
    **options: Any,
) -> list[Any]:
    """Call a function on several processes of this host, and return what it returned, in rank order.

    It is `paceline.launch` under Horovod's name; the function is sent to this process's own children.

    Args:
        func: the function to call; it calls `hvd.init()`.
        args, kwargs: the arguments of the call.
        num_proc, np: the number of processes; one of them.
        options: further arguments of horovod.run: start_timeout, disable_cache, verbose and use_gloo change nothing.

    Returns:
        The results: plain data, as `paceline.launch` returns it.

    Raises:
        UsageError: an option can't be met, or a result is no plain data.
        RankFailedError: a process failed.

    Examples:
        >>> horovod.run(train, args=(0.1,), num_proc=2)
        [0.25, 0.25]
    """
    for name, value in options.items():
        if name not in _WITHOUT_EFFECT and value not in (None, False):
            raise UsageError(
                f"horovod.run({name}={value!r})",
                "the processes are those of this host, and are started once",
                f"leave {name} out, or write a file and start it by `paceline horovodrun`",
            )
    if np is not None and num_proc is not None and np != num_proc:
        raise UsageError("horovod.run needs one number of processes", f"{num_proc=} and {np=}", "leave np out")
    ranks = num_proc or np or 1
    results = launch(GatheredCall(func, tuple(args), dict(kwargs or {})), ranks=ranks)
    assert isinstance(results, list)
    return results
