"""Reasons: what was chosen, why, the runner-up and by how much, and how to start it; of a refusal, what was tried."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from math import inf

from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.memory import Memory, RecipeEstimate
from autoshard.engine.precision import FEWER_BITS, PRECISIONS, inference_precision
from autoshard.engine.recipe import Recipe
from autoshard.plan.choices import Objective
from autoshard.search.best import WORTH_STARTING, Searched, SearchTask, less_simple, search

NO_LESS = 0.95
"""Of the bytes with half as many devices: what still needs so much is not divided by more of them."""
SLOWER = 1.005
"""Times as long as another, from which on a recipe is said to be slower: less is shown as the same."""
WHAT: Mapping[str, str] = {
    "dp": "replicas that keep all parameters of their part",
    "fsdp": "replicas of which each keeps a part of all parameters, gradients and optimizer state (FSDP)",
    "tp": "ranks that share every matrix (tensor parallel)",
    "pp": "pipeline stages",
    "cp": "parts of every sequence (context parallel), whose ranks shard parameters as FSDP does",
    "ep": "groups of experts (expert parallel)",
}


def shown_mesh(recipe: Recipe) -> str:
    """Degrees larger than 1, such as "fsdp=8,tp=2"; "one device" without any."""
    return ",".join(f"{name}={degree}" for name, degree in recipe.mesh.items() if degree > 1) or "one device"


def explain(task: SearchTask, found: Searched, *, instead_of: RecipeEstimate | None = None) -> tuple[str, ...]:
    """The reasons of the best recipe, in sentences; `instead_of`: a faster one that is not worth starting."""
    assert found.best is not None
    best = found.best
    about = (_what, _where_time_goes, _memory)
    reasons = [sentence for describe in about for sentence in describe(task, best)]
    if instead_of is None and task.devices > best.recipe.devices:
        left = f"{task.devices - best.recipe.devices} of {task.devices} devices are left out"
        reasons.append(f"{left}: with more of them it takes no less")
    if instead_of is not None and instead_of.recipe.devices > best.recipe.devices:
        reasons.insert(
            1,
            f"{shown_mesh(instead_of.recipe)} would take {format_seconds(instead_of.seconds)} instead of "
            f"{format_seconds(best.seconds)}: less than {WORTH_STARTING:g} times as fast; ask for it with --mesh",
        )
    return (*reasons, *_others(task, found, instead_of), launch_command(task, best.recipe))


def _what(task: SearchTask, best: RecipeEstimate) -> Iterator[str]:
    recipe = best.recipe
    parts = [f"{degree} {WHAT[name]}" for name, degree in recipe.mesh.items() if degree > 1]
    if parts:
        yield f"{shown_mesh(recipe)}, a process per device: {'; '.join(parts)}"
    elif task.devices > 1:
        yield "one device holds it, and more would not be faster by enough to be worth starting"
    else:
        yield "one device holds it"
    if task.training:
        batch = _counted(recipe.num_microbatches, "micro-batch", "micro-batches")
        again = {
            "none": "all activations are kept",
            "selective": "of activations, attention and every second product are kept and the rest is recomputed",
            "full": "every layer is recomputed in backward",
        }[recipe.recompute]
        if recipe.kept_layers:
            again += f", but not in the last {_counted(recipe.kept_layers, 'layer')}, whose activations are all kept"
        who = "each replica" if task.devices > 1 else "it"
        yield f"{who} computes {batch} of {_counted(recipe.micro_batch, 'sample')} per step; {again}"
        if task.precision.parameters < 4 and not task.precision.master:
            yield "all is kept in 16 bits, so small updates of weights are lost; --precision mixed keeps float32"
    if recipe.divided_outputs and recipe.tp * recipe.cp > 1:
        yield "logits stay divided behind their loss (DTensor): logits.full_tensor() on all ranks puts them together"
    if task.devices > 1 and task.limits.samples > 1 and task.limits.why_not:
        more = " and no micro-batches" if task.training and not task.given.in_parts else ""
        yield f"no replicas{more}: {task.limits.why_not.removesuffix('.')}"
    if task.devices > recipe.pp and (together := _together(task, recipe.pp)):
        yield together
    if recipe.pp > 1:
        per_rank = f", {recipe.stages_per_rank} stages per rank" if recipe.stages_per_rank > 1 else ""
        turns = "stages take turns: every rank runs the model's own forward, and computes its stages"
        yield turns if task.new_tokens else f"stages run by the schedule {recipe.schedule}{per_rank}"


def _together(task: SearchTask, pp: int = 1) -> str:
    """What stands against more stages than `pp`, "" for nothing."""
    count = min((count for count in task.limits.why_not_staged if count > pp), default=0)
    return f"no {count} stages, since {task.limits.why_not_staged[count]}" if count else ""


def _counted(count: int, one: str, more: str = "") -> str:
    return f"{count} {one if count == 1 else more or one + 's'}"


def _where_time_goes(task: SearchTask, best: RecipeEstimate) -> Iterator[str]:
    if task.training:
        waits = []
        if best.exposed_seconds:
            waits.append(f"{format_seconds(best.exposed_seconds)} wait for communication")
        if best.bubble:
            waits.append(f"{best.bubble:.0%} of the time a stage has nothing to do")
        if waits:
            yield f"of a step of {format_seconds(best.seconds)}, {', and '.join(waits)}"
    elif task.new_tokens:
        parts = sorted(best.token_parts.items(), key=lambda item: -item[1])
        most = ", ".join(f"{name} {format_seconds(seconds)}" for name, seconds in parts[:3] if seconds)
        yield f"a token takes {format_seconds(best.token_seconds)}: {most}"
        if task.stack == "compiled":
            yield "decoding is priced as compiled, with CUDA graphs; op by op, the host may set the pace (--eager)"


def _memory(task: SearchTask, best: RecipeEstimate) -> Iterator[str]:
    needed, shown = format_bytes(best.memory.used), _largest(best.memory, 4)
    free = f" ({task.given.reserve:.0%} of each card is kept free)" if task.given.reserve else ""
    yield f"the fullest rank needs {needed} of {format_bytes(task.card.memory_bytes)}{free}: {shown}"


def _largest(memory: Memory, count: int) -> str:
    """The kinds of which there is most at the fullest moment."""
    kinds = sorted(memory.kinds.items(), key=lambda item: -item[1])[:count]
    return ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in kinds if nbytes)


def _others(task: SearchTask, found: Searched, said: RecipeEstimate | None) -> Iterator[str]:
    """The three best of the other meshes; `said`: the one of which was spoken before."""
    assert found.best is not None
    best, meshes = found.best, [one.recipe.mesh for one in (found.best, said) if one is not None]
    for other in [one for one in found.ranking if one.recipe.mesh not in meshes][:3]:
        factor = other.value(task.goal) / best.value(task.goal)
        why = f", but it {word}" if factor < SLOWER and (word := less_simple(other, best)) else ""
        long = f"{format_seconds(other.seconds)}, {beside(factor, task.goal)}"
        yield f"not chosen: {shown_mesh(other.recipe)}: {long}{why}"
    fit = _counted(len(found.ranking), "mesh fits", "meshes fit")
    yield f"{_counted(found.priced, 'recipe')} priced, and {fit}"


def beside(factor: float, goal: Objective) -> str:
    """Say how long another recipe takes, or how much memory, as a multiple of the one that is taken."""
    long, less, same = ("the memory", " memory", "much") if goal == "memory" else ("as long", "", "long")
    if factor >= SLOWER:
        return f"{factor:.2f} times {long}"
    return f"{1 - factor:.0%} less{less}" if factor * SLOWER < 1 else f"about as {same}"


def launch_command(task: SearchTask, recipe: Recipe) -> str:
    """How to start it."""
    per_host = min(task.topology.devices_per_host, recipe.devices)
    hosts = recipe.devices // per_host
    if recipe.devices == 1:
        return "start it: python train.py" if task.training else "start it: python run.py"
    nodes = f" --nnodes={hosts} --rdzv-backend=c10d --rdzv-endpoint=HOST:29500" if hosts > 1 else ""
    script = "train.py" if task.training else "run.py"
    where = " on every host" if hosts > 1 else ""
    return f"start it{where}: torchrun{nodes} --nproc-per-node={per_host} {script}"


def refuse(task: SearchTask, found: Searched, fewer_tokens: Callable[[], str]) -> str:
    """Say which recipe comes closest, by how much it does not fit and where, and one change that was tried.

    `fewer_tokens` tries shorter sequences, where nothing else makes it fit, and says what came out.
    """
    closest = found.closest
    if closest is None:
        said = f"no mesh of {task.devices} devices goes with a batch of {_counted(task.limits.samples, 'sample')}"
        if not task.limits.divisible:
            return f"{said}: {task.limits.why_not}"
        if "pp" in task.given.axes and (together := _together(task)):
            return f"{said}: {together}. Plan with tp or dp, or with fewer stages."
        if task.given.axes == ("pp",) and task.limits.layers < task.devices:
            return (
                f"{task.devices} stages need as many layers that are alike, and the model has {task.limits.layers}. "
                'Use fewer devices, or launch="one-process", whose stages may begin at any module.'
            )
        if task.given.in_parts:
            return f"{said} in the micro-batches that were asked for. Leave them out, or give what makes up the batch."
        return f"{said}. Give a batch that the number of devices divides, or other degrees."
    needed, most = closest.memory.used, _largest(closest.memory, 3)
    lacking = needed - task.card.memory_bytes
    said = (
        f"no recipe fits: the closest, {shown_mesh(closest.recipe)}{_how(task, closest.recipe, ' with')}, needs "
        f"{format_bytes(needed)} on its fullest rank ({most}), {format_bytes(lacking)} more than "
        f"the {format_bytes(task.card.memory_bytes)} that may be used"
    )
    why = task.limits.why_not and f" {task.limits.why_not[0].upper()}{task.limits.why_not[1:]}"
    if not task.given.advise:
        return f"{said}."
    change = remedy(task) or fewer_tokens() or take_less(closest)
    return f"{said}. {_of_the_loss(closest, lacking)}{change}{why}"


def _of_the_loss(closest: RecipeEstimate, lacking: float) -> str:
    """That without the logits it would fit, where that is so."""
    loss = next((one for one in closest.memory.curve if one.name == "loss"), None)
    if loss is None or loss.bytes["transient"] < lacking or closest.memory.allocated > loss.total:
        return ""
    return (
        f"{format_bytes(loss.bytes['transient'])} are logits and their copies around the loss: with a loss that is "
        "computed in parts of the sequence there are few of them. "
    )


def _how(task: SearchTask, recipe: Recipe, before: str) -> str:
    """How a step is divided in time, in words; an answer is not."""
    if not task.training:
        return ""
    return f"{before} micro-batches of {recipe.micro_batch}, recomputation {recipe.recompute}"


def in_words(task: SearchTask, best: RecipeEstimate) -> str:
    """A recipe as a change is said to make it possible."""
    return f"{shown_mesh(best.recipe)}{_how(task, best.recipe, ',')}, {format_seconds(best.seconds)}."


def take_less(closest: RecipeEstimate | None = None) -> str:
    """What is left to do where no change that was tried makes it fit; `closest`: the recipe that lacks least."""
    alone = closest is not None and closest.recipe.micro_batch == 1  # samples are computed one by one already
    return f"Use shorter sequences{'' if alone else ', a smaller batch,'} or larger devices."


def remedy(task: SearchTask) -> str:
    """The first change that makes it fit, tried with the same search; "" if none of them does."""
    free = replace(task, given=replace(task.given, mesh={}, micro_batch=None, recompute=None, num_microbatches=None))
    tried = [("Without what was fixed it fits: ", free)] if task.given != free.given else []
    if task.training and any(block.cuts_loss or block.divides_loss for block in task.work.blocks):
        parts = replace(free, given=replace(free.given, divided_outputs=True))
        tried.append(("With logits left in parts behind the loss (--divided-outputs) it fits: ", parts))
    if task.training and task.precision == replace(PRECISIONS["mixed"], states=task.precision.states):
        pure = replace(free, precision=replace(PRECISIONS["pure"], states=task.precision.states))
        tried.append(("With weights, gradients and moments of 16 bits (--precision pure) it fits: ", pure))
    for dtype, bits in FEWER_BITS.items():
        fewer = replace(free, precision=inference_precision(dtype))
        if not task.training and fewer.precision.parameters < task.precision.parameters:
            tried.append((f"With {bits} weights (--dtype {dtype}) it fits: ", fewer))
    for factor in (2, 4, 8, 16, 32, 64):
        more = replace(free, topology=replace(task.topology, hosts=task.topology.hosts * factor))
        tried.append((f"It fits on {task.devices * factor} such devices: ", more))
    least = inf
    for words, other in tried:
        if not task.training and other.devices > task.limits.samples * 64:
            continue
        found = search(other)
        if found.best is not None:
            return f"{words}{in_words(task, found.best)}"
        if found.closest is not None and other.precision == task.precision:
            if found.closest.memory.used > NO_LESS * least:
                break  # more devices do not help
            least = found.closest.memory.used
    return ""
