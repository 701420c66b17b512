"""The container's limits of cores and memory, read from cgroup files of both versions."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlserver_torch_stream.engine.machine import default_kv_budget, read_host

CORES = len(os.sched_getaffinity(0))
GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{text}\n")
    return root


def v2(root: Path, group: str = "", **files: str) -> Path:
    named = {f"sys/fs/cgroup/{group}/{name.replace('__', '.')}": text for name, text in files.items()}
    return write(root, {"sys/fs/cgroup/cgroup.controllers": "cpu memory", "proc/self/cgroup": f"0::/{group}", **named})


@pytest.mark.parametrize(
    ("quota", "threads"),
    [("50000 100000", 1), ("100000 100000", 1), ("100001 100000", min(2, CORES)), ("1000 100000", 1)],
)
def test_a_cpu_quota_is_rounded_up_to_whole_threads(tmp_path: Path, quota: str, threads: int) -> None:
    assert read_host(v2(tmp_path, cpu__max=quota)).threads == threads


def test_threads_never_exceed_the_cores_that_the_process_may_use(tmp_path: Path) -> None:
    host = read_host(v2(tmp_path, cpu__max=f"{(CORES + 8) * 100_000} 100000"))
    assert (host.threads, host.threads_origin) == (CORES, "CPU affinity")


def test_without_a_quota_every_core_counts(tmp_path: Path) -> None:
    assert read_host(v2(tmp_path, cpu__max="max 100000")).threads == CORES
    assert read_host(tmp_path / "empty").threads == CORES


def test_the_tightest_group_on_the_path_decides(tmp_path: Path) -> None:
    v2(tmp_path, "pods/pod", cpu__max="max 100000", memory__max=str(8 * GIB), memory__current=str(GIB))
    v2(tmp_path, "pods", cpu__max="100000 100000", memory__max=str(4 * GIB), memory__current=str(GIB))
    write(tmp_path, {"proc/self/cgroup": "0::/pods/pod"})
    host = read_host(tmp_path)
    assert (host.threads, host.available_bytes) == (1, 3 * GIB)


def test_a_path_that_is_the_hosts_falls_back_to_the_mount(tmp_path: Path) -> None:
    v2(tmp_path, cpu__max="100000 100000")
    write(tmp_path, {"proc/self/cgroup": "0::/kubepods.slice/not-visible-here"})
    assert read_host(tmp_path).threads == 1


def test_memory_is_the_limit_less_what_is_used_but_file_cache_can_go(tmp_path: Path) -> None:
    v2(
        tmp_path,
        memory__max=str(4 * GIB),
        memory__current=str(3 * GIB),
        memory__stat=f"anon {GIB}\ninactive_file {GIB}\nactive_file 5",
    )
    host = read_host(write(tmp_path, {"proc/meminfo": f"MemTotal: 1 kB\nMemAvailable: {64 * GIB // 1024} kB"}))
    assert (host.available_bytes, host.memory_origin) == (2 * GIB, "cgroup memory limit")


_MAPPED = [(1, "a.panels"), (2, "libtorch.so"), (3, "b.panels (deleted)")]


def test_weights_in_mapped_files_are_not_free(tmp_path: Path) -> None:
    maps = {"proc/self/maps": "".join(f"{i}0000000-{i}{i}000000 r--s 0 fd:00 1 /cache/{end}\n" for i, end in _MAPPED)}
    available = {"proc/meminfo": f"MemAvailable: {2 * GIB // 1024} kB"}
    assert read_host(write(tmp_path, available | maps)).available_bytes == 2 * GIB - (0x1000000 + 0x3000000)
    v2(tmp_path, memory__max=str(GIB), memory__current=str(GIB // 2), memory__stat=f"inactive_file {GIB // 4}")
    assert read_host(tmp_path).available_bytes == GIB // 2 + GIB // 4 - 0x4000000
    v2(tmp_path, memory__max=str(GIB), memory__current=str(GIB // 2), memory__stat="inactive_file 4096")
    assert read_host(tmp_path).available_bytes == GIB // 2  # the panels are not in this cgroup's inactive pages


def test_memory_that_the_machine_lacks_is_not_promised(tmp_path: Path) -> None:
    v2(tmp_path, memory__max=str(8 * GIB), memory__current="0")
    host = read_host(write(tmp_path, {"proc/meminfo": f"MemAvailable: {GIB // 1024} kB"}))
    assert (host.available_bytes, host.memory_origin) == (GIB, "MemAvailable")


@pytest.mark.parametrize(
    ("name", "used", "option"), [("Max address space", "VmSize", "-v"), ("Max data size", "VmData", "-d")]
)
def test_a_limit_of_the_process_counts_less_what_it_has_mapped(
    tmp_path: Path, name: str, used: str, option: str
) -> None:
    def limited(soft: str) -> Path:
        limits = f"{'Limit':26}Soft Limit Hard Limit Units\n{name:26}{soft} unlimited bytes"
        status = f"Name:\tpython\n{used}:\t {GIB // 1024} kB\nThreads:\t1"
        meminfo = f"MemAvailable: {64 * GIB // 1024} kB"
        return write(tmp_path, {"proc/self/limits": limits, "proc/self/status": status, "proc/meminfo": meminfo})

    host = read_host(limited(str(4 * GIB)))
    assert (host.available_bytes, host.memory_origin) == (3 * GIB, f"ulimit {option}")
    assert read_host(limited(str(GIB // 2))).available_bytes == 0
    assert read_host(limited("unlimited")).available_bytes == 64 * GIB


def test_the_kernels_own_limit_is_seen() -> None:
    limit = 8 * GIB
    code = (
        f"import resource; resource.setrlimit(resource.RLIMIT_AS, ({limit}, {limit}));"
        "from mlserver_torch_stream.engine.machine import read_host; print(read_host().available_bytes)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert 0 < int(done.stdout) < limit


def test_cgroup_version_1(tmp_path: Path) -> None:
    group = "docker/abc"
    write(
        tmp_path,
        {
            "proc/self/cgroup": f"5:cpu,cpuacct:/{group}\n3:memory:/{group}\n1:name=systemd:/{group}",
            f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_quota_us": "90000",
            f"sys/fs/cgroup/cpu,cpuacct/{group}/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1",
            "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000",
            f"sys/fs/cgroup/memory/{group}/memory.limit_in_bytes": str(2 * GIB),
            f"sys/fs/cgroup/memory/{group}/memory.usage_in_bytes": str(GIB),
            f"sys/fs/cgroup/memory/{group}/memory.stat": "inactive_file 1\ntotal_inactive_file 1024",
            "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes": "1",
        },
    )
    host = read_host(tmp_path)
    assert (host.threads, host.threads_origin) == (1, "cgroup CPU quota")
    assert host.available_bytes == GIB + 1024


def test_this_machine_has_something_to_give() -> None:
    host = read_host()
    assert 1 <= host.threads <= CORES
    assert host.available_bytes > 0


def test_models_share_half_of_what_is_there() -> None:
    assert default_kv_budget(8 * GIB) == 4 * GIB
    assert default_kv_budget(8 * GIB, models_sharing=2) == 2 * GIB
