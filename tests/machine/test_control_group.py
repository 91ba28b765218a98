"""The folders of the process's control groups are found as containers and hosts show them."""

import pytest
from machine_tree import mount, unified, version_1, write_tree

from lean.machine.control_group import group_folders
from lean.machine.cpus import find_cpus


def found(root, controller="cpu"):
    return [str(folder.relative_to(root)) for folder in group_folders(controller, root)]


def test_a_group_and_its_ancestors_are_found_own_group_first(tmp_path):
    unified(tmp_path, "/a.slice/b.service", {"a.slice/b.service/cpu.max": ""})
    assert found(tmp_path) == ["sys/fs/cgroup/a.slice/b.service", "sys/fs/cgroup/a.slice", "sys/fs/cgroup"]


def test_version_1_has_a_folder_for_each_controller(tmp_path):
    version_1(tmp_path, "/x", {"memory/x/memory.stat": "", "cpu,cpuacct/x/cpu.shares": ""})
    assert found(tmp_path, "memory") == ["sys/fs/cgroup/memory/x", "sys/fs/cgroup/memory"]
    assert found(tmp_path, "cpu") == ["sys/fs/cgroup/cpu,cpuacct/x", "sys/fs/cgroup/cpu,cpuacct"]


def test_both_versions_at_once_are_both_read(tmp_path):
    lines = "2:memory:/m\n0::/u\n"
    mounts = mount("/sys/fs/cgroup/memory", "cgroup cgroup rw,memory") + mount("/sys/fs/cgroup/unified")
    folders = {"sys/fs/cgroup/memory/m/x": "", "sys/fs/cgroup/unified/u/x": ""}
    write_tree(tmp_path, {"proc/self/cgroup": lines, "proc/self/mountinfo": mounts} | folders)
    unified_folders = ["sys/fs/cgroup/unified/u", "sys/fs/cgroup/unified"]
    assert found(tmp_path, "memory") == ["sys/fs/cgroup/memory/m", "sys/fs/cgroup/memory", *unified_folders]
    assert found(tmp_path, "cpu") == unified_folders


@pytest.mark.parametrize(
    ("path", "top"),
    [
        ("/", "/"),  # a namespace of its own
        ("/docker/abc", "/docker/abc"),  # the host's names, the mount shows the container's group alone
        ("/docker/abc", "/"),  # the host's names, which the mount does not have
        ("/", "/docker/abc"),  # the mount was made outside the namespace
        ("/../..", "/"),  # the process was moved out of its namespace
        ("/../..", "/../.."),
        ("/../../gone", "/.."),
        ("/gone (deleted)", "/"),
    ],
)
def test_the_top_of_the_mount_is_the_group_where_no_folder_below_it_fits(tmp_path, path, top):
    unified(tmp_path, path, {"cpu.max": "max 100000"}, top=top)
    assert found(tmp_path) == ["sys/fs/cgroup"]


@pytest.mark.parametrize(
    ("path", "top"),
    [("/docker/abc/sub", "/docker/abc"), ("/lxc/c1/sub", "/"), ("/../../sub", "/../.."), ("/sub (deleted)", "/")],
)
def test_a_group_inside_a_container_is_found_by_the_end_of_its_path(tmp_path, path, top):
    unified(tmp_path, path, {"sub/cpu.max": "max 100000"}, top=top)
    assert found(tmp_path) == ["sys/fs/cgroup/sub", "sys/fs/cgroup"]


def test_a_mount_of_another_group_is_not_taken_for_the_own_one(tmp_path):
    other = mount("/host/other", top="/other")
    unified(tmp_path, "/mine", {"mine/cpu.max": ""})
    lines = (tmp_path / "proc/self/mountinfo").read_text()
    write_tree(tmp_path, {"proc/self/mountinfo": other + lines, "host/other/cpu.max": ""})
    assert found(tmp_path) == ["sys/fs/cgroup/mine", "sys/fs/cgroup"]


def test_blanks_in_names_are_read(tmp_path):
    write_tree(
        tmp_path,
        {"proc/self/cgroup": "0::/a b\n", "proc/self/mountinfo": mount("/my\\040groups"), "my groups/a b/cpu.max": ""},
    )
    assert found(tmp_path) == ["my groups/a b", "my groups"]


@pytest.mark.parametrize("groups", [None, "", "\n", "garbage", "0:", "0::", "::::", "0::relative", "7:cpu", "\x00\xff"])
@pytest.mark.parametrize(
    "mounts", [None, "", "garbage", " - ", "a b c d e f - cgroup2", "1 2 3 / /x rw - ", mount("/x")]
)
def test_damaged_files_are_no_groups_or_the_mount(tmp_path, groups, mounts):
    texts = {"proc/self/cgroup": groups, "proc/self/mountinfo": mounts}
    write_tree(tmp_path, {name: text for name, text in texts.items() if text is not None})
    assert found(tmp_path) == []


def test_bytes_that_are_no_text_and_folders_in_place_of_files_are_no_error(tmp_path):
    (tmp_path / "proc/self/cgroup").mkdir(parents=True)
    (tmp_path / "proc/self/mountinfo").write_bytes(b"\xff\xfe\x00 - cgroup2 \xff")
    assert found(tmp_path) == []
    write_tree(tmp_path / "zero", {"proc/self/cgroup": "0::/a\x00b\n", "proc/self/mountinfo": mount("/x\\000y")})
    assert find_cpus(tmp_path / "zero").quota is None
    unified(tmp_path / "long", "/" + "x" * 5000, {"cpu.max": ""})
    assert found(tmp_path / "long") == ["sys/fs/cgroup"]
