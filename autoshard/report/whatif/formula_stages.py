"""Plans with stages at other sizes: replicas of pipelines of tensor-parallel ranks, run by the clock.

`page/formula_stages.js` is the same, line by line. The figures are those of `pipeline_cost` and `mesh_cost`.
"""

from collections.abc import Mapping, Sequence
from math import ceil
from typing import Any

from autoshard.report.whatif.formula import (
    collectives,
    copies,
    largest,
    launches_of,
    op_seconds,
    polynomial,
    result,
    rows_of,
    seconds_of,
    sum_of,
)

SUMS = ("inputs", "kept", "lasting", "outputs", "merged", "released", "returned", "leaving", "lent")


def staged(planned: Mapping[str, Any], values: Sequence[float], scale: float) -> dict[str, Any]:
    """Return what `predict` does; the batch is `scale` times the plan's."""
    data, pipeline, tensor = planned["mesh"]
    size, count = planned["size"] * scale, planned["microbatches"]
    rows = rows_of(size, data, planned["shares"]) if planned["size"] else [0] * data
    known: dict[tuple[float, int], dict[str, Any]] = {}
    replicas = []
    for replica, own in zip(planned["replicas"], rows, strict=True):
        part = ceil(own / count) / size if planned["size"] else 1.0
        columns = [*values, *(part * value for value in values)]
        for number in replica["figures"]:
            if (part, number) not in known:
                known[part, number] = _figures(planned, planned["figures"][number], columns)
        replicas.append(_replica(planned, replica, [known[part, number] for number in replica["figures"]], columns))
    devices = [[name, 0.0, memory, 0.0] for name, memory, _ in planned["names"]]
    latency, busiest = 0.0, 0.0
    for position in range(pipeline):
        ready = 0.0
        for replica in replicas:
            ready = max(ready, replica["done"][position])
        for rank in range(tensor):
            reduce = 0.0
            if planned["training"]:
                buckets, cost, nbytes = planned["reduce"][position][rank]
                reduce = buckets * seconds_of(planned["links"], cost, nbytes)
            for number, replica in enumerate(replicas):
                figures = replica["ranks"][rank]
                step = figures["steps"][position]
                place = planned["replicas"][number]["devices"][position][rank]
                device = devices[place]
                waiting = replica["incoming"][position] + count * replica["waiting"][position] + reduce
                device[1] = figures["peaks"][position] + planned["names"][place][2]
                device[3] = figures["busy"][position] + step
                begin = ready if reduce > 0 else replica["done"][position]
                latency = max(latency, begin + reduce + step)
                busiest = max(busiest, device[3] + waiting)
    for replica in replicas:
        latency = max(latency, replica["issue"])
    return result(devices, latency, min(busiest, latency))


def _figures(planned: Mapping[str, Any], figures: Mapping[str, Any], columns: Sequence[float]) -> dict[str, Any]:
    """What the stages of a rank cost for one micro-batch, and what its devices have at most."""
    seconds = [op_seconds(planned, columns, rates) for rates in planned["rates"]]
    pipeline, count = planned["mesh"][1], planned["microbatches"]
    stages, busy, peaks, steps = [], [0.0] * pipeline, [], []
    for number, stage in enumerate(figures["stages"]):
        own = seconds[stage["rates"]]
        again = sum_of(stage["again"], own)
        forward, backward = sum_of(stage["F"], own), sum_of(stage["B"], own) + again
        launched = launches_of(stage["F"], own) + launches_of(stage["B"], own) + launches_of(stage["again"], own)
        stages.append({
            "forward": forward,
            "backward": backward,
            "weight": sum_of(stage["W"], own),
            "launch": launched * planned["rates"][stage["rates"]]["launch"],
        })  # fmt: skip
        busy[number % pipeline] += count * (forward + (backward if planned["training"] else 0.0))
    sizes = [_bytes(stage, columns) for stage in figures["stages"]]
    for position in range(pipeline):
        device = planned["rates"][figures["stages"][position]["rates"]]
        temporary, moved = figures["steps"][position]
        peak = _peak(planned, position, sizes, temporary) + figures["always"][position]
        peaks.append(peak)
        steps.append(moved / device["bandwidth"] if planned["training"] else 0.0)
    return {"stages": stages, "busy": busy, "peaks": peaks, "steps": steps}


def _replica(
    planned: Mapping[str, Any], replica: Mapping[str, Any], ranks: list[dict[str, Any]], columns: Sequence[float]
) -> dict[str, Any]:
    """One replica by the clock: a stage takes as long as its slowest rank, and what the ranks do together."""
    pipeline, links, training = planned["mesh"][1], planned["links"], planned["training"]
    stages, waiting, issue = [], [0.0] * pipeline, 0.0
    for number in range(len(planned["recompute"])):
        together = collectives(links, replica["sums"][number], columns)
        back = collectives(links, replica["back_sums"][number], columns)
        if training and planned["recompute"][number]:
            back += together
        forward, backward, weight = 0.0, 0.0, 0.0
        for rank in ranks:
            forward = max(forward, rank["stages"][number]["forward"])
            backward = max(backward, rank["stages"][number]["backward"])
            weight = max(weight, rank["stages"][number]["weight"])
        backward += back
        stages.append([forward + together, backward, backward if number == 0 else weight])
        waiting[number % pipeline] += together + back
        issue += ranks[0]["stages"][number]["launch"]
    sends = [copies(links, rows, columns) for rows in replica["sends"]]
    returns = [copies(links, rows, columns) for rows in replica["returns"]]
    done, incoming = _clock(planned, stages, sends, returns)
    for holders, cost, nbytes in replica["shared"]:
        begin = 0.0
        for position in holders:
            begin = max(begin, done[position])
        if len(holders) > 1:
            for position in holders:
                done[position] = begin + seconds_of(links, cost, nbytes)
    return {
        "ranks": ranks,
        "done": done,
        "incoming": incoming,
        "waiting": waiting,
        "issue": 0.0 if planned["processes"] else planned["microbatches"] * issue,
    }


