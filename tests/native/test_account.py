# SPDX-License-Identifier: Apache-2.0
"""Accounting of one container: exact between processes, threads, forks and deaths."""

import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from msgspec.structs import replace

from hami_nodeagent.core.living import Owner, ended_text
from hami_nodeagent.core.region import HEADER_BYTES, Layout, Region, owners, parse_header
from hami_nodeagent.shell.doorbell import Doorbells
from hami_nodeagent.shell.ended import EndedLists
from hami_nodeagent.shell.living import Living
from hami_nodeagent.shell.regions import read_region
from tests.support.accounting import (
    ADDRESS,
    PLAIN,
    RELATIVE,
    THREAD,
    Container,
    Probe,
    build,
    limits_text,
    run,
    until,
)

MIB = 1 << 20
UUID = "GPU-0"
LIBATOMIC = "__atomic_"


@pytest.fixture
def container(tmp_path: Path) -> Container:
    """A container that may use 100 MiB of one device."""
    made = Container(tmp_path)
    made.write_limits(limits_text((UUID, 100)))
    return made


@pytest.fixture
def probe(container: Container) -> Iterator[Probe]:
    """One process in it."""
    with container.probe() as made:
        yield made


@pytest.fixture
def other(container: Container) -> Iterator[Probe]:
    """Another process in it."""
    with container.probe() as made:
        yield made


def files_of(pid: int) -> set[str]:
    """Numbers of the open files of a process."""
    return {path.name for path in Path(f"/proc/{pid}/fd").iterdir()}


def watchers(pid: int) -> list[Path]:
    """Threads of the limiter in a process."""
    tasks = Path(f"/proc/{pid}/task").iterdir()
    return [task for task in tasks if (task / "comm").read_text() == "hami-watch\n"]


def test_limit_is_exact_to_the_byte_between_two_processes(probe: Probe, other: Probe) -> None:
    assert probe.ask(f"charge 0 {60 * MIB}") == 1
    assert other.ask(f"charge 0 {40 * MIB + 1}") == 0
    assert other.ask(f"charge 0 {40 * MIB}") == 1
    assert probe.ask("charge 0 1") == 0
    assert probe.ask("used 0") == other.ask("used 0") == 100 * MIB
    assert probe.ask("refund 0 1") == 1
    assert other.ask("charge 0 1") == 1
    assert (probe.ask("own 0"), other.ask("own 0")) == (60 * MIB - 1, 40 * MIB + 1)


def test_slack_of_one_process_is_available_to_another(probe: Probe, other: Probe) -> None:
    assert probe.ask(f"charge 0 {90 * MIB}") == 1
    assert probe.ask(f"refund 0 {90 * MIB}") == 1
    assert other.ask(f"charge 0 {100 * MIB}") == 1
    assert probe.ask("charge 0 1") == 0


def test_refund_of_more_than_is_used_is_cut_and_counted(probe: Probe) -> None:
    assert probe.ask("charge 0 10") == 1
    assert probe.ask("refund 0 11") == 1
    assert (probe.ask("used 0"), probe.ask("errors")) == (0, 1)
    assert probe.ask(f"charge 0 {100 * MIB}") == 1


def test_unconditional_charge_may_exceed_the_limit(probe: Probe) -> None:
    assert probe.ask(f"anyway 0 {101 * MIB}") == 1
    assert (probe.ask("used 0"), probe.ask("over 0")) == (101 * MIB, 1)
    assert probe.ask("charge 0 1") == 0
    assert probe.ask(f"refund 0 {2 * MIB}") == 1
    assert (probe.ask("over 0"), probe.ask(f"charge 0 {MIB}")) == (0, 1)


def test_sizes_that_no_device_has_are_refused_or_not_counted(probe: Probe) -> None:
    assert probe.ask(f"charge 0 {2**64 - 1}") == 0
    assert probe.ask(f"anyway 0 {2**64 - 1}") == 1
    assert probe.ask("used 0") == 0


def test_devices_without_limits_are_always_charged(probe: Probe) -> None:
    assert probe.ask("find GPU-of-nobody") == -1
    assert probe.ask(f"charge -1 {10**15}") == 1
    assert probe.ask(f"charge 7 {10**15}") == 1
    assert probe.ask("used 7") == 0


def test_memory_of_a_killed_process_is_reclaimed_on_demand(probe: Probe, other: Probe) -> None:
    assert probe.ask(f"charge 0 {100 * MIB}") == 1
    assert other.ask("charge 0 1") == 0
    probe.kill()
    assert other.ask(f"charge 0 {100 * MIB}") == 1
    assert other.ask("processes") == 1


