"""The hardware table: every figure has a source or says it has none, and torch's names find the right row."""

import pytest

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
        ("AMD Instinct MI300X", "MI300X"),
        ("AMD Instinct MI250X", "MI250X"),
        ("Some Card 9000", None),
    ],
)
def test_torch_names(torch_name, row):
    found = match_torch_name(torch_name)
    assert (found.name if found else None) == row


def test_work_without_units_for_a_dtype_runs_at_the_float32_rate():
    t4 = find_hardware("T4")
    assert t4.flops_per_second["bfloat16"] == t4.flops_per_second["float32"] < t4.flops_per_second["float16"]
