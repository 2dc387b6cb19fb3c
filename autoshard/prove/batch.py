"""Check that the batch of a model can be divided.

    which dimensions     the leaf of the first dimension of the inputs, followed through one captured run (axes.batch)
    that rows are apart  the ops of whole runs, one by one (prove.apart): this decides
    and once more        random values, whole and in parts: outputs, gradients and buffers agree (prove.parts)
    who mixes them       the op; of numbers, the first module whose output differs

The numbers may only refuse more. They are run with rows that differ in all values; with masks that end at another place
in every row, since code may look whether any row is masked at all; and with rows that are all alike, since what they
share (the capacity of an expert) may not be short otherwise.
"""

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autoshard import nested
from autoshard.axes.batch import BatchWalk, Rows, follow, labels_of, mixing_in, walk_all
from autoshard.batching import ASSUMED, BatchAxis, BatchInput, BatchOutput, with_rows
from autoshard.capture.capture import Call, calls_of, capture
from autoshard.capture.changed import changed_inputs
from autoshard.capture.graph import ModelGraph
from autoshard.capture.run import own_random_numbers
from autoshard.errors import CaptureError, PlanError
from autoshard.module_paths import parent
from autoshard.progress import tell
from autoshard.prove.apart import INDEPENDENT, Apart, check_apart
from autoshard.prove.copied import Trial, copy_model, is_heavy
from autoshard.prove.culprit import find_mixer
from autoshard.prove.parts import Checked, Division, Mixed, check_parts
from autoshard.prove.rows import NotRun, alike, are_alike, enlarged, is_mask, shortened, unlabelled, varied
from autoshard.prove.sample import on_cpu
from autoshard.runtime.chunks import bind, caller_like, plain_arguments
from autoshard.runtime.flags import flags_of
from autoshard.workload import Workload

