"""Presets by name, users' own files, and messages for unknown names and impossible numbers."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from imece.errors import UserError
from imece.plan.presets import find_cluster, find_gpu, find_network, gpu_names, gpus_of_a_host, parse_gpus


@pytest.mark.parametrize("name", gpu_names())
def test_each_preset_can_be_a_cluster(name: str) -> None:
    cluster = find_cluster(name, hosts=2)
    gpu = cluster.gpu
    assert gpu.name == name and cluster.gpus == 2 * cluster.gpus_per_host
    assert 0 < gpu.sustained <= 1 and 0 < gpu.reachable <= 1
    assert gpu.overhead_bytes < gpu.memory_bytes / 4
    assert cluster.inside.bandwidth > 0 and cluster.between.bandwidth > 0


@pytest.mark.parametrize("name", ["ethernet-1g", "ethernet-100g", "infiniband-ndr", "efa"])
def test_each_network_is_shared_by_the_devices_of_a_host_or_not(name: str) -> None:
    of_one, of_eight = find_network(name, 1), find_network(name, 8)
    own_port = name.startswith("infiniband")
    assert of_one.bandwidth == of_eight.bandwidth * (1 if own_port else 8)


def test_a_gpu_has_no_faster_network_than_its_slot() -> None:
    for name, slot in (("H100", 64e9), ("A100-40", 32e9), ("V100", 16e9)):
        assert find_cluster(name, 1, 2, "efa").between.bandwidth == slot
        assert find_cluster(name, hosts=2).between.bandwidth < slot
    assert find_cluster("H100", 8, 2, "efa").between.bandwidth == 50e9
    assert find_cluster("A100-80", 8, 2, "infiniband-ndr").between.bandwidth == 32e9
    assert (
        find_cluster("A100-80", 8, 2, "7200Gb").between.bandwidth == 900e9
    )  # a number is what was asked for


def test_the_network_of_each_generation() -> None:
    found = {name: find_cluster(name, hosts=2).between.bandwidth for name in gpu_names()}
    assert (found["H100"], found["B200"]) == (50e9, 50e9)
    assert (found["A100-80"], found["A100-40"], found["L40S"], found["V100"]) == (25e9, 25e9, 25e9, 12.5e9)


@pytest.mark.parametrize("name", [name for name in gpu_names() if name not in ("CPU", "MI300X")])
def test_fp32_is_without_tf32(name: str) -> None:
    """At most half of what tensor cores do in TF32, which is half of their bf16."""
    gpu = find_gpu(name)
    assert gpu.peak_fp32 < 130e12 and gpu.peak_fp32 <= gpu.peak * 0.51


def test_four_presets_have_no_bf16() -> None:
    assert [name for name in gpu_names() if not find_gpu(name).bf16] == ["V100", "V100-16", "T4", "CPU"]


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("NVIDIA A100-SXM4-80GB", "A100-80"), ("NVIDIA A100-SXM4-40GB", "A100-40"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe"), ("NVIDIA A100-PCIE-80GB", "A100-PCIe"),
        ("NVIDIA A100-PCIE-40GB", "A100-40-PCIe"), ("A100 40GB PCIe", "A100-40-PCIe"),
        ("NVIDIA H100 80GB HBM3", "H100"), ("H100 SXM5", "H100"),
        ("NVIDIA H100 PCIe", "H100-PCIe"), ("NVIDIA H100 NVL", "H100-NVL"),
        ("Tesla V100-SXM2-16GB", "V100-16"), ("Tesla V100-SXM2-32GB", "V100"), ("Tesla T4", "T4"),
        ("NVIDIA A10G", "A10G"), ("NVIDIA RTX A6000", "A6000"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090"),
    ],
)  # fmt: skip
def test_names_as_nvidia_smi_has_them(written: str, name: str) -> None:
    assert find_gpu(written).name == name
    assert find_cluster(parse_gpus(f"4x{written}")[1]).gpu.name == name


@pytest.mark.parametrize(("name", "rate"), [("V100", 12e9), ("A100-40", 24e9), ("H100", 48e9)])
def test_a_gpu_reaches_its_hosts_memory_through_its_slot(name: str, rate: float, tmp_path: Path) -> None:
    assert find_cluster(name).host.rate == rate
    path = tmp_path / "my.toml"
    path.write_text("[host]\nbandwidth = 400e9\n")
    assert find_cluster(name, hardware=path).host.rate == 300e9
    path.write_text("[host]\nefficiency = 2\n")
    with pytest.raises(UserError, match=r"\[host\] efficiency is 2; it is a part"):
        find_cluster(name, hardware=path)


def test_a_rack_that_nvlink_joins_counts_as_a_host() -> None:
    assert gpus_of_a_host("GB200") == 72 and find_cluster("GB200").gpus_per_host == 72
    assert gpus_of_a_host("H100") == gpus_of_a_host("RTX-4090") == gpus_of_a_host("of my file") == 8


def test_few_gpus_of_a_full_mesh_have_few_links() -> None:
    """Two MI300X have one of seven, 48 of 64 GB/s; eight have all."""
    inside = find_cluster("MI300X").inside
    assert inside.ring_rate(2) == pytest.approx(48e9, rel=0.01)
    assert inside.ring_rate(8) == pytest.approx(7 * 48e9, rel=0.01)


def test_preset_inherits_what_it_does_not_say() -> None:
    h100, h200 = find_gpu("H100"), find_gpu("H200")
    assert h200.peak == h100.peak and h200.memory_bytes > h100.memory_bytes


@pytest.mark.parametrize(
    ("text", "count", "name"),
    [
        ("8xH100", 8, "H100"),
        ("4 x 4090", 4, "RTX-4090"),
        ("a100", None, "A100-80"),
        ("4090", None, "RTX-4090"),
        ("2XA100-40", 2, "A100-40"),
        ("8 H100", 8, "H100"),
    ],
)
def test_gpus_as_people_write_them(text: str, count: int | None, name: str) -> None:
    found, written = parse_gpus(text)
    assert (found, find_cluster(written).gpu.name) == (count, name)


@pytest.mark.parametrize(
    ("text", "bandwidth"),
    [
        ("400Gb", 50e9), ("400gb/s", 50e9), ("400 Gbps", 50e9), ("400GBit", 50e9), ("1.6Tb", 200e9),
        ("800 Mb/s", 100e6),
    ],
)  # fmt: skip
def test_bandwidth_by_number(text: str, bandwidth: float) -> None:
    assert find_network(text, 8).bandwidth == bandwidth


@pytest.mark.parametrize("text", ["400GB", "400GB/s", "400GBps"])
def test_bytes_are_no_bits(text: str) -> None:
    with pytest.raises(UserError) as caught:
        find_network(text, 8)
    assert str(caught.value) == f"network {text!r}: say it in bits, 400Gb, or 3200Gb if these are bytes"


@pytest.mark.parametrize(
    ("ask", "told"),
    [
        (lambda: find_gpu("H10O"), "did you mean H100"),
        (lambda: find_gpu("GH200"), r"did you mean H200 .*\? --hardware FILE describes others"),
        (lambda: find_cluster(parse_gpus("5070 Ti")[1]), "GPU '5070 Ti' is unknown: .*--hardware FILE"),
        (lambda: find_gpu("quux"), "there are H100, H200"),
        (lambda: find_gpu("Gaudi"), "there are H100, .*, CPU; --hardware FILE describes others"),
        (lambda: find_gpu("NVIDIA GH200"), "did you mean H200"),
        (lambda: parse_gpus("0xH100"), "at least 1"),
        (lambda: parse_gpus("-8xH100"), "--gpus '-8xH100': at least 1"),
        (lambda: parse_gpus("H100x8"), "the number comes first, 8xH100"),
        (lambda: parse_gpus("a100:4"), "the number comes first, 4xa100"),
        (lambda: parse_gpus("8xH100 + 8xA100"), "GPUs of one kind are planned for, .*: ask for each"),
        (lambda: parse_gpus("8xH100,4x4090"), "GPUs of one kind are planned for, .*: ask for each"),
        (lambda: parse_gpus("  "), "write it like 8xH100"),
        (lambda: parse_gpus("1.5xA100"), "a whole number of them, and which, as in 8xH100"),
        (lambda: parse_gpus("8"), "a whole number of them, and which, as in 8xH100"),
        (lambda: find_network("infiniband", 8), "infiniband-ndr"),
        (lambda: find_cluster("H100", hosts=0), "0 hosts: at least 1"),
        (lambda: find_cluster("H100", hosts=10**400), "0 hosts: at least 1, and at most a million"),
        (lambda: find_cluster(parse_gpus(f"{10**400}xH100")[1]), "is unknown"),
        (lambda: find_network(f"{10**400}Gb", 8), "is unknown"),
        (lambda: find_cluster(), "no GPU is named"),
    ],
)
def test_mistakes_are_told_in_one_line(ask: object, told: str) -> None:
    with pytest.raises(UserError, match=told) as caught:
        ask()  # type: ignore[operator]
    assert "\n" not in str(caught.value)


def test_own_file_changes_a_preset(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[gpu]\nlike = "H100"\nname = "mine"\npeak = 1e15\n[between]\nbandwidth = 1e9\n')
    cluster = find_cluster(hosts=2, hardware=path)
    assert cluster.gpu.name == "mine" and cluster.gpu.peak == 1e15
    assert cluster.gpu.memory_bandwidth == find_gpu("H100").memory_bandwidth
    assert cluster.between.bandwidth == 1e9
    named = find_cluster(hosts=2, network="infiniband-hdr", hardware=path)
    assert named.between.bandwidth == 25e9


@pytest.fixture
def at_500_w(tmp_path: Path) -> Path:
    path = tmp_path / "my.toml"
    path.write_text('[gpu]\nlike = "H100"\nname = "H100 at 500 W"\nsustained = 0.65\n')
    return path


@pytest.mark.parametrize("asked", ["H100 at 500 W", "h100-at-500w", "H100", None])
def test_gpus_names_the_one_of_the_file(at_500_w: Path, asked: str | None) -> None:
    gpu = find_cluster(asked, hardware=at_500_w).gpu
    assert gpu == replace(find_gpu("H100"), name="H100 at 500 W", sustained=0.65)


def test_a_file_about_one_gpu_and_another_asked_for(at_500_w: Path) -> None:
    with pytest.raises(UserError) as caught:
        find_cluster("a100-40", hardware=at_500_w)
    assert str(caught.value) == (
        f"--gpus A100-40: {at_500_w} describes H100 at 500 W, which is like H100: ask for that one, or leave "
        "[gpu] out of the file"
    )
    with pytest.raises(UserError, match="GPU 'H100 at 600 W' is unknown: did you mean H100 at 500 W"):
        find_cluster("H100 at 600 W", hardware=at_500_w)
    at_500_w.write_text('[gpu]\nlike = "X"\n')
    with pytest.raises(UserError, match=r"my.toml: \[gpu\] like: GPU 'X' is unknown: there are H100, "):
        find_cluster("H100", hardware=at_500_w)


def test_a_file_that_changes_whatever_is_asked_for(tmp_path: Path) -> None:
    path = tmp_path / "my.toml"
    path.write_text('[gpu]\nname = "H100"\nsustained = 0.65\n')
    assert find_cluster("H100", hardware=path).gpu == replace(find_gpu("H100"), sustained=0.65)
    path.write_text("[gpu]\nsustained = 0.65\n")
    assert find_cluster("H200", hardware=path).gpu == replace(find_gpu("H200"), sustained=0.65)


@pytest.mark.parametrize("wrong", ["6.5", "1.01", "0", "-0.5"])
@pytest.mark.parametrize(
    "name", ["[gpu] sustained", "[gpu] reachable", "[gpu] flash", "[inside] efficiency", "[inside] lanes"]
)
def test_parts_are_no_more_than_the_whole(tmp_path: Path, name: str, wrong: str) -> None:
    path = tmp_path / "my.toml"
    table, field = name.split()
    value = {"flash": f"[0.4, {wrong}]", "lanes": f"[{wrong}]"}.get(field, wrong)
    path.write_text(f"{table}\n{field} = {value}\n")
    with pytest.raises(UserError) as caught:
        find_cluster("H100", hardware=path)
    said = f"{field} is {wrong}; it is a part: more than 0, and at most 1"
    assert said in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("[gpu\n", "is no TOML"),
        ("[cpu]\n", "is unknown; there are"),
        ('[gpu]\nlike = "H100"\nspeed = 3\n', "speed is unknown"),
        ('[gpu]\nlike = "H100"\npeak = "fast"\n', "a number is needed"),
        ('[gpu]\nlike = "H100"\npeak = 0\n', "more than 0"),
        ('[gpu]\nlike = "H100"\npeak = nan\n', "a number is needed"),
        (
            '[gpu]\nname = "mine"\npeak = 1e14\n',
            r"\[gpu\] is without peak_fp32, .*_bytes: add them, or like =",
        ),
        ("[inside]\nbandwidth = 1e9\n", "no GPU is named: choose one of .*, or say in .* which one"),
        ('[gpu]\nlike = "H100"\n[inside]\nlatency = -1\n', r"\[inside\] latency is -1; it must be 0 or more"),
        ('[gpu]\nlike = "H10O"\n', "did you mean H100"),
        ('[gpu]\nlike = "H100"\nname = " "\n', r"\[gpu\] name is ' ': how --gpus names it, or leave it out"),
        ("[gpu]\nlike = 5\n", r"\[gpu\] like is 5; a name is needed"),
        ('[gpu]\nlike = "H100"\ngpus_per_host = "x"\n', "gpus_per_host is 'x'; a whole number is needed"),
        ('[gpu]\nlike = "H100"\ngpus_per_host = inf\n', "gpus_per_host is inf; a whole number is needed"),
        ('[gpu]\nlike = "H100"\nflash = 0.4\n', r"\[gpu\] flash is 0.4; two numbers are needed"),
        (
            "[gpu]\nlike = 'H100'\n[inside]\nbandwidth = [1, 2]\n",
            r"bandwidth is \[1, 2\]; a number is needed",
        ),
        ('[gpu]\nlike = "H100"\npeak = 989\n', r"peak is 989 FLOP/s; at least 1e\+08 is needed"),
        ('[gpu]\nlike = "H100"\nmemory_bytes = 80\n', r"memory_bytes is 80 bytes; at least 1e\+06"),
        ('[gpu]\nlike = "H100"\n[between]\nbandwidth = 400\n', r"bandwidth is 400 bytes/s; at least 1e\+06"),
        (
            "[gpu]\nlike = 'H100'\n[inside]\nlatency = 4\n",
            r"\[inside\] latency is 4 s; less than 1 is needed",
        ),
        ('[gpu]\nlike = "H100"\nmultiprocessors = 1\n', "1, which means a CPU: H100 has 132"),
        ('[gpu]\nlike = "H100"\nmultiprocessors = 2.5\n', "multiprocessors is 2.5; a whole number is needed"),
        ('[gpu]\nlike = "H100"\nbf16 = 0\n', "bf16 is 0; true or false is needed"),
        (
            '[gpu]\nlike = "H100"\ninside = "foo"\n',
            r"my.toml: \[gpu\] inside: link 'foo' is unknown: there are",
        ),
        ('[gpu]\nlike = "H100"\nslot = "pcie"\n', r"\[gpu\] slot: link 'pcie' is unknown: did you mean pcie"),
        ('[gpu]\nlike = "H100"\nnetwork = "9GB"\n', r"\[gpu\] network: network '9GB': say it in bits"),
        pytest.param(f'[gpu]\nlike = "H100"\npeak = {"9" * 310}\n', "9; a number is needed", id="310 digits"),
        pytest.param(f"[gpu]\npeak = {'9' * 5000}\n", "is no TOML: Exceeds the limit", id="5000 digits"),
        pytest.param(f"x = {'[' * 10_000}\n", "is no TOML: maximum recursion depth", id="deep"),
    ],
)
def test_own_file_that_cannot_be(tmp_path: Path, text: str, told: str) -> None:
    path = tmp_path / "my.toml"
    path.write_text(text)
    with pytest.raises(UserError, match=told) as caught:
        find_cluster(hardware=path)
    assert "\n" not in str(caught.value)


def test_own_file_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="No such file"):
        find_cluster(hardware=tmp_path / "none.toml")