def _clock(
    planned: Mapping[str, Any], stages: Sequence[Sequence[float]], sends: Sequence[float], returns: Sequence[float]
) -> tuple[list[float], list[float]]:
    """When each device is done, and seconds of what comes to it; see `schedules.simulate`."""
    pipeline, count = planned["mesh"][1], len(stages)
    free, incoming, link = [0.0] * pipeline, [0.0] * pipeline, [0.0] * (pipeline * pipeline)
    done = [[0] * count for _ in range(4)]
    come = [[[0.0] * planned["microbatches"] for _ in range(count)] for _ in range(3)]  # for F, B or I, and W
    for code in planned["program"]:
        way, stage = code // count, code % count
        device, needs = stage % pipeline, 0 if way == 0 else 2 if way == 3 else 1
        microbatch = done[way][stage]
        done[way][stage] += 1
        forward, backward, weight = stages[stage]
        seconds = forward if way == 0 else backward if way == 1 else backward - weight if way == 2 else weight
        end = max(free[device], come[needs][stage][microbatch]) + seconds
        free[device] = end
        if way == 2:
            come[2][stage][microbatch] = end
        following = stage + 1 if way == 0 else stage - 1
        if way == 3 or following < 0 or following == count:
            continue
        there = following % pipeline
        if there != device:
            over = sends[stage] if way == 0 else returns[following]
            end = max(end, link[device * pipeline + there]) + over
            link[device * pipeline + there] = end
            incoming[there] += over
        come[needs][following][microbatch] = end
    return free, incoming


def _bytes(stage: Mapping[str, Any], columns: Sequence[float]) -> dict[str, float]:
    """`StageBytes` but for what is always there."""
    found = {"gradient": stage["gradient"]}
    if "forward" not in stage:
        return found | dict.fromkeys(("forward", "first", "back", *SUMS), 0.0)
    found["forward"] = largest(stage["forward"], columns)
    found["first"] = largest(stage["first"], columns)
    found["back"] = largest(stage["back"], columns)
    for name in SUMS:
        found[name] = polynomial(stage.get(name, ()), columns)
    if "joined" in stage:
        for name in ("first", "later", "last"):
            found["joined " + name] = largest(stage["joined"][name], columns)
        found["waiting"] = stage["joined"]["waiting"]
        found["returning"] = polynomial(stage["joined"]["returning"], columns)
    return found


def _peak(planned: Mapping[str, Any], position: int, sizes: Sequence[Mapping[str, float]], temporary: float) -> float:
    """Most bytes of a device, by walking through its actions; see `pipeline_cost._peak`."""
    pipeline, count, microbatches = planned["mesh"][1], len(sizes), planned["microbatches"]
    training, joined = planned["training"], planned["joined"]
    stepping = training and not joined  # outputs of parts are put together after the last backward
    row = [code for code in planned["program"] if code % count % pipeline == position]
    last, gone, made = [-1] * count, [0] * count, [False] * count
    end, gradients, there, most, always, returned, merged, outputs = -1, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0
    for index, code in enumerate(row):
        if code < count:
            last[code] = index
            end = index
    for number in range(position, count, pipeline):
        always += sizes[number]["inputs"]
        returned += microbatches * sizes[number]["returned"]
        merged += microbatches * sizes[number]["merged"]
        outputs += microbatches * sizes[number]["outputs"] - sizes[number]["lent"]
    for index, code in enumerate(row):
        way, stage = code // count, code % count
        nbytes = sizes[stage]
        if way == 0:
            most = max(most, gradients + there + nbytes["forward"])
            there += nbytes["kept"] if training else nbytes["lasting"]
            if last[stage] == index and nbytes["outputs"] > 0 and microbatches > 1 and not stepping:
                most = max(most, gradients + there + nbytes["outputs"] * microbatches)
                there += (nbytes["outputs"] - nbytes["released"]) * microbatches
            if index == end:
                there += returned
                most = max(most, gradients + there)
            if last[stage] == index and joined:
                there -= nbytes["leaving"] * microbatches + nbytes["lent"]
        elif joined:
            final = gone[stage] == microbatches - 1
            first = gone[stage] == 0
            reached = nbytes["joined first"] - nbytes["waiting"] if first else 0.0
            if not first:
                reached = nbytes["joined last"] if final else nbytes["joined later"]
            coming = nbytes["returning"] * (microbatches - (1 if final else 0))
            waiting = nbytes["waiting"] if first else 0.0
            most = max(most, gradients + waiting + there - nbytes["kept"] + coming + reached)
            if first or final:
                gradients += nbytes["waiting"] if first else nbytes["gradient"] - nbytes["waiting"]
            there -= nbytes["kept"] - nbytes["released"] - (nbytes["lasting"] - nbytes["outputs"])
            gone[stage] += 1
        else:
            if way != 3:
                new = nbytes["back"] if made[stage] else nbytes["first"]
                most = max(most, gradients + there - nbytes["kept"] + new)
                gradients += 0.0 if made[stage] else nbytes["gradient"]
                made[stage] = True
            if way == 3 or way == 1:
                there -= nbytes["kept"] - nbytes["lasting"]
    most = max(most, gradients + 2 * merged)
    if stepping and microbatches > 1:
        most = max(most, gradients + there + outputs)
    if training:
        most = max(most, gradients + there + temporary)
    return most + always