ROWS = 4
"""Rows of a proof."""
MANY = (4, 5, 3)
"""Rows of the parts where something works along the batch."""
TOKENS = 4
"""What other dimensions of inputs are shortened to where the model is large."""
WHOLE = 'Use strategy="balanced", which divides no batch.'


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A model and how it is called.

    `given`: the arguments as they are handed over; `paths`: for each tensor in them, where it is in `bound`, which are
    the arguments by the names of the forward's parameters. `labels`: inputs that a loss compares with, and which
    number in them says that a label does not count.
    """

    model: nn.Module
    given: Call
    paths: tuple[tuple[str, ...], ...]
    bound: dict[str, Any]
    graph: ModelGraph
    walk: BatchWalk
    labels: dict[str, int]
    workload: Workload

    def call(self, bound: Mapping[str, Any]) -> Call:
        """Arguments as they are given to the model."""
        return caller_like(self.model, *self.given)(bound)


def find_batch_axis(
    model: nn.Module, inputs: Any, workload: Workload, graph: ModelGraph | None = None, *,
    assume_independent_rows: bool = False,
) -> BatchAxis:  # fmt: skip
    """Find the batch among the inputs and check that its rows are apart. Raises `PlanError` naming what mixes them.

    `graph`: a forward with these inputs that was captured with `composite=True`, if there is one.
    `assume_independent_rows`: the user says that rows are apart; then neither ops nor numbers refuse it, and only what
    can't be put together, by its shapes, does.
    """
    with own_random_numbers():
        question = _question(model, inputs, workload, graph)
        for changed in changed_inputs(question.graph):
            raise PlanError(
                f"the batch of {type(model).__name__} can't be divided: {changed}, which a part of the batch does to "
                "its own. Let forward work on a clone of it."
            )
        refused, packed, tried = "", "", -1
        for batch, rows in _guesses(question):
            if batch.inputs[0].dim == tried:  # rows of all that has as many of them are mixed
                continue
            try:
                return _proved(question, batch, rows, None if assume_independent_rows else check_apart(question, batch))
            except Mixed as error:
                refused = refused or f"{_named(question, rows, error)}{error}"
                tried = batch.inputs[0].dim
            except NotRun as error:
                refused = refused or f"with other rows the model could not be run: {error}"
                packed = packed or _packed(question, batch)
    refused = f"{refused or 'no input has a dimension for it'}{packed}".rstrip(".")
    advice = "" if INDEPENDENT in refused else f" {WHOLE}"
    raise PlanError(f"the batch of {type(model).__name__} can't be divided: {refused}.{advice}")


def check_rows_apart(model: nn.Module, inputs: Any, workload: Workload, graph: ModelGraph) -> None:
    """Follow the samples of the batch through every op, without comparing numbers. Raises `PlanError` as above.

    `graph`: a forward with as many samples, which may be longer: where the batch may be is taken from it.
    """
    with own_random_numbers():
        question = _question(model, inputs, workload, graph, longer=True)
        for batch, rows in _guesses(question):
            try:
                check_apart(question, batch)
                return
            except (Mixed, NotRun) as error:
                named = _named(question, rows, error) if isinstance(error, Mixed) else ""
                raise PlanError(f"the batch of {type(model).__name__} can't be divided: {named}{error}.") from None
    raise PlanError(f"the batch of {type(model).__name__} can't be divided: no input has a dimension for it.")


def _question(
    model: nn.Module, inputs: Any, workload: Workload, graph: ModelGraph | None, *, longer: bool = False
) -> Question:
    """Record one forward with given or derived inputs, if that has not been done."""
    forward = replace(workload, mode="inference", new_tokens=0)
    calls = calls_of(model, inputs, workload)
    refused: CaptureError | None = None
    for given in calls:
        args, kwargs = _apart(given)
        try:
            if graph is None or not _is_of(graph, (args, kwargs), longer):
                graph = capture(model, kwargs or args, workload=forward, composite=True)
        except CaptureError as error:
            refused = refused or error
            continue
        bound = bind(model, args, kwargs)
        by_id: dict[int, list[str]] = {}
        for path, tensor in nested.tensors_in(bound):
            by_id.setdefault(id(tensor), []).append(path)
        paths = tuple(tuple(by_id[id(tensor)]) for _, tensor in nested.tensors_in((args, kwargs)))
        return Question(
            model=model, given=(args, kwargs), paths=paths, bound=bound, graph=graph, walk=walk_all(graph),
            labels={path: ignored for place, ignored in labels_of(graph) for path in paths[place]}, workload=workload,
        )  # fmt: skip
    assert refused is not None
    raise refused


def _apart(given: Call) -> Call:
    """The same arguments with a tensor of its own in every place: `labels=ids` are labels, and `ids` are not."""
    seen: set[int] = set()

    def own(tensor: torch.Tensor) -> torch.Tensor:
        known = id(tensor) in seen
        seen.add(id(tensor))
        return tensor.clone() if known else tensor

    return nested.map_tensors(given, own)


def _is_of(graph: ModelGraph, given: Call, longer: bool) -> bool:
    """Whether a run was recorded with such arguments, or longer ones; each of its inputs is a value of its own."""
    shapes = [tuple(tensor.shape) for _, tensor in nested.tensors_in(given)]
    found = [tuple(graph.values[value].shape) for value in graph.inputs]
    same = shapes == found
    if longer:
        same = [(len(one), one[:1]) for one in shapes] == [(len(one), one[:1]) for one in found]
    return same and len(set(graph.inputs)) == len(graph.inputs)


def _packed(question: Question, batch: BatchAxis) -> str:
    """Inputs that may hold rows in a way that no dimension tells, in words."""
    uneven = {item.path for item in batch.inputs if "(" in item.axis}
    found = [
        f"{path} {list(tensor.shape)}"
        for path, tensor in nested.tensors_in(question.bound)
        if path in uneven or (path in batch.whole and tensor.dim() > 1 and tensor.shape[0] > batch.size)
    ]
    listed = " and ".join(found)
    return f". No dimension of {listed} is the batch: its rows may be packed one after the other" if found else ""


def _guesses(question: Question) -> Iterator[tuple[BatchAxis, Rows | None]]:
    """What the batch may be, the likeliest first: a size that inputs have in their first dimension, or their second."""
    graph, walk = question.graph, question.walk
    given = [tensor for _, tensor in nested.tensors_in(question.given)]
    wanted = question.workload.batch_size
    ordered = False  # whether something works along the first dimensions
    for dim in (0, 1):
        sizes = Counter(tensor.shape[dim] for tensor in given if tensor.dim() > dim)
        for size in sorted(filter(None, sizes), key=lambda size: (size != wanted, -sizes[size])):
            same = [place for place, tensor in enumerate(given) if tensor.dim() > dim and tensor.shape[dim] == size]
            rows = next((found for p in same if (found := follow(walk, graph.inputs[p], dim))), None)
            if dim == 0:
                ordered |= rows is not None and bool(rows.blocked)
            elif size != wanted and not (ordered and rows and not rows.blocked and not rows.parameter and rows.outputs):
                continue
            linked = {place: (d, axis) for place, d, axis in rows.inputs} if rows else {}
            alone = {place: (dim, f"*{size}") for place in same if place not in linked}
            yield _guess(question, size, {**linked, **alone}, rows), rows
            if linked and alone:
                yield _guess(question, size, linked, rows), rows


def _guess(question: Question, size: int, chosen: Mapping[int, tuple[int, str]], rows: Rows | None) -> BatchAxis:
    """The batch as these dimensions of inputs; what else is given is for all parts."""
    items = {
        path: BatchInput(path=path, dim=dim, axis=axis)
        for place, (dim, axis) in sorted(chosen.items())
        for path in question.paths[place]
    }
    whole = tuple(path for path, _ in nested.tensors_in(question.bound) if path not in items)
    outputs = _hints(question.graph, rows) if rows else ()
    plain = plain_arguments(question.model, question.bound)
    return BatchAxis(size=size, inputs=tuple(items.values()), outputs=outputs, whole=whole, plain=plain)


def _hints(graph: ModelGraph, rows: Rows) -> tuple[BatchOutput, ...]:
    paths = graph.calls[0].output_paths
    return tuple(BatchOutput(path=paths[place], how="cat", dim=dim, axis=axis) for place, dim, axis in rows.outputs)


def _proved(question: Question, batch: BatchAxis, rows: Rows | None, apart: Apart | None) -> BatchAxis:
    """Run the numbers, and take of what they allow what ops do. Raises `Mixed` or `NotRun`."""
    graph, training = question.graph, question.workload.training
    averages = len(batch.outputs) < len(graph.outputs)
    stopped: NotRun | None = None
    for bound in [_ended(question, batch), question.bound] if is_heavy(graph) else [question.bound]:
        asked = replace(question, bound=nested.map_tensors(bound, on_cpu))

        def compared(dtype: torch.dtype, asked: Question = asked) -> BatchAxis:
            return _compared(asked, copy_model(question.model, graph, dtype, training), batch, rows, apart)

        if is_heavy(graph) and not averages:  # faster, but sums and means are not told apart as well
            try:
                found = compared(torch.float32)
                if all(one.how in ("cat", "same") for one in found.outputs):
                    return found
            except NotRun as error:
                stopped = stopped or error
                continue
            except Mixed as error:
                if not error.values:
                    raise
        for dtype in (torch.float64, torch.float32):
            try:
                return compared(dtype)
            except NotRun as error:  # code that asks for single precision, or for inputs of a size
                stopped = stopped or error
    assert stopped is not None
    raise stopped


def _compared(question: Question, trial: Trial, batch: BatchAxis, rows: Rows | None, apart: Apart | None) -> BatchAxis:
    """Compare the whole with parts for every kind of rows that the model takes."""
    known: Checked | None = None
    checked: list[Checked] = []
    stopped: NotRun | None = None
    ran: Division | None = None
    for number, (bound, parts) in enumerate(_kinds(question, batch, rows)):
        tell("divided batches", number)
        count = sum(parts)
        division = _division(question, trial, _with_rows(batch, count), bound, parts)
        division = replace(division, believed=apart is None)
        try:
            one = check_parts(division, known and _for_rows(known, count))
        except NotRun as error:
            stopped = stopped or error
            continue
        except Mixed as error:
            error.division = division
            raise
        known = _for_rows(one, batch.size)
        checked.append(one)
        if not are_alike(bound, division.batch.inputs, count):  # which would show nothing by themselves
            ran = ran or division
    if ran is None or known is None:
        raise stopped or NotRun("its rows are all alike; give inputs with two rows that differ")
    hooked = next((one.hooked for one in checked if one.hooked), "")
    if apart is not None and hooked:
        raise Mixed(f"its forward hangs a hook on gradients at {hooked}, which may mix rows. {INDEPENDENT}")
    outputs = tuple(_permitted(ways, apart) for ways in known.ways.values())
    compared = f"compared in parts with random values, {'forward and backward' if trial.training else 'forward'}"
    proof = f"{ASSUMED} (assume_independent_rows)" if apart is None else f"checked op by op, {compared}"
    if any(one.draws for one in checked):
        proof += "; it draws random numbers, which were taken to be the same for all rows"
    return replace(
        batch,
        outputs=outputs,
        written=tuple(sorted({name for one in checked for name in one.written})),
        flags=() if apart is None else tuple(sorted({*flags_of(question.model)} & {*flags_of(trial.model)})),
        frozen=_frozen(question.model, replace(ran, rows=_halves(ran.rows), believed=False)),
        proof=proof,
    )


def _permitted(ways: Sequence[BatchOutput], apart: Apart | None) -> BatchOutput:
    """The first of the ways that numbers allow which ops do as well."""
    found = next((way for way in ways if apart is None or apart.permits(way)), None)
    if found is None:
        raise Mixed(f"{ways[0].path or 'its output'} is not made of what parts give as its ops would ({ways[0].how})")
    return found


def _for_rows(known: Checked, rows: int) -> Checked:
    """The same ways with another number of rows in their axes."""
    ways = {path: [replace(way, axis=with_rows(way.axis, rows)) for way in found] for path, found in known.ways.items()}
    return replace(known, ways=ways)


def _halves(parts: tuple[int, ...]) -> tuple[int, int]:
    """Two parts of which none has one row: some code raises for one, before anything can be compared."""
    return sum(parts) // 2, sum(parts) - sum(parts) // 2


def _division(
    question: Question, trial: Trial, batch: BatchAxis, bound: Mapping[str, Any], parts: tuple[int, ...]
) -> Division:
    """A call divided into parts, with what its losses may be weighted by: labels, and masks."""
    masks = {item.path: 0 for item in batch.inputs if is_mask(nested.tensor_at(bound, item.path))}
    args, kwargs = question.call(bound)
    labels = {**question.labels, **masks}
    return Division(trial=trial, batch=batch, args=args, kwargs=kwargs, rows=parts, labels=labels)


def _frozen(model: nn.Module, division: Division) -> tuple[str, ...]:
    """Modules in evaluation mode that would mix rows in training mode: those whose class is seen to; else all."""
    still = {path: type(module) for path, module in model.named_modules() if not module.training}
    if not still:
        return ()
    kept: set[type] = set()
    while True:
        for path, module in division.trial.model.named_modules():
            module.training = path not in still or still[path] not in kept
        try:
            check_parts(division)
        except Mixed:
            mixer = find_mixer(division)
            kind = still.get(mixer[0][0]) if mixer is not None and mixer[1] else None
            if kind is None or kind in kept:
                return ("",) if "" in still else tuple(still)
            kept.add(kind)
        except NotRun:
            return ("",) if "" in still else tuple(still)
        else:
            return tuple(path for path, kind in still.items() if kind in kept)


def _kinds(question: Question, batch: BatchAxis, rows: Rows | None) -> Iterator[tuple[dict[str, Any], tuple[int, ...]]]:
    """Arguments of several kinds of rows, and how they are divided. A model may refuse some of them.

    Where something works along the batch, also more rows, since a few may go together by chance, and rows all alike.
    """
    labels = question.labels

    def made(count: int, seed: int) -> tuple[dict[str, Any], dict[str, Any], tuple[BatchInput, ...]]:
        inputs = _with_rows(batch, count).inputs
        same = enlarged(question.bound, batch.inputs, batch.size, count)
        return same, unlabelled(varied(same, inputs, count, seed), inputs, labels), inputs

    same, other, inputs = made(ROWS, 0)
    masked = shortened(other, inputs, ROWS)
    kinds = [(other, (ROWS - 1, 1)), (unlabelled(same, inputs, labels), (1, ROWS - 1))]
    if masked is not None:
        kinds = [(masked, (1, ROWS - 1)), *([] if is_heavy(question.graph) else kinds[:1])]
    yield from (kind for kind in kinds if not are_alike(kind[0], inputs, ROWS))
    if rows is None or rows.blocked:
        _, other, inputs = made(sum(MANY), 1)
        yield other, MANY
        yield alike(other, inputs, sum(MANY)), MANY[::-1]


def _ended(question: Question, batch: BatchAxis) -> dict[str, Any]:
    """The call with the first few of its tokens: along dimensions that are neither the batch nor one of a parameter."""
    graph, walk = question.graph, question.walk
    taken = {(item.path, item.dim) for item in batch.inputs}
    fixed = {axis for tensor in graph.tensors if tensor.kind == "parameter" for axis in walk.axes.get(tensor.value, ())}
    made = dict(question.bound)
    for value, paths in zip(graph.inputs, question.paths, strict=True):
        tensor = nested.tensor_at(made, paths[0])
        assert tensor is not None
        for dim, axis in enumerate(walk.axes.get(value, ())):
            if tensor.shape[dim] > TOKENS and (paths[0], dim) not in taken and axis not in fixed:
                tensor = tensor.narrow(dim, 0, TOKENS)
        for path in paths:
            made = nested.replace_at(made, path, tensor)
    return made


def _named(question: Question, rows: Rows | None, error: Mixed) -> str:
    """Who mixes rows, in words that end where a reason may follow."""
    division = error.division
    if division is None:
        return ""
    mixer = find_mixer(division) or find_mixer(replace(division, rows=_halves(division.rows)))
    if mixer is None:
        return ""
    (path, time), inside = mixer
    path = path if inside else parent(path)
    graph = question.graph
    while not (calls := [call for call in graph.calls if call.path == path]):
        if inside or not path:
            return ""
        path = parent(path)  # lists of modules are not called
    call = calls[min(time, len(calls) - 1)]
    below = [one for one in graph.calls if one.parent == call.index]
    why = mixing_in(rows, call, below) if rows is not None else ""
    kind = next(module.class_name for module in graph.modules if module.path == call.path)
    place = f"{call.path} ({kind})" if call.path else "the model's own forward"
    return f"{place} mixes its rows{f' ({why})' if why else ''}: "


def _with_rows(batch: BatchAxis, rows: int) -> BatchAxis:
    return replace(
        batch,
        size=rows,
        inputs=tuple(replace(item, axis=with_rows(item.axis, rows)) for item in batch.inputs),
        outputs=tuple(replace(item, axis=with_rows(item.axis, rows)) for item in batch.outputs),
    )
