"""What can be cut, in words: a model with grouped heads as it is printed, and as JSON."""

import json
import re

import pytest

from tests.cli.test_commands import command

MODEL = """
import torch
import torch.nn.functional as F
from torch import nn

class Mixer(nn.Module):
    def __init__(self, width=64, count=8, groups=2):
        super().__init__()
        self.count, self.groups, self.size = count, groups, width // count
        self.a, self.b = nn.Linear(width, width), nn.Linear(width, groups * self.size)
        self.c, self.d = nn.Linear(width, groups * self.size), nn.Linear(width, width)

    def forward(self, x):
        a, b, c = (m(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for m in (self.a, self.b, self.c))
        b, c = (y.repeat_interleave(self.count // self.groups, dim=1) for y in (b, c))
        return self.d(F.scaled_dot_product_attention(a, b, c).transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.LayerNorm(64), nn.LayerNorm(64)
        self.mixer, self.up, self.down = Mixer(), nn.Linear(64, 96), nn.Linear(96, 64)

    def forward(self, x):
        x = x + self.mixer(self.first(x))
        return x + self.down(self.up(self.second(x)).relu())

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.blocks = nn.Embedding(50, 64), nn.ModuleList(Block() for _ in range(3))
        self.sorted = nn.Parameter(torch.ones(5, 7))

    def forward(self, ids):
        x = self.table(ids)
        for block in self.blocks:
            x = block(x)
        return x * self.sorted.sort().values.cumsum(0).sort(0).values.sum()

model = Model()
example_inputs = torch.zeros(2, 10, dtype=torch.long)
"""


@pytest.fixture(scope="module")
def file(tmp_path_factory):
    path = tmp_path_factory.mktemp("axes") / "model.py"
    path.write_text(MODEL)
    return str(path)


@pytest.fixture(scope="module")
def printed(file):
    return command("profile", file, "--axes").stdout


@pytest.fixture(scope="module")
def document(file):
    return json.loads(command("profile", file, "--axes", "--json").stdout)


def test_axes_are_printed_in_words(printed):
    shares = "    {}% of the bytes; one all-reduce of 5.00 KiB\n"
    assert (
        "blocks.0-2  3 x, 88.0 KiB of matrices each\n  96 slices: up rows; down columns\n" + shares.format(55)
        in printed
    )
    assert "  or 4 slices in each of 2: mixer: a rows; d columns\n" + shares.format(36) in printed
    assert "  or 64 slices: table columns\n    99% of the bytes; one all-gather of 5.00 KiB\n" in printed
    assert "sorted columns (whole on every device)\n    sort in the model itself" in printed
    assert "blocks.0-2.mixer: a, b rows\n    scaled_dot_product_attention in blocks.0-2.mixer: " in printed
    assert max(map(len, printed.splitlines())) <= 80 and not any(line.endswith(" ") for line in printed.splitlines())


def test_the_batch_is_among_the_axes(printed, document, tmp_path):
    assert "The batch\n  2 rows of ids can be divided: the output put together\n    checked op by op" in printed
    mixing = tmp_path / "mixing.py"
    mixing.write_text(MODEL.replace("return x * self", "return (x - x.mean(0)) * self"))
    assert "the model's own forward mixes its rows (mean in the model itself, mixing.py:" in " ".join(
        command("profile", str(mixing), "--axes").stdout.split()
    )
    assert document["batch"]["inputs"] == [{"path": "ids", "dim": 0, "axis": "*2"}]


def test_axes_as_json(document):
    assert document["format"] == "autoshard axes report" and document["model"]["class"] == "Model"
    (group,) = [group for group in document["groups"] if group["text"] == "96 slices: up rows; down columns"]
    assert group["blocks"] == ["blocks.0", "blocks.1", "blocks.2"] and group["all_reduces"] == 1
    assert {"name": "up.weight", "dim": 0, "axis": "*96"} in group["shards"]
    assert any(row["name"] == "sorted" for row in document["blocked"])
    assert [block["paths"] for block in document["blocks"]] == [[""], ["blocks.0", "blocks.1", "blocks.2"]]


def test_shares_count_tied_matrices_once(file, tmp_path):
    tied = tmp_path / "tied.py"
    head = "self.head = nn.Linear(64, 50, bias=False); self.head.weight = self.table.weight; self.sorted ="
    text = MODEL.replace("self.sorted =", head)
    tied.write_text(text.replace("return x * self", "return self.head(x) * self"))
    shares = [int(share) for share in re.findall(r"(\d+)% of the bytes", command("profile", tied, "--axes").stdout)]
    assert shares and max(shares) <= 100


def test_axes_are_those_of_a_forward(file):
    assert "--train" in command("profile", file, "--axes", "--train", expect=2).stderr


def test_plans_with_cuts_are_printed_saved_and_priced(file, tmp_path):
    asked = ("--strategy", "column-parallel", "--objective", "memory", "--devices", "2x100GiB")
    path = tmp_path / "plan.json"
    printed = command("plan", file, *asked, "-o", path).stdout
    for words in (
        "column-parallel, for memory: 2 of 2 devices used",
        "\nCut\n",
        "blocks.0-2: up rows; down columns\n    96 slices, 48 on each device; followed op by op",
        "blocks.0-2.mixer: a, b, c rows; d columns\n    2 slices, 1 on each device",
        "\nWhole on every device\n  sorted\n    ",
        "6 all-reduces, 1 all-gather",
    ):
        assert words in printed, words
    assert "Modules" not in printed and max(map(len, printed.splitlines())) <= 80
    document = json.loads(command("estimate", path, file, "--json").stdout)
    assert len(document["plan"]["cuts"]) == 3 and document["estimate"]["all_reduces"] == 6


def test_plans_with_cuts_are_verified(file):
    asked = ("--strategy", "column-parallel", "--objective", "memory", "--devices", "2x100GiB")
    printed = " ".join(command("verify", file, *asked, "--train").stdout.split())
    assert printed.startswith("equal ") and "sums over devices are made in another order" in printed
    assert "optimizer step" in printed


def test_cuts_that_are_slower_than_one_device_are_made_if_asked_for(file):
    printed = command("plan", file, "--strategy", "column-parallel", "--devices", "2x100GiB").stdout
    assert "slower than" in printed and "on cuda:0 alone, but to cut it was asked for" in " ".join(printed.split())
    assert "\nCut\n" in printed
    assert "Modules" in command("plan", file, "--devices", "2x100GiB").stdout  # auto takes what is faster
    assert (
        "pinned"
        in command("plan", file, "-s", "column-parallel", "--pin", "table=cuda:0", "-d", "2x1GiB", expect=2).stderr
    )
