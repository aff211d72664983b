# SPDX-License-Identifier: Apache-2.0
"""Results of the Containerfile, as far as they can be tried without a builder of images.

The wheels hold every file of their sources. Each image's entry point starts as in its pod: alone in
a file system that is writable only where the manifest mounts something, under the image's user,
without capabilities and without any network.
"""

import base64
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hatchling.builders.wheel import WheelBuilder

from hami_common.pods.signing import Signer
from hami_sim.certs import CertificateAuthority
from tests.support.containerfile import Containerfile
from tests.unit.deploy.test_files import DEPLOY, ROOT, pods
from tools.images.builder import CONSOLE
from tools.images.sets import MEMBER_BY_IMAGE

FILE = Containerfile(DEPLOY / "Containerfile")
MEMBERS = sorted(
    path.parent for part in ("libs", "services") for path in ROOT.glob(f"{part}/*/pyproject.toml")
)
OURS = [image for image in FILE.images() if image in MEMBER_BY_IMAGE]
"""Images with our packages; not NATS and kube-scheduler."""
SHIPPED = [member for member in MEMBERS if member.name != "hami-sim"]
LIMIT_S = 60
DEPENDENCY = 3
"""Exit code of a service whose NATS or API server is unavailable."""
WRITES = "import tempfile; print(tempfile.gettempdir())"
GOES_ON = "bus not reached, admission goes on"
NOBODY = {
    "nats_urls": "nats://127.0.0.1:1",
    "kubeconfig": "/mnt/kubeconfig",
    "start_timeout_s": "0.5",
}
SETTINGS: dict[str, dict[str, str]] = {
    "webhook": {**NOBODY, "tls_cert_file": "/mnt/tls.crt", "tls_key_file": "/mnt/tls.key"},
    "registry": NOBODY,
    "scheduler": {**NOBODY, "signing_key_file": "/mnt/signing.pem"},
    "nodeagent": {**NOBODY, "node_name": "n"},
}
OTHERS = {"plugin-proxy", "agent-devices"}
"""Programs of the agent's image besides the agent."""
SEEN = ("/usr", "/bin", "/sbin", "/lib", "/lib64", "/etc", "/dev", "/proc")
"""Paths of this machine that a container can read, in addition to Python and the project."""

CONTAINER = r"""
set -eu
root=$1 user=$2; shift 2
mount -t tmpfs none "$root"
for path in $WRITABLE; do
    mkdir -p "$root$path"; mount -t tmpfs -o mode=1777 none "$root$path"
done
for path in $SEEN; do  # what lies below /tmp, as a checkout may, is seen there
    if [ -L "$path" ]; then cp -P "$path" "$root$path"
    elif [ -d "$path" ]; then mkdir -p "$root$path"; mount --rbind "$path" "$root$path"; fi
done
mkdir -p "$root/mnt" && mount --bind "$FILES" "$root/mnt"
mount -o remount,ro "$root"
exec chroot "$root" setpriv --reuid "${user%:*}" --regid "${user#*:}" --clear-groups \
    --inh-caps=-all --bounding-set=-all --no-new-privs env -i HOME=/ "$@"
"""
"""Makes the file system of a container and starts a program in it."""


def why_not() -> str:
    """Reason that no container can be made here; empty when one can."""
    missing = [name for name in ("unshare", "setpriv", "chroot") if shutil.which(name) is None]
    if missing:
        return f"{', '.join(missing)} is missing"
    tried = subprocess.run(
        ["unshare", "--mount", "--net", "mount", "-t", "tmpfs", "none", "/mnt"],
        capture_output=True,
        text=True,
        check=False,
    )
    return tried.stderr.strip()


def writable(image: str) -> list[str]:
    """Directories in which every pod of an image may write."""
    found = [
        {
            mount["mountPath"]
            for mount in container.get("volumeMounts", ())
            if not mount.get("readOnly")
        }
        for _, pod in pods()
        for container in pod["containers"]
        if container["image"] == f"hami/{image}" and not OTHERS & set(container["args"])
    ]
    return sorted(set.intersection(*found))


