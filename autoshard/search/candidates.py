"""Candidates: every recipe worth pricing, for training steps and for answers."""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast, get_args

from autoshard.engine.precision import Precision
from autoshard.engine.recipe import Recipe, Recompute, Stack
from autoshard.errors import SpecError
from autoshard.plan import Mesh
from autoshard.search.limits import LONG_SEQUENCE, Asked, Limits

MOST_STAGES_PER_RANK = 4


def on_mesh(mesh: Mesh, **settings: Any) -> Recipe:
    """A recipe with the degrees of a mesh, as `apply` runs it: a model gives whole logits. `settings`: other fields."""
    degrees: dict[str, Any] = dict(mesh.degrees)
    return Recipe(**degrees, loss_parallel=False, **settings)


def device_counts(devices: int, per_host: int) -> list[int]:
    """How many devices to use: of few every number, of many whole hosts and powers of two."""
    if devices <= 2 * per_host and devices <= 16:
        return list(range(devices, 0, -1))
    powers = {2**k for k in range(devices.bit_length()) if 2**k <= devices}
    hosts = {per_host * k for k in range(1, devices // per_host + 1) if k & (k - 1) == 0 or k * per_host == devices}
    return sorted(powers | hosts | {devices}, reverse=True)


def meshes(devices: int, per_host: int, limits: Limits, given: Asked, *, training: bool) -> Iterator[Mesh]:
    """Meshes of exactly so many devices; answers have no shards that are gathered, and no divided sequences."""
    for tp in _chosen("tp", limits.tensor, given):
        for pp in _chosen("pp", _pipelines(devices // tp, limits), given):
            contexts = _chosen("cp", _contexts(limits, devices // (tp * pp)), given) if training else (1,)
            for cp in contexts:
                rest, left = divmod(devices, tp * pp * cp)
                if left or (rest > 1 and not limits.divisible) or rest > limits.samples:
                    continue
                shardings = _shardings(rest, per_host // min(per_host, tp * cp))
                for fsdp in _chosen("fsdp", shardings, given) if training else (1,):
                    dp, left = divmod(rest, fsdp)
                    if left or dp not in _chosen("dp", (dp,), given) or (dp > 1 and "dp" not in given.axes):
                        continue
                    for ep in _chosen("ep", _experts(limits, rest * cp), given):
                        mesh = Mesh(dp=dp, fsdp=fsdp, tp=tp, pp=pp, cp=cp, ep=ep)
                        if _runs(mesh, given):
                            yield mesh


def _runs(mesh: Mesh, given: Asked) -> bool:
    """Whether `apply` carries a mesh out: cp and ep go with dp and fsdp only. A mesh that is given is priced anyway."""
    divided = (mesh.cp > 1) + (mesh.ep > 1)
    return not divided or bool({"cp", "ep"} & set(given.mesh)) or (divided == 1 and mesh.tp == mesh.pp == 1)


def step_recipes(
    mesh: Mesh, limits: Limits, given: Asked, precision: Precision, stack: Stack
) -> Iterator[list[Recipe]]:
    """Recipes of a mesh for a training step; those of one list differ in recomputation, the least of it first."""
    replicas = mesh.data
    if limits.samples % replicas:
        return
    own = limits.samples // replicas
    for micro in _micro_batches(own, given):
        count = own // micro
        if given.num_microbatches not in (None, count):
            continue
        if count > 1 and not limits.divisible and (mesh.pp > 1 or not given.in_parts):
            continue
        for schedule, per_rank in _schedules(mesh.pp, count, limits.layers, given):
            recipe = on_mesh(
                mesh, micro_batch=micro, num_microbatches=count, schedule=schedule, stages_per_rank=per_rank,
                precision=precision, stack=stack, divided_outputs=given.divided_outputs,
                sequence_parallel=limits.divides_tokens,
            )  # fmt: skip
            modes = [given.recompute] if given.recompute else get_args(Recompute)
            yield [replace(recipe, recompute=cast(Any, mode)) for mode in modes]


def answer_recipes(
    mesh: Mesh, limits: Limits, given: Asked, precision: Precision, stack: Stack, *, generates: bool
) -> Iterator[Recipe]:
    """Recipes of a mesh for answers: with stages, sequences may take turns in groups, but not in generate()."""
    own = -(-limits.samples // mesh.dp)
    counts = {1, min(own, mesh.pp)} if mesh.pp > 1 and limits.divisible and not generates else {1}
    if given.num_microbatches:
        counts = {given.num_microbatches}
    elif given.micro_batch:
        counts = {-(-own // given.micro_batch)}
    if generates and mesh.pp > 1 and counts != {1}:
        if "pp" in given.mesh:
            raise SpecError("generate() runs all sequences of a batch at once in stages: leave micro-batches out.")
        return
    for count in sorted(counts):
        yield on_mesh(
            mesh, micro_batch=-(-own // count), num_microbatches=count, schedule="gpipe", precision=precision,
            stack=stack,
        )  # fmt: skip


def _chosen(name: str, degrees: tuple[int, ...], given: Asked) -> tuple[int, ...]:
    if name in given.mesh:
        return (given.mesh[name],)
    if given.mesh or name not in given.axes:  # of a mesh that is given, what is not named is 1
        return (1,)
    return degrees


def _pipelines(devices: int, limits: Limits) -> tuple[int, ...]:
    return tuple(
        n
        for n in range(1, min(devices, limits.layers) + 1)
        if devices % n == 0 and (n < 3 or n % 2 == 0 or n == devices) and n not in limits.why_not_staged
    ) or (1,)


def _contexts(limits: Limits, rest: int) -> tuple[int, ...]:
    """Parts of a sequence: where sequences are long, or there are fewer of them than replicas."""
    if not limits.attention or (limits.tokens < LONG_SEQUENCE and rest <= limits.samples):
        return (1,)
    return tuple(n for n in (1, 2, 4, 8, 16) if rest % n == 0 and limits.tokens % (2 * n) == 0)


def _shardings(rest: int, per_host: int) -> tuple[int, ...]:
    """Degrees of FSDP: none, within a host, over all replicas."""
    return tuple(sorted({1, rest, *(n for n in (per_host,) if 1 < n < rest and rest % n == 0)}))


def _experts(limits: Limits, ranks: int) -> tuple[int, ...]:
    if limits.experts < 2:
        return (1,)
    return tuple(n for n in range(1, limits.experts + 1) if limits.experts % n == 0 and ranks % n == 0)


def _micro_batches(own: int, given: Asked) -> list[int]:
    if given.micro_batch is not None:
        return [given.micro_batch] if own % given.micro_batch == 0 else []
    if given.num_microbatches is not None:
        return [own // given.num_microbatches] if own % given.num_microbatches == 0 else []
    powers = [n for n in (1, 2, 4, 8, 16) if n < own and own % n == 0]
    return [*powers, own]


def _schedules(pp: int, count: int, layers: int, given: Asked) -> Iterator[tuple[str, int]]:
    if pp == 1:
        if given.schedule is None:
            yield "gpipe", 1
        return
    names = [given.schedule] if given.schedule else ["1f1b" if count >= pp else "gpipe", "interleaved"]
    for name in names:
        if name == "1f1b" and count < pp:
            continue
        if name in ("interleaved", "zero-bubble"):
            most = min(MOST_STAGES_PER_RANK, layers // pp)
            if count % max(1, count // pp) == 0:
                yield from ((name, n) for n in (2, 4) if n <= most)
        else:
            yield name, 1
