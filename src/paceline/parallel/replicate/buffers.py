"""Buffers, such as a batch norm's running statistics, made equal on all ranks after each step.

Only those that a forward pass changed are sent. A change shows in the tensor's version counter, or in another
tensor in its place. Writes through `.data` pass that counter, so values are compared too, by sums over their bits.
torch's batch norms are spared that: their count of batches shows a change, and stands for the statistics. So is, after
the first steps, a buffer that was not written this way in them, if it is large (to read a table takes longer than a
short step) or on a GPU (the host would wait for it).

Where a rank's buffer has another shape or dtype than all ranks last had, its flag says so, and the ranks tell one
another the shapes. What can't be made equal then is each rank's own where it is derived (`persistent=False`: a table
that grows with the longest sequence), and an error elsewhere.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple

import torch

from paceline.comm.collectives import AxisComm
from paceline.nouns.errors import WorkloadError
from paceline.torch_private.modules import NormBase, non_persistent_buffers
from paceline.torch_private.operations import FakeTensor

_Slots = tuple[torch.nn.Module, dict[str, torch.Tensor | None]]
_Form = tuple[torch.dtype, tuple[int, ...]] | None  # None: there is no tensor
_OTHER_FORM = 2**20  # added to a buffer's flag: more than there are ranks, and small enough for a float64's sum
_SMALL_BYTES = 2**16  # what a copy of a buffer may take
_LARGE_BYTES = 2**20  # above it a buffer's values are compared only in the first steps
_FIRST_STEPS = 3
_NAMED = 3  # buffers that a notice names
_WIDTH = 1024  # of the table whose rows and columns are summed
# Sorted, so that a dtype's place is the same on every rank: it stands for the dtype in messages.
_DTYPES = sorted({value for value in vars(torch).values() if isinstance(value, torch.dtype)}, key=str)


class _Print(NamedTuple):
    """A print of a buffer's values, `sums`, and what it was taken from."""

    tensor: torch.Tensor
    version: int
    form: _Form
    sums: torch.Tensor


