"""Why a plan for processes is as it is, in words: the whole of it, one device, or one module."""

from autoshard.common.module_paths import is_below
from autoshard.common.sizes import format_bytes, format_seconds
from autoshard.engine.estimate import DeviceEstimate, RankEstimate
from autoshard.errors import SpecError
from autoshard.plan import Plan
from autoshard.report.explanation import Explanation, OtherDevice
from autoshard.report.terminal import as_sentence
from autoshard.search.study import Study

MOST_ALTERNATIVES = 8


def explain_study(study: Study, subject: str = "") -> Explanation:
    """Explain a plan ("" for all of it), a device, or a module. Raises `SpecError` if `subject` is none of them."""
    plan, profile = study.plan, study.traced.graph
    if not subject:
        what = "the plan"
        sentences = [*study.reasons[:-1], *study.changes, study.to_fit, study.reasons[-1]]
    elif subject in {device.name for device in plan.devices}:
        what = "device"
        device = next(device for device in study.estimate.devices if device.name == subject)
        sentences = list(_device(study, device))
    elif subject in {module.path for module in profile.modules} | {tensor.name for tensor in profile.tensors}:
        what = "module"
        sentences = [_module(plan, subject)]
    else:
        modules = [module.path for module in profile.modules if module.path and "." not in module.path]
        raise SpecError(
            f"{subject!r} is neither a module nor a device of this plan. Devices: {plan.devices[0].name} to "
            f"{plan.devices[-1].name}. Modules: {', '.join(modules[:5])}…"
        )
    rows = [
        OtherDevice(
            title=row.mesh, value=row.seconds, lacking_bytes=0, latency_seconds=row.seconds, peak_bytes=row.peak_bytes
        )
        for row in study.rows
    ]  # fmt: skip
    mine = next(at for at, row in enumerate(study.rows) if row.chosen)
    others = [row for at, row in enumerate(rows) if at != mine]
    return Explanation(
        subject=subject or what, kind=what, sentences=tuple(as_sentence(one) for one in sentences if one),
        unit="seconds per step" if plan.workload.training else "seconds per answer",
        chosen=rows[mine], alternatives=tuple(others[:MOST_ALTERNATIVES]) if not subject else (),
    )  # fmt: skip


def _device(study: Study, device: DeviceEstimate) -> "list[str]":
    plan = study.plan
    at = [one.name for one in plan.devices].index(device.name)
    each = len(plan.devices) // study.own.recipe.pp
    rank = at // each
    own: RankEstimate = next(one for one in study.estimate.ranks if rank in one.stages)
    peak = max(own.curve, key=lambda moment: sum(moment.bytes.values()))
    kinds = sorted(peak.bytes.items(), key=lambda item: -item[1])
    held = ", ".join(f"{name} {format_bytes(nbytes)}" for name, nbytes in kinds[:4] if nbytes)
    stages = ", ".join(map(str, sorted(s for s in own.stages if s % study.own.recipe.pp == rank)))
    has = f"stage{'s' if ',' in stages else ''} {stages}" if study.own.recipe.pp > 1 else "the whole depth of the model"
    return [
        f"it is rank {at} of {len(plan.devices)}, and has {has}",
        f"it takes {format_bytes(device.peak_bytes)} of {format_bytes(device.memory_bytes)}; at the fullest moment "
        f"({peak.name}): {held}",
        f"of {format_seconds(study.estimate.latency_seconds)}, kernels run {format_seconds(own.compute_seconds)}, "
        f"{format_seconds(own.exposed_seconds)} wait for communication, {format_seconds(own.idle_seconds)} are idle",
    ]


def _module(plan: Plan, subject: str) -> str:
    assert plan.mesh is not None
    parts = []
    if plan.mesh.pp > 1:
        stages = [
            str(number) for number, stage in enumerate(plan.stages)
            if any(path in ("", subject) or is_below(subject, path) or is_below(path, subject) for path in stage.paths)
        ]  # fmt: skip
        parts.append(f"it is in stage {', '.join(stages[:4])}{' …' if len(stages) > 4 else ''} of {len(plan.stages)}")
    if plan.mesh.fsdp > 1:
        parts.append(f"each of {plan.mesh.fsdp} replicas keeps a part of its parameters and gathers the rest")
    if plan.mesh.tp > 1:
        parts.append(f"its matrices are shared by {plan.mesh.tp} ranks, as far as they can be")
    if plan.mesh.ep > 1:
        parts.append(f"experts in it are divided over {plan.mesh.ep} ranks")
    return "; ".join(parts) or "every rank has all of it"
