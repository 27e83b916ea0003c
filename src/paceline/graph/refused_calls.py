"""Calls whose effect a graph of forward operations would lose: refused, or traced as what they compute."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any, NoReturn

import torch
from torch import fx
from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing, get_proxy_mode, make_fx
from torch.utils.checkpoint import CheckpointFunction

from paceline.graph.own_code import NoGraphError, ctc_on_fakes, is_own_code_running, kept_call
from paceline.graph.writes import user_line
from paceline.nouns.errors import WorkloadError
from paceline.nouns.patching import patched
from paceline.torch_private.autograd import DIFFERENTIATES, apis, eager_transforms
from paceline.torch_private.tensors import REQUIRES_GRAD, SET_REQUIRES_GRAD

OWN_CODE = "train it by replicate or shard, which run the model's own code"
_SEED_MARK = 0x5EED_0F_7ACE  # a seed that nobody else is likely to set


@contextmanager
def effects_as_written(states: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Refuse, while the model's code is traced, what its graph would not do.

    Args:
        states: the parameters and buffers that it is traced with.

    Raises:
        WorkloadError: gradients are changed by hand, a parameter is frozen on the way, torch is seeded, or a tensor
            is given other memory.
    """
    with ExitStack() as stack:
        for replacement in (
            _gradients(),
            _lengths(),
            _frozen(states),
            _seeds(),
            _data(),
            _inference(),
            _casts(),
            _vmap(),
        ):
            stack.enter_context(replacement)
        yield


@contextmanager
def _gradients() -> Iterator[None]:
    """Keep calls of the user's autograd functions, and refuse other gradients that no operation says."""
    # The graph holds forward operations; autograd differentiates these anew. A backward pass that the user wrote
    # runs where the call is kept as it is.
    apply = vars(torch.autograd.Function)["apply"]
    hook: Callable[..., Any] = torch.Tensor.register_hook
    own_grad, own_backward = torch.autograd.grad, torch.autograd.backward

    def refused(error: type[WorkloadError], action: str, name: str, fix: str) -> WorkloadError:
        asked = "to be split, the model's gradients should follow from its operations"
        return error(asked, f"{action} {name} changes gradients", fix)

    def checked_apply(cls: Any, *arguments: Any, **named: Any) -> Any:
        name = f"{cls.__module__}.{cls.__qualname__}"
        if cls is CheckpointFunction:  # also in own code: some schedules ask only for the inputs' gradients
            fix = "use checkpoint(..., use_reentrant=False), or " + OWN_CODE
            raise refused(WorkloadError, "the autograd function", name, fix)
        # Those of non-reentrant checkpoint pass no gradient.
        if cls.__name__ == "_NoopSaveInputs" or is_own_code_running():
            return apply.__func__(cls, *arguments, **named)
        return kept_call(functools.partial(apply.__func__, cls), f"the autograd function {name}", arguments, named)

    def hooked(tensor: torch.Tensor, function: Any) -> Any:
        if is_own_code_running():
            return hook(tensor, function)
        name = getattr(function, "__qualname__", repr(function))
        raise refused(NoGraphError, "the tensor hook", name, "write it as an autograd function, or " + OWN_CODE)

    def only_in_own_code(original: Callable[..., Any]) -> Callable[..., Any]:
        def differentiated(*arguments: Any, **named: Any) -> Any:
            if is_own_code_running():
                return original(*arguments, **named)
            raise _inner_gradient("torch.autograd.grad or backward")

        return differentiated

    with (
        patched(torch.autograd, grad=only_in_own_code(own_grad), backward=only_in_own_code(own_backward)),
        patched(torch.autograd.Function, apply=classmethod(checked_apply)),
        patched(torch.Tensor, register_hook=hooked),
    ):
        yield


def _inner_gradient(by: str) -> NoGraphError:
    return NoGraphError(
        "tensor and pipeline run the model and its loss as a graph of forward operations",
        f"the model or the loss takes gradients itself ({by})",
        OWN_CODE,
    )


@contextmanager
def _lengths() -> Iterator[None]:
    """Keep calls of the CTC loss, which reads lengths: it is no operation only of shapes."""
    original = torch.nn.functional.ctc_loss

    def kept_ctc_loss(*arguments: Any, **named: Any) -> Any:
        if is_own_code_running():
            return original(*arguments, **named)
        if "log_probs" in named:
            arguments = (named.pop("log_probs"), *arguments)
        return kept_call(original, "ctc_loss", arguments, named, ctc_on_fakes)

    with patched(torch.nn.functional, ctc_loss=kept_ctc_loss):
        yield


@contextmanager
def _frozen(states: Mapping[str, torch.Tensor]) -> Iterator[None]:
    """Refuse to change `requires_grad` of a parameter or buffer."""
    names = {id(tensor): name for name, tensor in states.items()}
    flag: Any = REQUIRES_GRAD
    set_flag: Any = SET_REQUIRES_GRAD

    def check(tensor: torch.Tensor, requires_grad: bool) -> None:
        if id(tensor) in names and bool(flag.__get__(tensor)) != bool(requires_grad):
            raise WorkloadError(
                "the model's parameters should keep their requires_grad during the loss",
                f"requires_grad of {names[id(tensor)]} is set to {requires_grad} at {user_line()}",
                "set it in the model's factory and use parameter.detach() where no gradient is to flow, or " + OWN_CODE,
            )

    def assign(tensor: torch.Tensor, requires_grad: bool) -> None:
        check(tensor, requires_grad)
        flag.__set__(tensor, requires_grad)

    def call(tensor: torch.Tensor, requires_grad: bool = True) -> torch.Tensor:
        check(tensor, requires_grad)
        return set_flag(tensor, requires_grad)  # type: ignore[no-any-return]

    with patched(torch.Tensor, requires_grad=property(flag.__get__, assign), requires_grad_=call):
        yield