class Buffers:
    """The buffers of a model on this rank.

    Attributes:
        names: the buffers' names, as in `named_buffers` when this was made.
        changed: for each buffer, whether this rank's forward passes changed it in the step.
        is_compared: whether values are compared, beside what shows a write: other ranks need to know of each write.
        are_derived: whether no buffer is in the model's state (`persistent=False`): each rank can compute them anew.
    """

    def __init__(self, model: torch.nn.Module, comm: AxisComm) -> None:
        self.comm = comm
        self.is_compared = comm.size > 1
        number: dict[int, int] = {}  # of each buffer, by identity
        self.slots: list[tuple[torch.nn.Module, str]] = []  # where each buffer is: forward may assign another tensor
        self.names: list[str] = []
        for path, module in model.named_modules():
            for key, tensor in module._buffers.items():
                if tensor is not None and id(tensor) not in number:
                    number[id(tensor)] = len(self.slots)
                    self.slots.append((module, key))
                    self.names.append(f"{path}.{key}" if path else key)
        self.are_derived = all(key in non_persistent_buffers(module) for module, key in self.slots)
        self.modules: list[list[int]] = []  # the buffers of each module that has several
        for module in model.modules():
            tensors = module.buffers(recurse=False)
            indices = [number[id(tensor)] for tensor in tensors if id(tensor) in number]
            if len(indices) > 1:
                self.modules.append(indices)
        self.compared: list[int] = []
        for index, (module, _) in enumerate(self.slots):
            if not _counts_batches(module):
                self.compared.append(index)
        self.agreed = [_form(tensor) for tensor in self.tensors]  # None, too, where ranks have different ones
        self.changed = [False] * len(self.slots)
        self.at_begin: list[tuple[torch.Tensor | None, int]] = []  # the tensors when the step began, and their versions
        self.steps = 0
        self.prints: dict[int, _Print] = {}  # of the last time that values were read
        self.rewritten: set[int] = set()  # buffers that a step wrote unseen
        self.made_equal: dict[str, str] = {}  # the reduction, by the name of each buffer that `notices` speaks of
        self.notices: list[str] = []

    @property
    def tensors(self) -> list[torch.Tensor | None]:
        """Return the buffers as they are now."""
        return [module._buffers.get(key) for module, key in self.slots]

    def begin_step(self) -> None:
        """Remember the buffers as they are."""
        self.steps += 1
        # The tensors themselves: the next one may get a freed one's address.
        self.at_begin = [(tensor, _version(tensor)) for tensor in self.tensors]
        self.prints = self._prints(self.prints) if self.is_compared else {}

    def take_forms(self, cut: Collection[torch.Tensor]) -> None:
        """Know the shapes that these buffers have now: every rank has cut them alike."""
        for index, tensor in enumerate(self.tensors):
            if any(tensor is cut_tensor for cut_tensor in cut):
                self.agreed[index] = _form(tensor)
                if index in self.prints and tensor is not None:
                    self.prints[index] = _print_of(tensor)

    def has_changed(self) -> bool:
        """Return whether something has written a buffer since the step began; `find_changed` finds it again."""
        touched = self._find_touched(self.tensors)
        if touched:
            return True
        rewritten, _ = self._compare(touched)
        return bool(rewritten)

    def find_changed(self) -> list[int]:
        """Return a flag for each buffer, to be summed over the ranks: 1 if this rank's forward passes changed it.

        `_OTHER_FORM` is added where its form is not the agreed one, changed or not.
        """
        tensors = self.tensors
        touched = self._find_touched(tensors)
        # Values are compared last, and only of buffers of which nothing else shows a write: to read them takes time.
        touched |= self._find_rewritten(touched)
        self.at_begin = []  # a replaced tensor's memory is free from here on
        self.changed = [False] * len(tensors)
        flags = []
        for index, (tensor, agreed) in enumerate(zip(tensors, self.agreed, strict=True)):
            self.changed[index] = index in touched and not _is_elsewhere(tensor)
            flag = int(self.changed[index])
            if _form(tensor) != agreed:
                flag += _OTHER_FORM
            flags.append(flag)
        return flags

    def _find_touched(self, tensors: list[torch.Tensor | None]) -> set[int]:
        """Return the buffers of every module of which one buffer was replaced or shows a write since the step began."""
        touched = set()
        for index, (tensor, version) in enumerate(self.at_begin):
            if tensors[index] is not tensor or _version(tensors[index]) != version:
                touched.add(index)
        # A count of batches shows the change of the statistics beside it.
        beside = [indices for indices in self.modules if touched.intersection(indices)]
        return touched.union(*beside)

    def reduce(self, flags: Sequence[int]) -> None:
        """Make float buffers the mean over the ranks that changed them, others the largest.

        Args:
            flags: for each buffer, the sum of what the ranks' `find_changed` returned.

        Raises:
            WorkloadError: a buffer that belongs to the model's state has different shapes on different ranks.
        """
        if self.comm.size == 1 or not any(flags):
            return
        # The remainder is how many ranks changed it; the quotient, how many have it in another form than agreed.
        ranks_changed = [flag % _OTHER_FORM for flag in flags]
        due = []
        for index, tensor in enumerate(self.tensors):
            if ranks_changed[index] and not _is_elsewhere(tensor):
                due.append(index)
        # Shapes first, in a message of their own, and only in a step in which one is new on some rank.
        per_rank = self._agree_on_forms([index for index in due if flags[index] >= _OTHER_FORM])
        tensors = self.tensors  # anew: some were replaced by tensors of the agreed form
        by_dtype: dict[torch.dtype, list[int]] = {}
        for index in due:
            tensor = tensors[index]
            if tensor is not None and index not in per_rank:
                is_mean = tensor.is_floating_point() or tensor.is_complex()
                self._note_made_equal(index, "the mean" if is_mean else "the largest")
                self._make_writable(index, tensor)
                by_dtype.setdefault(tensor.dtype, []).append(index)
        for dtype, indices in by_dtype.items():
            self._reduce_dtype(dtype, indices, ranks_changed)

    def _note_made_equal(self, index: int, reduction: str) -> None:
        """Note what becomes of a buffer that forward passes write, to be said once."""
        module, key = self.slots[index]
        # Batch norm's statistics are those of the whole batch; what any rank can compute anew depends on no sample.
        is_told = self.names[index] in self.made_equal or key in non_persistent_buffers(module)
        if is_told or type(module).__module__.startswith("torch.nn."):
            return
        self.made_equal[self.names[index]] = reduction
        of_each = ", ".join(f"{name} ({reduction})" for name, reduction in list(self.made_equal.items())[:_NAMED])
        more = f" and {len(self.made_equal) - _NAMED} more" if len(self.made_equal) > _NAMED else ""
        self.notices = [
            f"the model writes into buffers of its state: {of_each}{more}. Each rank writes from its own samples, and "
            "after each step the buffer becomes that of all ranks' values. This is one process's only if that holds "
            "for what is written, such as a mean over equally many samples: for a sum, a count, a queue or a codebook "
            "take the others' samples into it, by paceline.all_reduce or paceline.all_gather in forward"
        ]

    def put_back(self, index: int, first: torch.Tensor) -> bool:
        """Let `first`, the tensor that the buffer was made with, have its values again.

        Returns:
            Whether the step changed them.

        Raises:
            WorkloadError: the buffer belongs to the model's state and has another shape or dtype now.
        """
        module, key = self.slots[index]
        now = module._buffers.get(key)
        if not self.changed[index] or now is first:
            return self.changed[index]
        if now is None or _form(now) != _form(first):
            if key in non_persistent_buffers(module):
                return False
            raise WorkloadError(
                f"the buffer {self.names[index]} should become the mean of all workers'",
                f"it is {_shown_form(_form(now))} now, and servers keep {_shown_form(_form(first))}, as it was made",
                "give it its last shape where it is registered; or, if any worker can compute it anew, register it "
                "with persistent=False: then each worker keeps its own",
            )
        self._note_made_equal(index, "the mean")
        first.detach().copy_(now.detach())
        module._buffers[key] = first
        return True

    def _reduce_dtype(self, dtype: torch.dtype, indices: list[int], ranks_changed: list[int]) -> None:
        is_mean = dtype.is_floating_point or dtype.is_complex
        # In float64 the sum of equal values is exact, and that of a mask's smallest number is no -inf.
        wide = torch.float64 if is_mean else torch.int64
        current = self.tensors
        tensors = []
        flats = []
        for index in indices:
            buffer = current[index]
            assert buffer is not None
            tensor = _real(buffer)
            flat = tensor.reshape(-1).to(wide)
            if is_mean and not self.changed[index]:  # a rank without samples holds old statistics: they must not count
                flat = torch.zeros_like(flat)
            tensors.append(tensor)
            flats.append(flat)
        sent = torch.cat(flats)
        self.comm.all_reduce(sent, "sum" if is_mean else "max")
        reduced = sent.split([flat.numel() for flat in flats])
        for index, tensor, values in zip(indices, tensors, reduced, strict=True):
            result = values / ranks_changed[index] if is_mean else values
            tensor.copy_(result.view_as(tensor))

    def _make_writable(self, index: int, tensor: torch.Tensor) -> None:
        """Give an expanded tensor, whose elements share memory, memory for each."""
        for stride, size in zip(tensor.stride(), tensor.shape, strict=True):
            is_expanded = stride == 0 and size > 1
            if is_expanded:
                module, key = self.slots[index]
                module._buffers[key] = tensor.detach().clone(memory_format=torch.contiguous_format)
                return

    def _agree_on_forms(self, indices: list[int]) -> set[int]:
        """Exchange the forms of these buffers; return those that stay each rank's own.

        A rank that did not change a buffer takes over the others' form: it held an old value.
        """
        if not indices:
            return set()
        per_rank: set[int] = set()
        for index, reports in zip(indices, self._exchange(indices), strict=True):
            module, key = self.slots[index]
            is_derived = key in non_persistent_buffers(module)
            forms = {form for has_changed, form in reports if has_changed or is_derived}
            if len(forms) > 1 and not is_derived:
                raise self._differ(index, reports)
            if len(forms) != 1:
                self.agreed[index] = None
                per_rank.add(index)
                continue
            self.agreed[index] = forms.pop()
            if _form(module._buffers[key]) != self.agreed[index]:
                module._buffers[key] = self._empty(self.agreed[index])
        return per_rank

    def _exchange(self, indices: list[int]) -> list[list[tuple[bool, _Form]]]:
        """Return for each buffer, rank by rank, whether it was changed there, and its form."""
        # Per buffer: changed or not, dtype, number of dimensions, sizes. Rows may be of different lengths.
        own_row: list[int] = []
        for index in indices:
            form = _form(self.tensors[index])
            dtype, shape = (-1, ()) if form is None else (_DTYPES.index(form[0]), form[1])
            own_row += [self.changed[index], dtype, len(shape), *shape]
        ranks = self.comm.all_gather(torch.tensor(own_row, dtype=torch.int64, device=self._device()))
        rows = [iter(row.tolist()) for row in ranks]
        reports = []
        for _ in indices:  # each rank's row is read on from where the buffer before ended
            reports.append([_read_form(row) for row in rows])
        return reports

    def _differ(self, index: int, reports: list[tuple[bool, _Form]]) -> WorkloadError:
        """Return the error of the first two ranks that changed a buffer to different forms."""
        changed = []
        for rank, (has_changed, form) in zip(self.comm.peers, reports, strict=True):
            if has_changed:
                changed.append((rank, form))
        first = changed[0]
        second = next(report for report in changed if report[1] != first[1])
        return WorkloadError(
            f"the buffer {self.names[index]}, which the forward pass changes, should become the mean of all ranks'",
            f"{_shown(*first)}, {_shown(*second)}",
            "give it the same shape on every rank; or, if any rank can compute it anew, such as a table of positions, "
            "register it with persistent=False: then each rank keeps its own",
        )

    def _empty(self, form: _Form) -> torch.Tensor | None:
        if form is None:
            return None
        dtype, shape = form
        return torch.zeros(shape, dtype=dtype, device=self._device())

    def _device(self) -> torch.device:
        """Return the device of the first tensor that is not on the meta device."""
        for module, _ in self.slots:
            for tensor in (*module.parameters(), *module.buffers()):
                if not tensor.is_meta:
                    return tensor.device
        return torch.device("cpu")

    def _prints(self, earlier: Mapping[int, _Print], left_out: Collection[int] = ()) -> dict[int, _Print]:
        """Return prints of the compared buffers' values; an earlier print stays where no write shows since."""
        tensors = self.tensors
        if any(isinstance(tensor, FakeTensor) for tensor in tensors):
            return {}
        prints = {}
        for index in self.compared:
            tensor = tensors[index]
            if tensor is None or index in left_out or not self._is_readable(index, tensor):
                continue
            before = earlier.get(index)
            if before is not None and before.tensor is tensor and before.version == _version(tensor):
                prints[index] = before
            else:
                prints[index] = _print_of(tensor)
        return prints

    def _is_readable(self, index: int, tensor: torch.Tensor) -> bool:
        """True if a buffer has values, and they are worth the time."""
        is_quick = tensor.nbytes <= _LARGE_BYTES and tensor.device.type == "cpu"
        is_due = is_quick or self.steps <= _FIRST_STEPS or index in self.rewritten
        return is_due and not tensor.is_meta and _is_plain(tensor)

    def _find_rewritten(self, touched: set[int]) -> set[int]:
        """Return buffers, beside the `touched` ones, whose values are others than at the beginning of the step."""
        rewritten, now = self._compare(touched)
        if now is not None:
            self.prints = now  # the next step begins with them
        self.rewritten |= rewritten
        return rewritten

    def _compare(self, touched: set[int]) -> tuple[set[int], dict[int, _Print] | None]:
        """Return the buffers, beside the `touched` ones, with other values, and the prints of all, if any are taken."""
        if not self.prints:
            return set(), None
        before = self.prints
        now = self._prints({}, touched)
        same_form = [index for index in now if index in before and now[index].form == before[index].form]
        rewritten = before.keys() - touched - set(same_form)
        if same_form:
            differ = torch.stack([(before[index].sums != now[index].sums).any() for index in same_form])
            for index, is_other in zip(same_form, differ.tolist(), strict=True):  # `tolist` waits for the device, once
                if is_other:
                    rewritten.add(index)
        return rewritten, now


