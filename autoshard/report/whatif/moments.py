"""Which moments of a pass may be the fullest of a device, whatever the sizes."""

import numpy as np

from autoshard.cluster.cluster import Device
from autoshard.cost import step_bytes
from autoshard.flow import Flow
from autoshard.profile.measure import gradient_surplus, trained_sizes
from autoshard.profile.profile import Profile
from autoshard.profile.scaling import Scaling


def live_vectors(
    profile: Profile, moves: Flow, scaling: Scaling, index: int, device: Device, *, whole: Profile | None = None
) -> np.ndarray:
    """Return [moments, monomials] bytes live on a device whenever something is born, and at the optimizer's step.

    What does not change with the sizes is rounded up to the device's blocks, as allocations are. `whole`: what
    `scaling` is of, if `profile` is a part of it.
    """
    rows = moves.buffers
    mine = np.flatnonzero(rows.device == index)
    sizes = np.array([max(storage.nbytes, 1) for storage in (whole or profile).graph.storages], np.float64)
    vectors = scaling.table[scaling.storage[rows.storage[mine]]]
    vectors = vectors * (rows.nbytes[mine] / sizes[rows.storage[mine]])[:, None]
    fixed = ~vectors[:, 1:].any(axis=1)
    vectors[fixed, 0] = -(-vectors[fixed, 0] // device.block_bytes) * device.block_bytes
    born, last = rows.born[mine].astype(float), rows.died[mine].astype(float) - 1
    more = [
        (scaling.table[polynomial], extra.before, died - 1)
        for extra in scaling.extra
        if moves.op_device[extra.beside] == index
        for polynomial, died in extra.made
    ]
    if more:
        vectors = np.concatenate([vectors, np.array([row[0] for row in more])])
        born = np.concatenate([born, [row[1] for row in more]])
        last = np.concatenate([last, [max(row[1], row[2]) for row in more]])
    times = np.unique(np.concatenate([np.maximum(born, 0.0), [float(moves.steps)]]))
    uncounted = moves.uncounted
    times = times[(times <= uncounted.start) | (times >= uncounted.stop)]
    live = live_at(times, born, last, vectors)
    return np.vstack([live, _at_step(profile, moves, vectors[: len(mine)], mine, device)])


def _at_step(profile: Profile, moves: Flow, vectors: np.ndarray, mine: np.ndarray, device: Device) -> np.ndarray:
    """[0 or 1, monomials] bytes at the optimizer's step: gradients of all that is trained and its temporaries."""
    graph, rows, block = profile.graph, moves.buffers, device.block_bytes
    if not profile.workload.training:
        return np.zeros((0, vectors.shape[1]))
    own_gradients = [graph.values[value].storage for _, value in graph.gradients]
    there = (rows.born[mine] <= moves.steps) & (moves.steps <= rows.died[mine] - 1)
    gradients = np.isin(rows.storage[mine], own_gradients) & ~rows.copied[mine]
    step = vectors[there & ~gradients].sum(axis=0)
    sizes = trained_sizes(graph)
    own = [-(-nbytes // block) * block for name, nbytes in sizes if moves.tensor_device[name] == device.name]
    own += [nbytes for name, nbytes in gradient_surplus(graph) if moves.tensor_device[name] == device.name]
    step[0] += sum(own) + step_bytes(sizes, moves.tensor_device, device, profile.workload.optimizer)
    return step[None]


def live_at(times: np.ndarray, born: np.ndarray, last: np.ndarray, vectors: np.ndarray) -> np.ndarray:
    """[times, columns] sum of the vectors that are there, each from when it is born to its last time."""
    return _before(times, born, vectors, "right") - _before(times, last, vectors, "left")


def _before(times: np.ndarray, when: np.ndarray, vectors: np.ndarray, side: str) -> np.ndarray:
    """Sum of the vectors from before each time ("left"), or at it too ("right")."""
    order = np.argsort(when, kind="stable")
    totals = np.vstack([np.zeros(vectors.shape[1]), np.cumsum(vectors[order], axis=0)])
    return totals[np.searchsorted(when[order], times, side)]  # type: ignore[call-overload]


def front(vectors: np.ndarray) -> np.ndarray:
    """Keep vectors that no other is at least as large as in every column: only these can be the largest anywhere."""
    rows = np.round(vectors, 3)
    rows = rows[np.argsort(-rows.sum(axis=1), kind="stable")]
    kept: list[np.ndarray] = []
    while len(rows):
        kept.append(rows[0])
        rows = rows[~(rows <= rows[0]).all(axis=1)]
    return np.array(kept).reshape(-1, vectors.shape[1])
