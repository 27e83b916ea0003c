"""Run a factory with its tensors on the meta device, and note what it does. `defer.py` says why."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from paceline.deferred_init.replay import CPU, Draw, Op, ReplayedMemory, Storage, View, changed, find_all, plan
from paceline.nouns.patching import patched
from paceline.torch_private.operations import TorchDispatchMode, schema_of

META = torch.device("meta")
# Each noted draw leaves its generator at a seed of its own, "Pace" and a number: a state that the factory
# sets later (manual_seed, the end of a fork_rng) can then be told from one that it had saved, and where.
FIRST_SEED = int.from_bytes(b"Pace") << 32
# Operations after which nothing is left of what was there.
FILLS = {"normal_", "uniform_", "zero_", "fill_", "copy_", "random_", "exponential_", "geometric_", "cauchy_"}
FILLS |= {"log_normal_", "bernoulli_"}
# Operations that make a storage and put nothing into it.
EMPTY = {"empty", "empty_like", "empty_strided", "empty_permuted", "new_empty", "new_empty_strided"}
AS_ONE = "_no_grad_trunc_normal_"  # in torch.nn.init: noted as one operation, see `recording`
HIDDEN_WRITES = {"native_batch_norm": (3, 4)}  # running statistics, which the schema does not mark
# Calls that hand out a tensor's memory, or move it: the recorder can't follow what is done with it then.
_LEAVING = ("numpy", "__array__", "__dlpack__", "storage", "share_memory_", "pin_memory", "cuda")
LEAVES_TORCH = {getattr(torch.Tensor, name) for name in _LEAVING}
ANSWERS = {  # what the factory is told about a tensor that is not there yet
    torch.Tensor.device.__get__: CPU,  # type: ignore[attr-defined]
    torch.Tensor.is_meta.__get__: False,  # type: ignore[attr-defined]
    torch.Tensor.is_cpu.__get__: True,  # type: ignore[attr-defined]
}


class CantDefer(Exception):
    """This factory can't be deferred, for `reason`; random numbers are where they were. Call it for real."""

    def __init__(self, reason: str) -> None:
        super().__init__(reason)
        self.reason = reason


class RecordedDraws:
    """The draws of a factory, from whichever generator, none of them made yet."""

    def __init__(self) -> None:
        self.by_seed: dict[int, Draw] = {}
        self.last: dict[torch.Generator, Draw] = {}
        self.states: dict[torch.Generator, torch.Tensor] = {}  # as the factory found them
        self.ends: list[Draw] = []
        self.find(torch.default_generator)

    def note(self, generator: torch.Generator) -> Draw:
        """Note that an operation draws from a generator."""
        draw = Draw(generator, self.find(generator))
        seed = FIRST_SEED + len(self.by_seed)
        self.by_seed[seed] = draw
        self.last[generator] = draw
        generator.manual_seed(seed)
        return draw

    def find(self, generator: torch.Generator) -> torch.Tensor | Draw | None:
        """Return the generator's position, as `Draw.start`."""
        # A generator keeps the seed that it was given last, however much is drawn from it.
        draw = self.by_seed.get(generator.initial_seed())
        if draw is None:
            state = generator.get_state()
            self.states.setdefault(generator, state)
            return state
        # None: where the draw before it leaves it. Otherwise the factory went back to an earlier draw's end.
        if draw is self.last.get(generator):
            return None
        draw.is_returned_to = True
        return draw

    def close(self) -> None:
        """Note where the factory left the generators, and put them back to where it found them."""
        self.ends = [Draw(generator, self.find(generator)) for generator in self.states]
        for generator, state in self.states.items():
            generator.set_state(state)