class EarlierPasses:
    """What earlier forward passes of some modules did to their large buffers.

    Attributes:
        passes: the number of these passes.
        rewritten: the buffers, by module's number and name, that a pass wrote without a new version, as `.data` does.
    """

    def __init__(self) -> None:
        self.passes = 0
        self.rewritten: set[tuple[int, str]] = set()


class KeptBuffers:
    """The buffers of some modules as they are now; while it is entered the modules see copies of these.

    What a forward pass writes meanwhile is gone afterwards. Other tensors take the buffers' places: old values written
    into the buffers themselves would change what autograd has saved of them.

    Args:
        modules: the modules whose own buffers are meant, without those of modules inside them.
    """

    def __init__(self, modules: Iterable[torch.nn.Module]) -> None:
        self.first: list[_Slots] = [(module, dict(module._buffers)) for module in modules]
        self.versions: list[int] = []
        for _, buffers in self.first:
            self.versions.extend(_version(tensor) for tensor in buffers.values())
        self.before = _copied(self.first)
        self.now: list[_Slots] = []

    def drop_constants(self, earlier: EarlierPasses) -> None:
        """Hold no copies of large buffers that are as they were, such as masks: the buffers themselves will do.

        Args:
            earlier: the record of these modules' earlier passes. The values of a GPU's buffers, for which the host
                would wait, are compared only in the first passes.
        """
        versions = iter(self.versions)
        is_early = earlier.passes < _FIRST_STEPS
        earlier.passes += 1
        for number, ((module, first), (_, before)) in enumerate(zip(self.first, self.before, strict=True)):
            for key, tensor in first.items():
                version = next(versions)
                copy = before[key]
                if tensor is None or copy is None or tensor.nbytes <= _SMALL_BYTES:
                    continue
                is_unwritten = module._buffers.get(key) is tensor and tensor._version == version
                if is_unwritten and (is_early or tensor.device.type == "cpu") and not _same(tensor, copy):
                    earlier.rewritten.add((number, key))
                    is_unwritten = False
                if is_unwritten and (number, key) not in earlier.rewritten:
                    before[key] = tensor
        self.first = []
        self.versions = []

    def __enter__(self) -> None:
        self.now = [(module, dict(module._buffers)) for module, _ in self.before]
        _put(_copied(self.before))

    def __exit__(self, *error: object) -> None:
        _put(self.now)
        self.now = []