def _refuse_seed(*arguments: Any, **named: Any) -> NoReturn:
    raise _seeded(f"at {user_line()}")


def _seeded(place: str) -> WorkloadError:
    return WorkloadError(
        "the model should not seed the random numbers that it draws",
        f"it sets the state of torch's random numbers {place}",
        "seed with Workload(seed=...), or " + OWN_CODE,
    )


class _UnseededGenerator(torch.Generator):
    """A generator that refuses to be seeded, for the default one, whose own methods can't be replaced."""

    manual_seed = seed = set_state = graphsafe_set_state = set_offset = _refuse_seed  # type: ignore[assignment]


@contextmanager
def _seeds() -> Iterator[None]:
    """Refuse calls that seed torch's generators, by any name."""
    default = torch.default_generator
    # torch's functions draw from the generator that C++ holds; Python code finds `guard` under its names.
    guard = _UnseededGenerator()
    state = default.get_state()
    torch.Generator.set_state(guard, state)
    calls = dict.fromkeys(("manual_seed", "seed", "set_rng_state"), _refuse_seed)
    on_devices = calls | dict.fromkeys(("manual_seed_all", "seed_all", "set_rng_state_all"), _refuse_seed)
    default.manual_seed(_SEED_MARK)  # seen by whoever holds it by another name; draws keep its first seed
    try:
        with (
            patched(torch, default_generator=guard, **calls),
            patched(torch.random, default_generator=guard, **calls),
            patched(torch.cuda, **on_devices),
            patched(torch.cuda.random, **on_devices),
        ):
            yield
        if default.initial_seed() != _SEED_MARK:
            raise _seeded("in its forward pass")
    finally:
        # The mark, and what the trace drew, are gone afterwards.
        default.set_state(state)


@contextmanager
def _data() -> Iterator[None]:
    """Read `tensor.data` as `tensor.detach()`, which the tracer sees and which has the same memory."""

    def assign(tensor: torch.Tensor, value: Any) -> NoReturn:
        raise WorkloadError(
            "the model should not replace the memory of its tensors",
            f"it assigns to .data at {user_line()}",
            "write in place under torch.no_grad(): tensor.copy_(...)",
        )

    detach: Callable[[torch.Tensor], torch.Tensor] = torch.Tensor.detach
    with patched(torch.Tensor, data=property(detach, assign)):
        yield


@contextmanager
def _inference() -> Iterator[None]:
    """Run `torch.inference_mode` as `torch.no_grad`, which the tracer sees; values are the same."""

    def enter(self: Any) -> None:
        self._paceline_before = torch.is_grad_enabled()
        torch.set_grad_enabled(self._paceline_before and not self.mode)

    def leave(self: Any, *error: Any) -> None:
        torch.set_grad_enabled(self._paceline_before)

    with patched(torch.inference_mode, __enter__=enter, __exit__=leave):
        yield


@contextmanager
def _casts() -> Iterator[None]:
    """Let modules be cast to what they are (`self.router.to(torch.float32)` in forward), and refuse other casts."""

    def apply(
        module: torch.nn.Module, function: Callable[[torch.Tensor], torch.Tensor], *options: Any
    ) -> torch.nn.Module:
        for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
            if function(tensor) is not tensor:
                raise WorkloadError(
                    "the model should leave its parameters as they are in forward",
                    f"it casts or moves {type(module).__name__}.{name} at {user_line()}",
                    "cast in the model's factory, or cast what the module is called with; or " + OWN_CODE,
                )
        return module

    with patched(torch.nn.Module, _apply=apply):
        yield


@contextmanager
def _vmap() -> Iterator[None]:
    """Trace calls of `torch.vmap` as the operations on whole batches that they come to.

    The outer trace sees operations as the code calls them, before functions are transformed, so it would see nothing of
    these. A gradient taken within (`torch.func.grad`) is refused: its trace holds values that are detached, and the
    loss's own gradient would not flow through them.
    """
    original: Callable[..., Any] = apis.vmap_impl  # type: ignore[attr-defined]
    is_inside = False

    def traced(function: Any, in_dims: Any, out_dims: Any, *settings: Any, **named: Any) -> Any:
        nonlocal is_inside
        randomness, chunk_size, *arguments = settings

        def batched(*inputs: Any) -> Any:
            return original(function, in_dims, out_dims, randomness, chunk_size, *inputs, **named)

        if is_inside or get_proxy_mode() is None:
            return batched(*arguments)
        is_inside = True
        try:
            with disable_proxy_modes_tracing():
                inner = make_fx(batched)(*arguments)
        finally:
            is_inside = False
        return fx.Interpreter(inner).run(*arguments)

    def differentiates(original: Callable[..., Any]) -> Callable[..., Any]:
        def differentiated(*arguments: Any, **named: Any) -> Any:
            if is_own_code_running():
                return original(*arguments, **named)
            raise _inner_gradient("torch.func")

        return differentiated

    replaced = {name: differentiates(getattr(eager_transforms, name)) for name in DIFFERENTIATES}
    with patched(apis, vmap_impl=traced), patched(eager_transforms, **replaced):
        yield
