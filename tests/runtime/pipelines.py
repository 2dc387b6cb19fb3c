"""Plans made by hand that divide a batch in one process, into micro-batches or over replicas, and a model for them."""

from dataclasses import replace

import torch
from torch import nn

import autoshard
from autoshard.plan import Mesh, Plan, Stage
from autoshard.plan.batching import BatchAxis, BatchInput, BatchOutput

VOCAB = 20
LABELLED = BatchAxis(
    size=8,
    inputs=(BatchInput(path="ids", dim=0, axis="*8"), BatchInput(path="labels", dim=0, axis="*8")),
    outputs=(
        BatchOutput(path="logits", how="cat", axis="*8"),
        BatchOutput(path="loss", how="weighted", weights="labels", skipped=1),
    ),
    whole=("positions",),
)
ROWS = BatchAxis(
    size=8, inputs=(BatchInput(path="x", dim=0, axis="*8"),), outputs=(BatchOutput(path="", how="cat", axis="*8"),)
)


class Words(nn.Module):
    """Residual blocks between an embedding and a head of the same weight; its loss skips labels of -100."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        width = 16
        self.embed, self.places = nn.Embedding(VOCAB, width), nn.Embedding(VOCAB, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 64), nn.GELU(), nn.Dropout(dropout), nn.Linear(64, width)) for _ in range(4)
        )
        self.head = nn.Linear(width, VOCAB, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids, labels=None, positions=None, cache=None, scale=1.0):
        hidden = self.embed(ids) * scale
        if positions is not None:
            hidden = hidden + self.places(positions)
        for block in self.blocks:
            hidden = hidden + block(hidden)
        output = {"logits": self.head(hidden)}
        if labels is not None:
            rows, wanted = output["logits"][:, :-1].flatten(0, 1), labels[:, 1:].flatten()
            output["loss"] = nn.functional.cross_entropy(rows, wanted)
        return output


def words(dropout: float = 0.0) -> nn.Module:
    """The model in float64, the same every time, training."""
    torch.manual_seed(3)
    return Words(dropout).double()


def sentences(rows: int = 8, length: int = 6) -> dict[str, torch.Tensor]:
    """Tokens with labels, of which rows have unequally many; some have none."""
    ids = torch.randint(0, VOCAB, (rows, length))
    labels = ids.clone()
    labels[1::3] = -100
    labels[-1, 3:] = -100
    return {"ids": ids, "labels": labels}


def close(found: torch.Tensor, wanted: torch.Tensor) -> None:
    """Equal to the rounding of float64, told from the largest value."""
    found, wanted = found.detach().cpu(), wanted.detach()
    torch.testing.assert_close(found, wanted, rtol=0, atol=1e-12 * float(wanted.abs().max()))


def pipeline(
    model: nn.Module,
    inputs: dict[str, torch.Tensor],
    batch: BatchAxis = LABELLED,
    *,
    count: int = 4,
    schedule: str = "gpipe",
    recompute: bool = False,
    workload: autoshard.Workload | None = None,
    devices: int = 3,
) -> Plan:
    """A plan over simulated devices "cpu:0" and so on, the children of the lists in the model dealt out in order."""
    workload = workload or autoshard.Workload(mode="training", batch_size=8)
    shapes = tuple((name, tensor.shape, tensor.dtype) for name, tensor in (*inputs.items(), *model.named_parameters()))
    key = type(model), shapes, workload, devices
    if key not in _PLANNED:
        _PLANNED[key] = _dealt_out(model, inputs, workload, devices)
    plan = _PLANNED[key]
    stages: dict[str, list[str]] = {device.name: [] for device in plan.devices}
    for path, device in plan.placements.items():
        stages[device].append(path)
    return replace(
        plan,
        strategy="pipeline",
        mesh=Mesh(pp=devices),
        stages=tuple(Stage(paths=tuple(paths), recompute=recompute) for paths in stages.values()),
        batch=batch,
        num_microbatches=count,
        schedule=schedule,
    )


def replicas(
    model: nn.Module, inputs: dict[str, torch.Tensor], batch: BatchAxis = LABELLED, *, shares: tuple[int, ...] = ()
) -> Plan:
    """A plan that divides the batch over replicas on simulated devices, three if there are no `shares`."""
    count = len(shares) or 3
    plan = pipeline(model, inputs, batch, devices=count)
    return replace(
        plan, strategy="data-parallel", mesh=Mesh(dp=count, shares=shares), stages=(), num_microbatches=1,
        schedule="none", placements={"": plan.devices[0].name}, mixed_device=(), written_back=(),
    )  # fmt: skip


_PLANNED: dict[tuple, Plan] = {}  # planning takes longer than most tests that need it


def _dealt_out(model: nn.Module, inputs: dict[str, torch.Tensor], workload: autoshard.Workload, devices: int) -> Plan:
    blocks = [path for path, module in model.named_modules() if path.rpartition(".")[2].isdecimal()]
    outer = [path for path in blocks if not any(path.startswith(f"{other}.") for other in blocks)]
    pins = {path: f"cpu:{index * devices // len(outer)}" for index, path in enumerate(outer)}
    sizes = {f"cpu:{index}": "16MiB" for index in range(devices)}
    return autoshard.plan(model, sizes, inputs=inputs, strategy="balanced", workload=workload, pins=pins)