def _copied(slots: Iterable[_Slots]) -> list[_Slots]:
    """Return copies of the tensors in `slots`; one that stands in two places stays one."""
    copies: dict[int, torch.Tensor | None] = {}
    result = []
    for module, buffers in slots:
        for tensor in buffers.values():
            if tensor is None or tensor.requires_grad:  # autograd sees to the writes into its own tensors
                copies[id(tensor)] = tensor
            elif id(tensor) not in copies:
                copies[id(tensor)] = tensor.detach().clone()
        result.append((module, {key: copies[id(tensor)] for key, tensor in buffers.items()}))
    return result


def _put(slots: Iterable[_Slots]) -> None:
    for module, buffers in slots:
        module._buffers.clear()
        module._buffers.update(buffers)


def _counts_batches(module: torch.nn.Module) -> bool:
    """True for a batch norm of torch's own, whose every write of statistics counts a batch."""
    return isinstance(module, NormBase) and module.num_batches_tracked is not None


def _is_elsewhere(tensor: torch.Tensor | None) -> bool:
    """True for a buffer on the meta device: another stage holds it."""
    return tensor is not None and tensor.is_meta


def _version(tensor: torch.Tensor | None) -> int:
    return 0 if tensor is None else tensor._version


def _form(tensor: torch.Tensor | None) -> _Form:
    return None if tensor is None else (tensor.dtype, tuple(tensor.shape))


