"""Free memory is the least of what the machine, control groups and resource limits leave."""

import subprocess
import sys
from pathlib import Path

import pytest
from machine_tree import MIB, unified, version_1, write_tree

from lean.machine.memory import memory_bounds, tightest_bound

ROOT = Path(__file__).parents[2]

UNLIMITED = 0x7FFFFFFFFFFFF000  # what version 1 writes where there is no limit


def with_memory(root, available=8000 * MIB):
    text = f"MemTotal:       16777216 kB\nMemFree:        1 kB\nMemAvailable:   {available // 1024} kB\n"
    return write_tree(root, {"proc/meminfo": text})


def free(root):
    return tightest_bound(with_memory(root)).free_bytes // MIB


def group(limit, used, inactive=0, name="memory.max"):
    return {
        name: f"{limit}\n",
        "memory.current": f"{used * MIB}\n",
        "memory.stat": f"anon 5\ninactive_file {inactive * MIB}\n",
    }


def at(folder, files):
    return {f"{folder}/{name}": text for name, text in files.items()}


@pytest.mark.parametrize("name", ["memory.max", "memory.high"])
def test_a_limit_of_version_2_less_what_is_used_and_cannot_be_dropped(tmp_path, name):
    assert free(unified(tmp_path, "/", group(1000 * MIB, 700, 200, name))) == 500


def test_the_lower_of_maximum_and_high_mark_counts(tmp_path):
    files = group(1000 * MIB, 100) | {"memory.high": str(600 * MIB)}
    assert free(unified(tmp_path, "/", files)) == 500


def test_each_ancestor_is_asked_with_its_own_use(tmp_path):
    files = at("a/b", group(1000 * MIB, 100)) | at("a", group(1000 * MIB, 700)) | group("max", 9000)
    assert free(unified(tmp_path, "/a/b", files)) == 300


def v1(limit, used, inactive=0, hierarchical=UNLIMITED):
    stat = f"inactive_file 0\nhierarchical_memory_limit {hierarchical}\ntotal_inactive_file {inactive * MIB}\n"
    return {
        "memory.limit_in_bytes": f"{limit}\n",
        "memory.usage_in_bytes": f"{used * MIB}\n",
        "memory.stat": stat,
    }


def test_a_limit_of_version_1_counts_the_page_cache_of_all_groups_below(tmp_path):
    assert free(version_1(tmp_path, "/x", at("memory/x", v1(1000 * MIB, 700, 200)))) == 500


def test_a_huge_limit_of_version_1_is_none(tmp_path):
    root = version_1(tmp_path, "/x", at("memory/x", v1(UNLIMITED, 700)) | at("memory", v1(UNLIMITED, 700)))
    assert len(memory_bounds(with_memory(root))) == 1
    assert free(root) == 8000


def test_version_1_knows_the_limits_of_ancestors_that_are_not_visible(tmp_path):
    files = at("memory", v1(UNLIMITED, 100, hierarchical=400 * MIB))
    assert free(version_1(tmp_path, "/docker/abc", files, top="/docker/abc")) == 300


def test_a_group_above_its_limit_leaves_nothing(tmp_path):
    assert free(unified(tmp_path, "/", group(1000 * MIB, 1200))) == 0
    assert free(unified(tmp_path / "zero", "/", group(0, 5))) == 0


def test_more_page_cache_than_use_leaves_the_limit(tmp_path):
    assert free(unified(tmp_path, "/", group(1000 * MIB, 5, 50))) == 1000


@pytest.mark.parametrize("limit", ["max", "", "garbage", "-1", "1.5", "0x10", "9" * 30])
def test_what_is_no_limit_leaves_the_memory_of_the_machine(tmp_path, limit):
    assert free(unified(tmp_path, "/", group(limit, 5))) == 8000


def test_a_limit_counts_where_the_use_cannot_be_read(tmp_path):
    assert (
        free(unified(tmp_path, "/", {"memory.max": str(300 * MIB), "memory.current": "?", "memory.stat": "?"})) == 300
    )


LIMITS = """Limit                     Soft Limit           Hard Limit           Units
Max data size             {data}            unlimited            bytes
Max address space         {space}           unlimited            bytes
"""
STATUS = "Name:\tpython\nVmSize:\t  102400 kB\nVmData:\t   51200 kB\n"  # 100 and 50 MiB


@pytest.mark.parametrize(
    ("space", "data", "left"),
    [
        ("unlimited", "unlimited", 8000),
        (900 * MIB, "unlimited", 800),
        ("unlimited", 900 * MIB, 850),
        (900 * MIB, 300 * MIB, 250),
        (50 * MIB, "unlimited", 0),
        ("garbage", "-1", 8000),
    ],
)
def test_resource_limits_less_what_the_process_has(tmp_path, space, data, left):
    files = {"proc/self/limits": LIMITS.format(space=space, data=data), "proc/self/status": STATUS}
    assert free(write_tree(tmp_path, files)) == left


def test_the_bound_says_its_name(tmp_path):
    root = with_memory(tmp_path)
    assert tightest_bound(root).name == "the machine"
    write_tree(root, {"proc/self/limits": LIMITS.format(space=900 * MIB, data="unlimited")})
    assert tightest_bound(root).name == "RLIMIT_AS (ulimit -v)"
    unified(root, "/", group(500 * MIB, 5))
    assert tightest_bound(root).name == f"control group {root}/sys/fs/cgroup"


def test_without_any_file_half_of_the_machine_is_free(tmp_path):
    [bound] = memory_bounds(tmp_path)
    assert 0 < bound.free_bytes == bound.limit_bytes // 2


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux lists the limits of a process")
def test_a_limit_on_the_address_space_is_asked_of_the_running_process():
    code = (
        "import resource; resource.setrlimit(resource.RLIMIT_AS, (2**29, 2**29))\n"
        "from lean.machine.memory import tightest_bound\n"
        "print(tightest_bound().free_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert 2**28 < int(done.stdout) < 2**29
