"""Compare cuts with the tensor parallel plans that people wrote for some transformers. Only tests read those."""

import itertools
import re
from collections import defaultdict

import autoshard
from autoshard.cluster.cluster import Cluster
from autoshard.cluster.device import Device, Link
from autoshard.common.module_paths import above, is_below, join
from autoshard.plan.sharding import count_collectives

# What each style of a written plan cuts, and the (all-reduces, gathers) that it costs in a forward.
CUTTING = {
    "colwise": (0, 0), "colwise_gather_output": (0, 1), "packed_colwise": (0, 0), "embedding_colwise": (0, 1),
    "rowwise": (1, 0), "rowwise_split_input": (1, 0), "embedding_rowwise": (1, 0), "packed_rowwise": (0, 0),
}  # fmt: skip
SUMMING = {"moe_tp_experts": (1, 0), "all_reduce": (1, 0), "moe_identity_expert": (0, 0)}


def compare(model, inputs, degree=2):
    """{matrix that only the written plan cuts: why ours does not}, {layer: (written, ours)} where ours has more.

    Ours are two: the fastest in little memory, and for tables, which are not cut for speed, the one for least memory.
    More all-reduces, or more all-reduces and gathers together. Cuts of ours that cut nothing of what the written plan
    does are left out: they have collectives of their own.
    """
    written, sums = written_plan(model)
    most, plan = most_cut(model, inputs, degree), tight_plan(model, inputs, degree)
    ours = {join(block, one.name) for cut in (*plan.cuts, *most.cuts) for block in cut.blocks for one in cut.shards}
    reasons = {join(block, name): row.reason for row in plan.whole for block in row.blocks for name in row.names}
    mine = defaultdict(list)
    for cut in plan.cuts:
        if not any(join(block, shard.name) in written for block in cut.blocks for shard in cut.shards):
            continue
        for block in cut.blocks:
            for action in cut.actions:
                mine[layer_of(join(block, action.module))].append(action)
    missing = {name: reasons.get(name, "") for name in written if name not in same_storage(model, ours)}
    found = {layer: count_collectives(actions) for layer, actions in mine.items()}
    return missing, {
        layer: (sums[layer], count)
        for layer, count in found.items()
        if count[0] > sums[layer][0] or sum(count) > sum(sums[layer])
    }


def written_plan(model):
    """The matrices that the plan written for a model cuts, and its (all-reduces, gathers) per layer."""
    styles = {}
    for pattern, style in model._tp_plan.items():
        match = re.compile(re.escape(pattern).replace(r"\*", r"\d+"))
        styles[match] = style
    names = [name for name, _ in model.named_modules()] + [name for name, _ in model.named_parameters()]
    matched = {name: style for name in names for match, style in styles.items() if match.fullmatch(name)}
    sums = defaultdict(lambda: (0, 0))
    for name, style in matched.items():
        reduces, gathers = CUTTING.get(style, SUMMING.get(style, (0, 0)))
        before = sums[layer_of(name)]
        sums[layer_of(name)] = before[0] + reduces, before[1] + gathers
    cut = [name for name, style in matched.items() if style in CUTTING]
    matrices = {name: t for name, t in model.named_parameters(remove_duplicate=False) if t.dim() > 1}
    return [name for name in matrices if any(is_below(name, path) for path in cut)], sums


def layer_of(path):
    """The outermost numbered module around a path, or ""."""
    return next((one for one in reversed([path, *above(path)]) if one.rpartition(".")[2].isdigit()), "")


def same_storage(model, names):
    """All names of the tensors that have these names."""
    tensors = dict(model.named_parameters(remove_duplicate=False))
    tensors |= dict(model.named_buffers(remove_duplicate=False))
    cut = {id(tensors[name]) for name in names}
    return {name for name, tensor in tensors.items() if id(tensor) in cut}


def slow_devices(count, memory_bytes=1 << 34):
    """Devices on which a matrix of a tiny model takes about 20 times as long as a collective, as with large models."""
    devices = tuple(
        Device(name=f"cpu:{rank}", memory_bytes=memory_bytes, flops_per_second={"default": 1e8}, bytes_per_second=1e9)
        for rank in range(count)
    )
    links = tuple(
        Link(source=a.name, destination=b.name, bytes_per_second=1e9, latency_seconds=1e-4)
        for a, b in itertools.permutations(devices, 2)
    )
    return Cluster(devices=devices, links=links)


def most_cut(model, inputs, degree=2):
    """The plan for least memory."""
    settings = {"inputs": inputs, "strategy": "column-parallel", "objective": "memory"}
    return autoshard.plan(model, slow_devices(degree), **settings)


def tight_plan(model, inputs, degree=2):
    """The fastest cuts on devices with little more room than it takes with the most cuts."""
    profile, most = autoshard.profile(model, inputs), most_cut(model, inputs, degree)
    peak = max(device.peak_bytes for device in autoshard.estimate(most, profile, slow_devices(degree)).devices)
    tight = slow_devices(degree, round(1.001 * peak))
    return autoshard.plan(model, tight, inputs=inputs, profile=profile, strategy="column-parallel")
