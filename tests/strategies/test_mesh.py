"""hybrid: the best mesh is that of exhaustive search, on lines of random numbers; and plans of real models fit."""

import itertools
from dataclasses import replace

import numpy as np
import pytest

import autoshard
from autoshard.axes.unproved import unproved
from autoshard.cluster.parse import parse_devices
from autoshard.errors import PlanError
from autoshard.mesh_cost import estimate_mesh
from autoshard.module_paths import is_below
from autoshard.plan import Plan
from autoshard.plan_cuts import Refusal
from autoshard.schedules.orders import make_order
from autoshard.schedules.simulate import Times, simulate
from autoshard.strategies.pipeline import hybrid
from autoshard.strategies.mesh_search import MeshSearch, Posed, Shape, best_mesh, factorings
from autoshard.strategies.stage_line import Line
from autoshard.workload import Workload
from tests.test_mesh_cost import BATCH, INPUTS, Net, batch, groups  # noqa: F401 - a fixture


def posed_at_random(seed, shape, *, training, pieces=4):
    """Pieces of random cost on equal devices; a mesh divides rows and slices, and adds sums of random cost."""
    rng = np.random.default_rng(seed)
    p, part = shape.pipeline, 1 / (shape.data * shape.microbatches)
    forward = rng.uniform(1, 9, pieces) * part / shape.tensor + rng.uniform(0, 0.3, pieces) * (shape.tensor > 1)
    backward = (rng.uniform(1, 9, pieces) * part / shape.tensor) * training
    kept = rng.uniform(0, 6, pieces) * part * training
    cuts = rng.uniform(0, 2, pieces + 1) * part
    sends = np.stack([np.ones(pieces + 1), cuts])
    line = Line(
        microbatches=shape.microbatches, begins=np.arange(pieces + 1), forward=np.tile(forward, (p, 1)),
        backward=np.tile(backward, (p, 1)), weight=np.tile(backward / 2, (p, 1)),
        static=rng.uniform(1, 5, pieces) / shape.tensor, kept=kept, transient=rng.uniform(0, 2, pieces) * part,
        kept_again=kept / 4, again=kept * 0.75, lasting=np.zeros(pieces), sends=sends, returns=sends * training,
        capacity=np.full(p, rng.uniform(8, 30)), latency=np.full((p, p), 0.01), bandwidth=np.full((p, p), 10.0),
        training=training,
    )  # fmt: skip
    after = np.tile(rng.uniform(0, 1, pieces) * training * (shape.data > 1) / shape.tensor, (p, 1))
    return Posed(line=line, after=after)


def all_shapes(count, rows, training):
    for used in range(2, count + 1):
        for data, pipeline, tensor in factorings(used):
            if sum(n > 1 for n in (data, pipeline, tensor)) < 2 or rows % data:
                continue
            for m in (m for m in (1, 2, 4) if pipeline > 1 or m == 1):
                for schedule in ("gpipe", "1f1b") if training and m >= pipeline > 1 else ("gpipe",):
                    if rows // data >= m:
                        yield Shape(data=data, pipeline=pipeline, tensor=tensor, microbatches=m, schedule=schedule)


def exhaustive(shapes, pose, objective):
    """Every partition of every shape by the plain simulator, every choice of who computes again."""
    best = np.inf
    for shape in shapes:
        posed = pose(shape)
        line, p, n = posed.line, shape.pipeline, posed.line.size
        order = make_order(shape.schedule, p, shape.microbatches, training=line.training)
        search = MeshSearch(posed, shape, objective)
        for inner in itertools.combinations(range(1, n), p - 1):
            found = search.run([((0, *inner, n), tuple(range(p)))])
            if not found:
                continue
            cuts, again = (0, *inner, n), found[0].recompute
            spans = list(itertools.pairwise(cuts))
            forward = [line.forward[0, a:b].sum() for a, b in spans]
            backward = [line.backward[0, a:b].sum() + forward[s] * again[s] for s, (a, b) in enumerate(spans)]
            over = [0.01 + line.sends[1, b] / 10 for _, b in spans[:-1]]
            times = Times(forward=forward, backward=backward, weight=backward, sends=over,
                          returns=over if line.training else [0.0] * len(over))  # fmt: skip
            seconds = simulate(order, times).seconds + max(posed.after[0, a:b].sum() for a, b in spans)
            value = seconds if objective == "latency" else found[0].load
            best = min(best, float(value))
    return best