def started(image: str, directory: Path, *words: str) -> "subprocess.Popen[str]":
    """A program in a container of an image, in place of the entry point's ``python``."""
    python = str(Path(sys.executable))
    root, files = directory / f"root-{image}-{len(words)}", directory / "files"
    root.mkdir()
    seen = [*SEEN, sys.base_prefix, sys.prefix, str(ROOT)]
    return subprocess.Popen(
        [
            *("unshare", "--mount", "--net", "sh", "-c", CONTAINER, "sh", str(root)),
            *(FILE.user(image), python, *words),
        ],
        env={
            "PATH": os.environ["PATH"],
            "SEEN": " ".join(seen),
            "FILES": str(files),
            "WRITABLE": " ".join(writable(image)),
        },
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Files that the services read at their start."""
    folder = tmp_path / "files"
    _, _, ca = CertificateAuthority().issue_files(folder, ["localhost"])
    (folder / "signing.pem").write_bytes(Signer.generate().private_pem())
    token = {"token": "t"}
    cluster = {
        "server": "https://127.0.0.1:1",
        "certificate-authority-data": base64.b64encode(ca.read_bytes()).decode(),
    }
    context = {"cluster": "c", "user": "u"}
    kubeconfig = {
        "current-context": "c",
        "clusters": [{"name": "c", "cluster": cluster}],
        "contexts": [{"name": "c", "context": context}],
        "users": [{"name": "u", "user": token}],
    }
    (folder / "kubeconfig").write_text(json.dumps(kubeconfig))
    for file in folder.iterdir():
        file.chmod(0o644)
    return folder


@pytest.mark.usefixtures("files")
@pytest.mark.timeout(120)
def test_entry_points_start_without_network_and_write_only_to_writable_mounts(
    tmp_path: Path,
) -> None:
    """They end because no peer answers, not because anything of their own is missing."""
    if reason := why_not():
        pytest.skip(f"no container can be made here: {reason}")
    running, writing = {}, {}
    for image in OURS:
        _, *words = FILE.entry_point(image)
        for key, value in SETTINGS.get(image, {}).items():
            words += ["--set", f"{key}={value}"]
        words = words or ["-m", "hamictl", "--version"]
        running[image] = started(image, tmp_path, *words)
        # No program may rely on a directory that is writable only on a developer's machine.
        writing[image] = started(image, tmp_path, "-c", WRITES)
    said = {image: _ending(process) for image, process in running.items()}
    wrote = {image: _ending(process) for image, process in writing.items()}
    ends = {image: process.returncode for image, process in running.items()}
    wanted = dict.fromkeys(OURS, DEPENDENCY) | {"hamictl": 0, "webhook": 0}
    assert ends == wanted, said
    assert not [image for image, text in said.items() if "Traceback" in text], said
    assert wrote == dict.fromkeys(OURS, "/tmp\n")


def _ending(process: "subprocess.Popen[str]") -> str:
    """Output of a program until it ended; a program that runs without the bus is terminated."""
    assert process.stdout is not None
    said = ""
    with process:
        for line in process.stdout:
            if GOES_ON in line and GOES_ON not in said:
                process.terminate()
            said += line
    return said


@pytest.mark.parametrize("member", SHIPPED, ids=lambda member: member.name)
def test_wheel_would_hold_every_file_of_its_sources(member: Path) -> None:
    """Not an editable installation, as tests use it, because it hides missing files."""
    source = member / "src"
    wanted = {
        str(path.relative_to(source))
        for path in source.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    packed = WheelBuilder(str(member)).recurse_included_files()
    assert wanted <= {file.distribution_path for file in packed}


@pytest.mark.parametrize("image", OURS)
def test_every_pod_of_an_image_has_a_place_for_temporary_files(image: str) -> None:
    assert "/tmp" in writable(image)


def test_copied_files_cover_the_built_packages() -> None:
    copied = {source for sources in FILE.copied().values() for source in sources}
    for member in MEMBERS:
        path = member.relative_to(ROOT)
        is_copied = bool({str(path), str(path.parent)} & copied)
        assert is_copied is (member in SHIPPED), member
    assert all((ROOT / source).exists() for source in copied - {CONSOLE})


def test_nothing_in_it_is_for_one_architecture_and_nothing_runs_in_the_last_stages() -> None:
    text = (DEPLOY / "Containerfile").read_text(encoding="utf-8")
    steps = "\n".join(line for line in text.splitlines() if not line.startswith("#"))
    assert not re.search(r"amd64|x86|arm64|aarch64|--platform|-march", steps)
    for image in FILE.images():
        # An image is files and a start: whatever is fetched is fetched by the stages before.
        last = [stage for stage in FILE.line_of(image) if stage.name in (image, "base")]
        assert not [rest for stage in last for rest in stage.of("RUN")]
        assert FILE.user(image) == ("0:0" if image == "nodeagent" else "65532:65532")