def _read_form(row: Iterator[int]) -> tuple[bool, _Form]:
    """Read one buffer of a rank's row: whether it was changed, its dtype's number, its rank, its shape."""
    has_changed = bool(next(row))
    dtype = next(row)
    dims = next(row)
    shape = tuple(next(row) for _ in range(dims))
    if dtype < 0:
        return has_changed, None
    return has_changed, (_DTYPES[dtype], shape)


def _shown(rank: int, form: _Form) -> str:
    return f"rank {rank} has {_shown_form(form)}"


def _shown_form(form: _Form) -> str:
    return "None" if form is None else f"one of shape {form[1]} and {form[0]}"


def _real(tensor: torch.Tensor) -> torch.Tensor:
    """Return the tensor as real numbers, to be written into."""
    tensor = tensor.detach()
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor


def _is_plain(tensor: torch.Tensor) -> bool:
    return tensor.layout == torch.strided and not tensor.is_quantized


def _same(tensor: torch.Tensor, copy: torch.Tensor) -> bool:
    """True if two tensors are the same bit for bit, as far as there are values."""
    if isinstance(tensor, FakeTensor) or tensor.is_meta:
        return True
    if _form(tensor) != _form(copy) or not _is_plain(tensor):
        return False
    return torch.equal(_bits_of(tensor), _bits_of(copy))


def _bits_of(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _print_of(tensor: torch.Tensor) -> _Print:
    return _Print(tensor, _version(tensor), _form(tensor), sums_of(tensor))


def sums_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return numbers that change when a bit does: the bits as a table of 64-bit words, its rows and columns added up.

    Unlike a copy it takes a thousandth of the memory. A small tensor's is the tensor.
    """
    bits = _bits_of(tensor)
    if bits.numel() <= 8 * _WIDTH:
        return bits.clone()
    if bits.storage_offset() % 8:  # a view as 64-bit words must begin at one
        bits = bits.clone()
    rows, remainder = divmod(bits.numel(), 8 * _WIDTH)
    table = bits[: bits.numel() - remainder].view(torch.int64).view(rows, _WIDTH)
    return torch.cat([table.sum(0), table.sum(1), bits[bits.numel() - remainder :].to(torch.int64)])
