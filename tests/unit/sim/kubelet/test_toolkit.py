# SPDX-License-Identifier: Apache-2.0
"""A container's view of a machine: only its devices, renumbered from 0."""

from pathlib import Path

from hami_sim.hardware.fake_nvml import FakeNvml
from hami_sim.hardware.profile import load
from hami_sim.kubelet.plan import Plan
from hami_sim.kubelet.toolkit import DriverFiles, Toolkit, instances_of, view_of


def machine(directory: Path) -> FakeNvml:
    return FakeNvml(directory / "state", load("4xT4"), "node-a")


def test_view_has_the_named_devices_in_the_machines_order(tmp_path: Path) -> None:
    fake = machine(tmp_path)
    fake.xid(0, 31)
    state = fake.path.read_text(encoding="ascii")
    view = view_of(state, [fake.uuids[3], fake.uuids[1]])
    lines = view.splitlines()
    assert [line for line in lines if line.startswith("[gpu")] == ["[gpu 0]", "[gpu 1]"]
    named = [line.partition(" = ")[2] for line in lines if line.startswith("uuid = ")]
    assert named == [fake.uuids[1], fake.uuids[3]]
    assert not any(line.startswith(("pair", "event", "fault")) for line in lines)
    assert [line for line in lines if line.startswith("driver_version")] == [
        line for line in state.splitlines() if line.startswith("driver_version")
    ]


def test_all_devices_are_the_machine_itself(tmp_path: Path) -> None:
    state = machine(tmp_path).path.read_text(encoding="ascii")
    assert view_of(state, None) == state


def test_container_that_names_no_devices_gets_nothing(tmp_path: Path) -> None:
    toolkit = Toolkit("node-a", DriverFiles(libraries="/none", state=str(tmp_path / "state")))
    for visible in ({}, {"NVIDIA_VISIBLE_DEVICES": "void"}, {"NVIDIA_VISIBLE_DEVICES": "none"}):
        plan = Plan(uid="u", namespace="n", pod="p", name="c", argv=["true"], env=visible)
        assert toolkit.equip(plan, mounts=True) is plan


def test_container_sees_its_mig_instances_alone() -> None:
    text = "gi GPU-a 7 19 0\nci GPU-a 7 0 1 MIG-x\ngi GPU-a 8 19 1\nci GPU-a 8 0 1 MIG-y\n"
    assert instances_of(text, ["MIG-y"]) == "gi GPU-a 8 19 1\nci GPU-a 8 0 1 MIG-y\n"
    assert instances_of(text, None) == text
    assert instances_of(text, ["GPU-a"]) == ""
