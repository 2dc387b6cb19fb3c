"""`flow`: from a graph and a placement to what one pass does; the latest of every graph is remembered.

A plan is looked at several times in a row: when it is checked, priced among others, and shown.
"""

from collections.abc import Mapping

from autoshard.capture.graph import ModelGraph
from autoshard.capture.latest import Latest
from autoshard.flow.data import Flow
from autoshard.flow.walk import FlowWalk
from autoshard.plan.placement import resolve_execution_devices, tensor_devices

_LATEST = Latest[Flow]()


def flow(graph: ModelGraph, placements: Mapping[str, str]) -> Flow:
    """Walk the recorded run under a placement and say where every op runs, what is copied and what is live when.

    Follows the runtime op for op. Raises `PlanError` if a parameter or buffer has no entry in `placements`.
    """
    return _LATEST.of(graph, tuple(placements.items()), lambda: _walk(graph, placements))


def _walk(graph: ModelGraph, placements: Mapping[str, str]) -> Flow:
    names = [tensor.name for tensor in graph.tensors]
    uncallable = [module.path for module in graph.modules if not module.callable]
    execution_devices = resolve_execution_devices(
        placements, [module.path for module in graph.modules], names, uncallable
    )
    devices = tensor_devices(execution_devices, graph.tied())
    stages = tuple(dict.fromkeys(placements.values()))
    return FlowWalk(graph, execution_devices, devices, stages).run()