def check_instance(seed):
    rng = np.random.default_rng(seed)
    training, count, rows = bool(rng.integers(2)), int(rng.choice([4, 6, 8])), int(rng.choice([4, 8, 12]))
    objective = "memory" if seed % 5 == 0 else "latency"

    def pose(shape):
        return posed_at_random(seed, shape, training=training)

    shapes = [s for s in all_shapes(count, rows, training) if s.pipeline <= 4]
    best, wanted = best_mesh(shapes, pose, objective), exhaustive(shapes, pose, objective)
    assert (np.inf if best is None else best.value) == pytest.approx(wanted, rel=1e-9)
    again = best_mesh(reversed(shapes), pose, objective)
    assert best is None or (again.shape, again.found.cuts) == (best.shape, best.found.cuts)


@pytest.mark.parametrize("seed", range(40))
def test_equal_to_exhaustive_search(seed):
    check_instance(seed)


@pytest.mark.slow
@pytest.mark.parametrize("start", range(40, 640, 50))
def test_equal_to_exhaustive_search_on_many(start):
    for seed in range(start, start + 50):
        check_instance(seed)


# ---- plans of a model


@pytest.fixture(scope="module")
def profile():
    return autoshard.profile(Net(), INPUTS, workload=Workload(batch_size=BATCH, mode="training"))


@pytest.mark.parametrize("objective", ["latency", "throughput", "memory"])
def test_plan_of_a_model(profile, groups, objective):  # noqa: F811
    cluster = parse_devices("2 hosts of 4xA100-40GB")
    plan = hybrid(profile, cluster, batch(), groups, unproved, objective=objective)
    mesh = plan.mesh
    assert sum(n > 1 for n in (mesh.data, mesh.pipeline, mesh.tensor)) >= 2 and mesh.size == len(plan.devices)
    assert estimate_mesh(plan, profile, cluster).fits
    assert Plan.from_json(plan.to_json()) == plan
    for block in (block for cut in plan.cuts if plan.stages for block in cut.blocks):
        assert block and sum(any(is_below(block, path) for path in stage.paths) for stage in plan.stages) == 1
    again = hybrid(profile, cluster, batch(), groups, unproved, objective=objective)
    assert again.to_json() == plan.to_json()
    for data, position in itertools.product(range(mesh.data), range(mesh.pipeline)):
        group = {plan.devices[mesh.rank(data=data, pipeline=position, tensor=t)].host for t in range(mesh.tensor)}
        assert mesh.tensor > 4 or len(group) == 1  # a tensor-parallel group is in one host


def test_as_many_as_processes(profile, groups):  # noqa: F811
    plan = hybrid(profile, parse_devices("4xA100-40GB"), batch(), groups, unproved, objective="memory", processes=4)
    assert plan.mesh.size == 4 and [d.name for d in plan.devices] == ["cuda:0", "cuda:1", "cuda:2", "cuda:3"]


def test_what_can_not_be_proved_is_not_cut(profile, groups):  # noqa: F811
    """The proof refuses every cut: what is left are replicas of stages."""

    def refuse(found, shares):
        return [Refusal(reason="no") for _ in found]

    plan = hybrid(profile, parse_devices("4xA100-40GB"), batch(), groups, refuse, objective="memory")
    assert plan.mesh.tensor == 1 and plan.mesh.data > 1 and plan.mesh.pipeline > 1 and not plan.cuts


@pytest.mark.parametrize("nbytes", [683_744, 443_392])
def test_a_mesh_that_holds_more_than_the_search_counts_does_not_keep_others_from_being_found(groups, nbytes):  # noqa: F811
    """The next round knows by how much, for this mesh alone: less room for every mesh would leave none."""
    made = autoshard.profile(Net(), INPUTS, workload=Workload(batch_size=BATCH))
    some = parse_devices(dict.fromkeys((f"cuda:{i}" for i in range(8)), nbytes))
    cluster = replace(some, devices=tuple(replace(d, overhead_bytes=0, block_bytes=1) for d in some.devices))
    plan = hybrid(made, cluster, batch(), groups, unproved, objective="latency")
    assert estimate_mesh(plan, made, cluster).fits


def test_nothing_fits(profile, groups):  # noqa: F811
    cluster = parse_devices("4xA100-40GB")
    small = cluster.with_memory({d.name: d.overhead_bytes + 100_000 for d in cluster.devices})
    with pytest.raises(PlanError, match="no mesh"):
        hybrid(profile, small, batch(), groups, unproved)
