"""The hardware table: every figure has a source or says it has none, and torch's names find the right row."""

import pytest

from autoshard.cluster.detect import table_notes
from autoshard.cluster.hardware import find_hardware, hardware_table, known_names, match_torch_name


def test_every_row_has_a_source_and_plausible_figures():
    for row in hardware_table().values():
        assert row.source, row.name
        assert row.bytes_per_second > 1e9, row.name
        assert row.host_bytes_per_second > 1e9, row.name
        if row.source == "none read":
            assert row.unverified == ("all",), row.name
        if row.is_card:
            # What torch reports is within 10 % of the nominal size; three quarters on machines with unified memory.
            low = 0.74 if row.vendor == "apple" else 0.9
            assert low < row.memory_bytes / (row.nominal_gb * 2**30) <= 1, row.name
            assert 1e12 < row.flops_per_second["float32"] <= row.flops_per_second["float16"] < 3e15, row.name
            assert (row.peer_bytes_per_second > 0) == (row.peer_link != "none") == bool(row.peer_topology), row.name


def test_float64_is_slow_where_cards_have_few_units_for_it():
    rates = {name: find_hardware(name).flops_per_second for name in ("A100-SXM-80", "V100-SXM2-32", "RTX-4090", "T4")}
    parts = {name: rate["float32"] / rate["float64"] for name, rate in rates.items()}
    assert parts == {"A100-SXM-80": 1, "V100-SXM2-32": 2, "RTX-4090": 64, "T4": 32}


def test_every_name_finds_its_own_row():
    for name in known_names():
        assert find_hardware(name).name == name
        assert find_hardware(name.lower().replace("-", " ")).name == name


@pytest.mark.parametrize(
    ("torch_name", "row"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM"),
        ("NVIDIA H100 PCIe", "H100-PCIe"),
        ("NVIDIA H100 NVL", "H100-NVL"),
        ("NVIDIA H200", "H200-SXM"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40"),
        ("NVIDIA A100-SXM4-80GB", "A100-SXM-80"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40"),
        ("NVIDIA GB200", "GB200"),
        ("NVIDIA B200", "B200"),
        ("NVIDIA B300 SXM6 AC", "B300"),
        ("NVIDIA GB300", "GB300"),
        ("NVIDIA GH200 480GB", "GH200"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
        ("NVIDIA A10", "A10"),
        ("NVIDIA A10G", "A10G"),
        ("NVIDIA A40", "A40"),
        ("Tesla T4", "T4"),
        ("Tesla V100-SXM2-32GB", "V100-SXM2-32"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
        ("NVIDIA RTX A6000", "RTX-A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA GeForce RTX 3080 Ti", "RTX-3080-Ti"),
        ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX-4070-Ti-Super"),
        ("Quadro RTX 8000", "Quadro-RTX-8000"),
        ("NVIDIA RTX A4000", "RTX-A4000"),
        ("NVIDIA RTX 4000 SFF Ada Generation", None),
        ("NVIDIA H20-3e", None),
        ("NVIDIA H200 NVL", "H200-NVL"),
        ("AMD Radeon RX 7900 XT", "RX-7900-XT"),
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X", "MI250X"),
        ("Some Card 9000", None),
    ],
)
def test_torch_names(torch_name, row):
    found = match_torch_name(torch_name)
    assert (found.name if found else None) == row
    assert "RTX" not in torch_name or match_torch_name(torch_name + " Laptop GPU") is None


def test_cards_of_one_name_are_told_apart_by_their_memory():
    cards = (("NVIDIA GeForce RTX 3080", 9.6), ("NVIDIA GeForce RTX 3080", 11.7), ("Apple M4 Max", 48))
    rows = [match_torch_name(name, int(gib * 2**30)) for name, gib in cards]
    assert [row and row.name for row in rows] == ["RTX-3080-10", "RTX-3080-12", "M4-Max-64"]
    assert not table_notes("NVIDIA GeForce RTX 3060", int(11.7 * 2**30))
    assert "7.70 GiB here" in table_notes("NVIDIA GeForce RTX 3060", int(7.7 * 2**30))[0]


def test_work_without_units_for_a_dtype_runs_at_the_float32_rate():
    t4 = find_hardware("T4")
    assert t4.flops_per_second["bfloat16"] == t4.flops_per_second["float32"] < t4.flops_per_second["float16"]
    assert "no bfloat16 units" in table_notes("Tesla T4", int(14.6 * 2**30))[0]


def test_geforce_cards_have_half_of_the_tensor_rate_with_float32_accumulation():
    for row in hardware_table().values():
        if row.name[:5] in ("RTX-3", "RTX-4", "RTX-5") and "Ada" not in row.name:
            rates = row.flops_per_second
            assert rates["float16"] == pytest.approx(2 * rates["float32"], rel=0.02), row.name