class Recorder:
    """Notes a factory's operations. Two modes call it: one sees what Python asks for, one what torch then does."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.storages: list[Storage] = []
        self.numbers: dict[int, int] = {}  # by the storage's id
        self.stand_ins: dict[int, torch.UntypedStorage] = {}  # by the id of a real one
        self.draws = RecordedDraws()
        self.failure: CantDefer | None = None
        self.is_inside = False  # this class's own calls are not the factory's

    def fail(self, reason: str) -> CantDefer:
        """Return an error to be raised; noted as well, because the factory may catch it and go on."""
        self.failure = self.failure or CantDefer(reason)
        return self.failure

    def view(self, tensor: torch.Tensor, is_new: bool = False) -> View:
        """Return the view of the tensor's values.

        Raises:
            CantDefer: in no place known here; `is_new` says that there are none yet.
        """
        if tensor.is_conj() or tensor.is_neg():
            raise self.fail("it makes a conjugate or negative view")
        if tensor.device not in (CPU, META):
            raise self.fail(f"it uses a tensor on {tensor.device}")
        number = self._number(tensor.untyped_storage(), is_new)
        if not tensor.is_meta and not tensor.is_inference():
            self.storages[number].watched.append((tensor, tensor._version))
        return View(number, tuple(tensor.shape), tensor.stride(), int(tensor.storage_offset()), tensor.dtype)

    def _number(self, storage: torch.UntypedStorage, is_new: bool) -> int:
        # `Storage` holds the storage: no other one gets its id.
        if id(storage) not in self.numbers:
            is_real = storage.device == CPU
            if not is_real and not is_new:
                raise self.fail("it uses a tensor on the meta device that was made elsewhere")
            self.numbers[id(storage)] = len(self.storages)
            self.storages.append(Storage(storage, storage if is_real else None))
        return self.numbers[id(storage)]

    def lift(self, real: torch.Tensor) -> torch.Tensor:
        """Return a tensor on the meta device that stands for a copy of `real`."""
        copy = real.detach().clone()
        stand_in = torch.empty_strided(copy.shape, copy.stride(), dtype=copy.dtype, device=META)
        self.storages[self.view(stand_in, is_new=True).storage].source = copy.untyped_storage()
        return stand_in

    def values(self, tensors: Iterable[torch.Tensor], operation: str) -> list[torch.Tensor]:
        """Compute what is in the tensors at this point of the factory.

        Raises:
            CantDefer: random numbers are.
        """
        views = [self.view(tensor) for tensor in tensors]
        steps, _ = plan(self.ops, {view.storage for view in views}, with_draws=False)
        if any(step.op.draw for step in steps):
            raise self.fail(f"it looks at random numbers that are not drawn yet ({operation})")
        memory = ReplayedMemory(self.storages)
        for step in steps:
            memory.do(step.op)
            memory.forget(step.unused - step.final)
        return [memory.tensor(view, is_written=True).clone() for view in views]

    def note(self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Do an operation on the meta device, and note it."""
        # Step 1: what is real already, or known, is not put off.
        name = call.overloadpacket.__name__
        tensors = list(find_all((args, kwargs)))
        is_random = torch.Tag.nondeterministic_seeded in call.tags
        written = list(_written(call, args, kwargs))
        if name == "lift_fresh" and not tensors[0].is_meta:  # the end of `torch.tensor(values)`
            return self.lift(tensors[0])
        if _is_alias(call) and not is_random and _are_real(tensors):
            return self._do_at_once(call, args, kwargs, written)
        if any(not tensor.is_meta for tensor in written):
            raise self.fail(f"{name} writes into a tensor that is there already what is only made later")
        # Step 2: do it on the meta device, for shapes and strides; the notes have views in the place of tensors.
        self._move_to_meta(call, kwargs, is_creation=not tensors)
        args = changed(args, torch.UntypedStorage, self._stand_in)
        on_meta = changed((args, kwargs), torch.Tensor, _on_meta)
        noted = changed((args, kwargs), torch.Tensor, self.view)
        # Before the call, which may let a storage grow (`resize_`).
        num_bytes = [tensor.untyped_storage().nbytes() for tensor in written]
        try:
            result = call(*on_meta[0], **on_meta[1])
        except (RuntimeError, NotImplementedError):
            if written or is_random:
                raise
            return self._note_real(call, args, kwargs, tensors)
        if torch.Tag.inplace_view in call.tags:  # sizes and strides; whoever uses the tensor next notes them anew
            for old, tensor in zip(num_bytes, written, strict=True):
                has_grown = 0 < old < tensor.untyped_storage().nbytes()
                if has_grown:
                    raise self.fail("it lets a tensor grow")
            return result
        # Step 3: note it, unless it only makes views or empty memory. A draw is always noted.
        outputs = [self._new_view(tensor) for tensor in find_all(result)]
        if (written or any(outputs) or is_random) and name not in EMPTY:
            self._append(call, noted, written, outputs)
        return result

    def _note_real(self, call: Any, args: Any, kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Any:
        """Do an operation for which the meta device has no answer, as it depends on values, on the values of now."""
        values = iter(self.values(tensors, call.overloadpacket.__name__))
        args, kwargs = changed((args, kwargs), torch.Tensor, lambda _: next(values))
        return changed(call(*args, **_on_cpu(kwargs)), torch.Tensor, self.lift)

    def _new_view(self, tensor: torch.Tensor) -> View | None:
        """Return the view of a result's values, or None where an operation before made its storage."""
        if id(tensor.untyped_storage()) in self.numbers:
            return None
        return self.view(tensor, is_new=True)

    def _append(self, call: Any, noted: Any, written: list[torch.Tensor], outputs: list[View | None]) -> None:
        """Note an operation whose arguments, with views in the place of tensors, are `noted`."""
        args, kwargs = noted
        targets = [self.view(tensor) for tensor in written]
        read_arguments = noted
        filled = set()
        if call.overloadpacket.__name__ in FILLS:
            read_arguments = (args[1:], kwargs)  # the first one is filled
            for target in targets:
                if target.covers(self.storages[target.storage].storage.nbytes()):
                    filled.add(target.storage)
        reads = {view.storage for view in find_all(read_arguments, View)}
        new = {view.storage for view in outputs if view}
        draw = None
        if torch.Tag.nondeterministic_seeded in call.tags:
            generator = next(find_all(noted, torch.Generator), torch.default_generator)
            draw = self.draws.note(generator)
        self.ops.append(
            Op(
                call=call,
                args=args,
                kwargs=_on_cpu(kwargs),
                outputs=outputs,
                reads=reads,
                writes=new | {target.storage for target in targets},
                fills=(filled - reads) | new,
                default_dtype=torch.get_default_dtype(),
                draw=draw,
            )
        )

    def note_as_one(self, fill: Any, tensor: torch.Tensor, args: Any, kwargs: dict[str, Any]) -> torch.Tensor:
        """Note a function that fills `tensor` with random numbers and looks at them on the way."""
        target = self.view(tensor)
        generator = next(find_all((args, kwargs), torch.Generator), torch.default_generator)
        fills = set()
        if target.covers(tensor.untyped_storage().nbytes()):
            fills.add(target.storage)
        self.ops.append(
            Op(
                call=fill,
                args=(target, *args),
                kwargs=kwargs,
                outputs=[None],
                reads=set(),
                writes={target.storage},
                fills=fills,
                default_dtype=torch.get_default_dtype(),
                draw=self.draws.note(generator),
            )
        )
        return tensor

    def _do_at_once(self, call: Any, args: Any, kwargs: Any, written: list[torch.Tensor]) -> Any:
        """Make a view of a real tensor, or write real values into one; what was to be read from it stays as it was."""
        for tensor in written:
            number = self.numbers.pop(id(tensor.untyped_storage()), None)
            if number is not None:
                recorded = self.storages[number]
                recorded.source = tensor.untyped_storage().clone()
                recorded.watched = []
        return call(*args, **kwargs)

    def _stand_in(self, storage: torch.UntypedStorage) -> torch.UntypedStorage:
        """Return a storage on the meta device, for that of a file that a tensor is made of."""
        if storage.device != CPU:
            return storage
        if id(storage) not in self.stand_ins:
            stand_in = torch.UntypedStorage(storage.nbytes(), device=META)
            self.stand_ins[id(storage)] = stand_in
            self.storages[self._number(stand_in, is_new=True)].source = storage
        return self.stand_ins[id(storage)]

    def _move_to_meta(self, call: Any, kwargs: dict[str, Any], is_creation: bool) -> None:
        """Have an operation that takes a device make its tensor on the meta device."""
        if all(argument.name != "device" for argument in schema_of(call).arguments):
            return
        device = kwargs.get("device")
        if device is not None and torch.device(device) not in (CPU, META):
            raise self.fail(f"it makes a tensor on {device}")
        if device is not None or is_creation:
            kwargs["device"] = META


class Python(TorchFunctionMode):
    """Sees what the factory asks torch for, and keeps from it that its tensors are on the meta device."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Do one call of the factory's, or of a module's that it makes."""
        kwargs = kwargs or {}
        if self.recorder.is_inside:
            return func(*args, **kwargs)
        if args and isinstance(args[0], torch.Tensor) and args[0].is_meta:
            return self._of_deferred(func, args, kwargs)
        device = kwargs.get("device")
        if device is not None and torch.device(device) != CPU:
            raise self.recorder.fail(f"it makes a tensor on {device}")
        return func(*args, **kwargs)

    def _of_deferred(self, func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Do one call on a tensor that is not there yet."""
        tensor: torch.Tensor = args[0]
        if func in ANSWERS:
            return ANSWERS[func]
        if func in LEAVES_TORCH:
            raise self.recorder.fail(f"it takes values out of torch ({func.__name__}) before they are made")
        if func is torch.Tensor.tolist:
            return self.inside(lambda: self.recorder.values([tensor], "tolist")[0].tolist())
        if func is torch.Tensor.data_ptr:  # tensors are told apart by it; there is nothing to point to
            return (id(tensor.untyped_storage()) << 32) + tensor.storage_offset() * tensor.itemsize
        if func is torch.Tensor.cpu:
            return tensor
        if func is torch.Tensor.to:
            args, kwargs = changed((args, kwargs), torch.device | str, self._meta_for_cpu)
        elif kwargs.get("device") is not None:
            self._meta_for_cpu(kwargs["device"])
        return func(*args, **kwargs)

    def _meta_for_cpu(self, device: Any) -> torch.device:
        if torch.device(device) != CPU:
            raise self.recorder.fail(f"it moves a tensor to {device}")
        return META

    def inside(self, work: Callable[[], object]) -> object:
        """Call torch without its being noted."""
        self.recorder.is_inside = True
        try:
            return work()
        finally:
            self.recorder.is_inside = False


class Aten(TorchDispatchMode):
    """Sees the operations of ATen that come of it."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recorder = recorder

    def __torch_dispatch__(self, func: Any, types: object, args: Any = (), kwargs: Any = None) -> Any:
        """Do one operation, and note it."""
        if self.recorder.is_inside:
            return func(*args, **(kwargs or {}))
        self.recorder.is_inside = True
        try:
            return self.recorder.note(func, args, dict(kwargs or {}))
        except Exception as error:
            raise self.recorder.fail(f"{func} failed on tensors without data: {error}") from error
        finally:
            self.recorder.is_inside = False


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Note what is called here.

    torch's `trunc_normal_` draws again until no number is out of bounds, so it is noted as one operation: within
    it would have to know the numbers. For others of the kind there is `CantDefer`.
    """
    python = Python(recorder)
    plain = getattr(torch.nn.init, AS_ONE, None)  # a private name, which another torch may not have

    def noted(tensor: torch.Tensor, *args: object, **kwargs: object) -> object:
        if python.inside(lambda: not isinstance(tensor, torch.Tensor) or not tensor.is_meta):
            return plain(tensor, *args, **kwargs)  # type: ignore[misc]
        return python.inside(lambda: recorder.note_as_one(plain, tensor, args, kwargs))

    replacements = {AS_ONE: noted} if plain else {}
    with patched(torch.nn.init, **replacements), python, Aten(recorder):
        yield


def _is_alias(call: Any) -> bool:
    """True if an operation writes into an argument, or returns a view of one."""
    schema = schema_of(call)
    return schema.is_mutable or any(value.alias_info for value in schema.returns)


def _are_real(tensors: list[torch.Tensor]) -> bool:
    """True if there are tensors, and all of them have values."""
    return bool(tensors) and not any(tensor.is_meta for tensor in tensors)


def _on_cpu(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of an operation for real tensors."""
    return {**kwargs, "device": CPU} if "device" in kwargs else kwargs


def _written(call: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that an operation writes into."""
    for index, argument in enumerate(schema_of(call).arguments):
        if argument.alias_info and argument.alias_info.is_write:
            value = args[index] if index < len(args) else kwargs.get(argument.name)
            yield from find_all(value)
    hidden = HIDDEN_WRITES.get(call.overloadpacket.__name__, ())
    yield from find_all([args[index] for index in hidden])


def _on_meta(tensor: torch.Tensor) -> torch.Tensor:
    if tensor.is_meta:
        return tensor
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=META)