def test_killed_process_is_found_without_demand_for_memory(probe: Probe, other: Probe) -> None:
    assert probe.ask("charge 0 77") == 1
    assert other.ask("charge 0 5") == 1
    probe.kill()
    until(lambda: other.ask("used 0") == 5, "the bytes of the dead are gone")


def test_leader_that_ended_before_its_threads_still_holds_its_memory(
    probe: Probe, other: Probe
) -> None:
    assert probe.ask(f"charge 0 {100 * MIB}") == 1
    assert probe.ask("main_ends") == 0
    stat = Path(f"/proc/{probe.process.pid}/stat")
    until(lambda: ") Z " in stat.read_text(), "the first thread has ended")
    assert other.ask("charge 0 1") == 0
    assert probe.ask("own 0") == 100 * MIB


@pytest.mark.parametrize("way", ["child", "clone"])
def test_child_begins_with_a_slot_of_its_own(probe: Probe, way: str) -> None:
    assert probe.ask("charge 0 10") == 1
    before = probe.ask("incarnation")
    probe.tell(f"{way} own 0; refund 0 10; charge 0 5; own 0; used 0; incarnation; detach")
    answers = [int(probe.line()) for _ in range(8)]
    assert answers[:5] == [0, 1, 1, 5, 15]
    assert answers[5] != before
    assert answers[7] == 0, "status of the child"
    assert (probe.ask("own 0"), probe.ask("used 0")) == (10, 10)
    assert probe.ask("incarnation") == before


