"""CPU quotas: the least of the own group and its ancestors, in both versions of control groups."""

import os

import pytest
from machine_tree import unified, version_1, write_tree

from lean.machine.cpus import Cpus, find_cpus, physical_cores


@pytest.mark.parametrize(
    ("text", "quota"),
    [
        ("100000 100000\n", 1.0),
        ("150000 100000", 1.5),
        ("5000 50000", 0.1),
        ("max 100000", None),
        ("", None),
        ("max", None),
        ("100000", None),
        ("100000 0", None),
        ("0 100000", None),
        ("-1 100000", None),
        ("1e5 100000", None),
        ("100000 100000 100000", None),
        ("\u0664 100000", None),
        ("garbage\x00", None),
    ],
)
def test_a_quota_of_version_2(tmp_path, text, quota):
    assert find_cpus(unified(tmp_path, "/", {"cpu.max": text})).quota == quota


@pytest.mark.parametrize(
    ("times", "period", "quota"),
    [("50000\n", "100000\n", 0.5), ("-1\n", "100000\n", None), ("50000", "0", None), ("x", "y", None), ("", "", None)],
)
def test_a_quota_of_version_1(tmp_path, times, period, quota):
    files = {"cpu,cpuacct/cpu.cfs_quota_us": times, "cpu,cpuacct/cpu.cfs_period_us": period}
    assert find_cpus(version_1(tmp_path, "/", files)).quota == quota


def test_without_any_file_there_is_no_quota(tmp_path):
    assert find_cpus(tmp_path).quota is None
    files = {"cpu,cpuacct/cpu.cfs_quota_us": "50000"}
    assert find_cpus(version_1(tmp_path, "/", files)).quota is None


@pytest.mark.parametrize(("inner", "outer"), [("max 100000", "200000 100000"), ("200000 100000", "400000 100000")])
def test_the_least_quota_of_a_group_and_its_ancestors_counts(tmp_path, inner, outer):
    for number, (own, above) in enumerate([(inner, outer), (outer, inner)]):
        root = unified(tmp_path / str(number), "/a/b/c", {"a/b/c/cpu.max": own, "a/cpu.max": above})
        assert find_cpus(root).quota == 2.0


def test_version_1_beside_an_empty_version_2(tmp_path):
    files = {"cpu,cpuacct/x/cpu.cfs_quota_us": "250000", "cpu,cpuacct/x/cpu.cfs_period_us": "100000"}
    root = version_1(tmp_path, "/x", files)
    with (root / "proc/self/cgroup").open("a") as file:
        file.write("0::/\n")
    with (root / "proc/self/mountinfo").open("a") as file:
        file.write("41 31 0:38 / /sys/fs/cgroup/unified rw,relatime - cgroup2 cgroup2 rw\n")
    assert find_cpus(root).quota == 2.5


@pytest.mark.skipif(not hasattr(os, "sched_getaffinity"), reason="this system has no affinity")
def test_the_affinity_is_that_of_this_process(tmp_path):
    cpus = find_cpus(tmp_path)
    assert cpus.affinity == len(os.sched_getaffinity(0))
    assert cpus.online == os.cpu_count()


@pytest.mark.parametrize(
    ("affinity", "quota", "usable"),
    [(8, None, 8), (8, 0.1, 1), (8, 1.0, 1), (8, 2.0, 2), (2, 6.0, 2), (1, 1.5, 1), (8, 64.0, 8)],
)
def test_usable_cpus_are_at_least_one_and_at_most_affinity_and_quota(affinity, quota, usable):
    assert Cpus(16, affinity, quota).usable == usable


def test_cpus_that_share_a_core_are_one_core(tmp_path):
    name = "sys/devices/system/cpu/cpu{}/topology/thread_siblings_list"
    write_tree(tmp_path, {name.format(cpu): f"{cpu % 2},{cpu % 2 + 2}\n" for cpu in range(4)})
    assert physical_cores({0, 1, 2, 3}, tmp_path) == 2
    assert physical_cores({0, 2}, tmp_path) == 1
    assert physical_cores({5, 6, 7}, tmp_path) == 3