def test_child_starts_a_new_account_where_the_kernel_wipes_no_pages(container: Container) -> None:
    program = build("unit/probe", (*RELATIVE, "-DFORK_ADVICE=9999"))
    said = subprocess.run(
        [program],
        cwd=container.root,
        input="charge 0 10\nchild own 0; charge 0 5; used 0\nown 0\n",
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    assert said.split() == ["1", "0", "1", "15", "0", "10"]


def test_account_is_empty_after_exec_of_the_same_program(probe: Probe, other: Probe) -> None:
    pid = probe.ask("pid")
    assert probe.ask(f"charge 0 {100 * MIB}") == 1
    probe.tell("exec")
    assert probe.ask("pid") == pid
    assert probe.ask("own 0") == 0
    assert other.ask(f"charge 0 {100 * MIB}") == 1


def test_memory_is_released_after_exec_of_another_program(probe: Probe, other: Probe) -> None:
    assert probe.ask(f"charge 0 {100 * MIB}") == 1
    probe.tell("exec_other")
    name = Path(f"/proc/{probe.process.pid}/comm")
    until(lambda: name.read_text() == "cat\n", "the other program runs")
    assert other.ask(f"charge 0 {100 * MIB}") == 1


def test_process_without_charges_has_no_thread_and_no_region(container: Container) -> None:
    with container.probe() as quiet:
        assert quiet.ask("pid") == quiet.process.pid
        assert len(list(Path(f"/proc/{quiet.process.pid}/task").iterdir())) == 1
        assert not container.region.exists()
        assert quiet.end() == ""


def test_only_thread_is_a_watcher_that_takes_no_signals(probe: Probe) -> None:
    files = files_of(probe.process.pid)
    assert probe.ask("charge 0 1") == 1
    until(lambda: watchers(probe.process.pid), "the thread has its name")
    (watcher,) = watchers(probe.process.pid)
    blocked = int((watcher / "status").read_text().split("SigBlk:")[1].split()[0], 16)
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        assert blocked >> (number - 1) & 1, number
    assert files_of(probe.process.pid) == files
    assert probe.ask("detach") == 0
    until(lambda: not watchers(probe.process.pid), "the thread ends after the last use")
    assert probe.ask("charge 0 1") == 1
    until(lambda: watchers(probe.process.pid), "there is one again")


def test_detached_process_leaves_nothing(probe: Probe, other: Probe) -> None:
    assert probe.ask("charge 0 9") == 1
    assert probe.ask("detach") == 0
    assert (other.ask("used 0"), other.ask("processes")) == (0, 1)


def test_unusual_program_name_does_not_count_as_dead(container: Container, other: Probe) -> None:
    program = container.root / "a) Z 1 (b"
    program.write_bytes(build("unit/probe", RELATIVE).read_bytes())
    program.chmod(0o755)
    odd = subprocess.Popen(
        [program], cwd=container.root, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert odd.stdin
        assert odd.stdout
        odd.stdin.write(f"charge 0 {100 * MIB}\n")
        odd.stdin.flush()
        assert odd.stdout.readline() == "1\n"
        assert other.ask("charge 0 1") == 0
    finally:
        odd.kill()
        odd.communicate()


def test_stat_is_read_from_the_last_bracket(probe: Probe) -> None:
    fields = ["S", *["1"] * 16, "3", "0", "4242", "0", "0", "0", "5000000", "0", "9000000"]
    assert probe.text("stat 7 (a) Z 9 (b) " + " ".join(fields)) == "S 3 4242"
    assert probe.text("stat 7 (a Z " + " ".join(fields)) == "no"
    assert probe.text("stat 7 (a) " + " ".join(fields[:19])) == "no"


def can_unshare() -> bool:
    """Namespaces of one's own are allowed here."""
    words = ["unshare", "-Urpf", "--mount-proc", "true"]
    return subprocess.run(words, capture_output=True, check=False).returncode == 0


def test_process_in_an_inner_pid_namespace_is_judged_from_outside(
    container: Container, other: Probe
) -> None:
    if not can_unshare():
        pytest.skip("needs leave to make namespaces")
    with container.probe(before=("unshare", "-Urpf", "--mount-proc", "--kill-child")) as inner:
        assert inner.ask(f"charge 0 {100 * MIB}") == 1
        assert other.ask("charge 0 1") == 0, "alive"
        inner.kill()
        until(
            lambda: other.ask(f"charge 0 {100 * MIB}"), "the dead of the inner namespace are found"
        )


def test_process_that_cannot_be_judged_counts_as_alive(container: Container, probe: Probe) -> None:
    if not can_unshare():
        pytest.skip("needs leave to make namespaces")
    with container.probe(before=("unshare", "-Urpf", "--mount-proc", "--kill-child")) as inner:
        assert probe.ask(f"charge 0 {100 * MIB}") == 1
        assert inner.ask("processes") == 2
        probe.kill()
        assert inner.ask("charge 0 1") == 0


def test_processes_of_the_same_number_in_two_namespaces_are_two(container: Container) -> None:
    """Two containers of a pod may share the volume, and number their processes alike."""
    if not can_unshare():
        pytest.skip("needs leave to make namespaces")
    before = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
    with container.probe(before=before) as one, container.probe(before=before) as other:
        assert one.ask("pid") == other.ask("pid") == 1
        assert one.ask(f"charge 0 {60 * MIB}") == 1
        assert other.ask(f"charge 0 {40 * MIB + 1}") == 0, "the other's memory counts"
        assert other.ask(f"charge 0 {40 * MIB}") == 1
        assert (one.ask("own 0"), other.ask("own 0")) == (60 * MIB, 40 * MIB)
        assert one.ask("processes") == other.ask("processes") == 2
        assert other.ask(f"refund 0 {40 * MIB}") == 1
        assert one.ask(f"charge 0 {40 * MIB}") == 1
        one.kill()
        assert other.ask("charge 0 1") == 0, "who cannot be judged lives, though it has my number"


def owner_of(container: Container, pid: int) -> Owner:
    """The owner of a slot as it recorded itself."""
    layout = parse_header(
        container.region.read_bytes()[:HEADER_BYTES], container.region.stat().st_size
    )
    assert isinstance(layout, Layout)
    slots = container.region.read_bytes()[layout.slots_at :][: layout.slots_bytes]
    (found,) = (one for one in owners(slots) if one.pid == pid)
    return found


def test_memory_of_a_container_before_its_restart_is_reclaimed_once_the_agent_lists_it(
    container: Container,
) -> None:
    """A restarted container has another pid namespace, as have other containers of a claim."""
    if not can_unshare():
        pytest.skip("needs leave to make namespaces")
    before = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
    listed = container.root / "run/hami-priority/bells/ended-1"
    listed.parent.mkdir(parents=True)
    with container.probe(before=before) as first:
        assert first.ask(f"charge 0 {100 * MIB}") == 1
        killed = owner_of(container, 1)
        first.kill()
    with container.probe(before=("unshare", "-Urpf", "--mount-proc", "--kill-child")) as second:
        assert second.ask("charge 0 1") == 0, "it cannot be judged in the container"
        other = replace(killed, start_ticks=killed.start_ticks + 1)
        listed.write_text(ended_text([other, replace(killed, namespace=1), replace(killed, pid=2)]))
        assert second.ask("charge 0 1") == 0, "another process is listed"
        listed.write_text(ended_text([other, killed]))
        assert second.ask(f"charge 0 {100 * MIB}") == 1
        assert second.ask("processes") == 1


def test_agent_lists_the_processes_of_a_container_before_its_restart(container: Container) -> None:
    if not can_unshare():
        pytest.skip("needs leave to make namespaces")
    before = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
    key = ("uid", "main")
    own = Doorbells(container.root / "run/hami-priority").directory_of(key)
    (own.parent / "ended-1").symlink_to("uid_main/ended-1")  # its directory is mounted over all
    lists, living = EndedLists(container.root / "run/hami-priority"), Living(Path("/proc"))

    def look() -> None:
        found = read_region(container.region, living.dead_of)
        assert isinstance(found, Region)
        lists.write({key: [one.owner for one in found.ended]})

    with container.probe(before=before) as first:
        assert first.ask(f"charge 0 {100 * MIB}") == 1
        look()
        first.kill()
    with container.probe(before=before) as second:
        assert second.ask("charge 0 1") == 0

        def has_memory() -> bool:
            look()
            return second.ask(f"charge 0 {100 * MIB}") == 1

        until(has_memory, "the memory is free again")
        look()
        assert not list(own.iterdir())


@pytest.mark.parametrize("text", ["", "\n", "1", "1 2\n3", "x y z\n", "9" * 400, "0 0 0\n" * 9])
def test_list_of_the_ended_that_is_no_list_frees_nothing(container: Container, text: str) -> None:
    if not can_unshare():
        pytest.skip("needs leave to make namespaces")
    listed = container.root / "run/hami-priority/bells/ended-1"
    listed.parent.mkdir(parents=True)
    listed.write_text(text)
    before = ("unshare", "-Urpf", "--mount-proc", "--kill-child")
    with container.probe(before=before) as one, container.probe(before=before) as other:
        assert one.ask(f"charge 0 {100 * MIB}") == 1
        assert other.ask("charge 0 1") == 0


def test_steady_path_makes_no_system_call(tmp_path: Path) -> None:
    env = {
        "CUDA_DEVICE_MEMORY_LIMIT": "100m",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(tmp_path / "region"),
    }
    assert run(build("unit/steady_account"), env=env) == "no system call\n"


@pytest.mark.parametrize(
    ("flags", "operations"),
    [(PLAIN, 300_000), (ADDRESS, 50_000), (THREAD, 15_000)],
    ids=["plain", "address", "thread"],
)
def test_sums_are_right_after_threads_of_processes_raced(
    tmp_path: Path, flags: tuple[str, ...], operations: int
) -> None:
    run(build("unit/stress_account", flags), str(tmp_path), "3", "3", str(operations))


@pytest.mark.parametrize("count", [300, 1100])
def test_many_processes_begin_at_once(tmp_path: Path, count: int) -> None:
    env = {
        "CUDA_DEVICE_MEMORY_LIMIT": "1g",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(tmp_path / "region"),
    }
    _, slots, used = run(build("unit/many_account"), str(count), env=env).split()
    assert (int(slots), int(used)) == (count + 1, count * 1000)


def test_short_lived_processes_reuse_slots(tmp_path: Path) -> None:
    """Each sum adds every slot ever used, so dead processes must release their slots."""
    region = tmp_path / "region"
    env = {"CUDA_DEVICE_MEMORY_LIMIT": "1g", "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(region)}
    run(build("unit/churn_account"), "200", env=env)
    content = region.with_name("region-1").read_bytes()
    layout = parse_header(content[:HEADER_BYTES], len(content))
    assert isinstance(layout, Layout)
    assert 1 <= layout.slots_seen <= 16


def test_processes_beyond_the_slots_are_granted_nothing_until_one_is_free(tmp_path: Path) -> None:
    env = {
        "CUDA_DEVICE_MEMORY_LIMIT": "1g",
        "CUDA_DEVICE_MEMORY_SHARED_CACHE": str(tmp_path / "region"),
    }
    words = run(build("unit/many_account"), "2060", "2048", env=env).split()
    assert [int(word) for word in words[1:]] == [1, 0], "the parent came too late for a slot"


def test_no_call_of_libatomic_and_no_young_symbol(tmp_path: Path) -> None:
    program = build("unit/stress_account")
    wanted = subprocess.run(
        ["nm", "-u", program], check=True, capture_output=True, text=True
    ).stdout
    assert LIBATOMIC not in wanted
    assert "__sync_" not in wanted
    assert "pthread_create" in wanted, "the list is that of the program"
