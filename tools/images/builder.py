# SPDX-License-Identifier: Apache-2.0
"""Builds the images of deploy/Containerfile as OCI archives and keeps them in a cache.

``build()`` returns one archive per image, below ``~/.cache/hami/images/<digest>``. The digest is
that of every input: sources, requirements, base, tools and their versions. Unchanged input builds
nothing; one builder at a time works. With the base that this project makes of Debian packages a
build has no network: wheels are fetched before, with the pip of this machine and its settings, and
checked against the hashes of the requirements, so no setting of this machine gets into an
image. Equal input gives equal digests, also of layers that an earlier build made: files have the
time ``EPOCH_S``, or ``SOURCE_DATE_EPOCH`` (Unix seconds), and byte code has none.

Needs buildah, and mmdebstrap for the base of Debian packages.
"""

import contextlib
import fcntl
import hashlib
import json
import os
import platform
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from packaging.requirements import Requirement

from tests.cluster import build as cluster
from tests.cluster.releases import named
from tools import build_console
from tools.images import archive, base, sets
from tools.sbom import bill_of_image

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = "deploy/Containerfile"
INPUTS = (
    *(CONTAINERFILE, "deploy/apt-snapshot.sh", "requirements", "libs", "services"),
    *("native/libvgpu", "native/hami-recall", "tools/build_native.py"),
    *("tools/images/root.py", "tools/images/sets.py"),
)
"""Files and folders that a build may copy."""
CONSOLE = "build/console"
"""Folder with the built console, which a build copies too."""
UNUSED = ("libs/hami-sim/", "native/libvgpu/tests/")
"""Parts of them that no image has."""
EPOCH_S = 1_767_225_600
"""Time of all files of an image: 2026-01-01."""
BUILDERS = ("tools/images", "tools/sbom.py")
"""Other inputs: this program. Two more are the console and the references of deploy/kustomize."""
SCHEDULER = "kube-scheduler"
REGISTRY = "docker.io"
"""Registry that container runtimes add to a name without one."""
PYTHON = "3.11"
"""Release of Python in the base."""
GLIBC_MINORS = range(5, 37)
"""Releases of glibc 2 for which a wheel may be built: those up to Debian 12's."""
WHEELS = "/wheels"
"""Folder of the wheels inside a build."""
_MACHINES = {"amd64": "x86_64", "arm64": "aarch64"}
_KEPT = 6
"""Results of as many different inputs stay in the cache."""
_STORAGE_BYTES = 10 << 30
"""Size above which buildah's storage is cleaned."""
_BLOCK_BYTES = 512


class BuildFailed(Exception):
    """An image cannot be built; the text has the reason and the fix."""


class Image(NamedTuple):
    """One built image."""

    name: str
    """Stage of the Containerfile."""
    reference: str
    """Full name, as a container runtime resolves the one in deploy/kustomize."""
    digest: str
    """Of the manifest, with ``sha256:``."""
    path: Path
    """OCI archive."""
    unpacked_bytes: int
    """Size of the files of all layers."""
    seconds: float
    """Duration of its build and export, when it was built."""
    sbom: Path
    """Bill of materials, CycloneDX."""


Images = Mapping[str, Image]
"""By name."""


class Recipe(NamedTuple):
    """Inputs of a build; ``key`` is their digest and names the place of the result."""

    key: str
    base: str
    is_stand_in: bool
    """The base is the one of Debian packages, which needs no network."""
    platform: str
    epoch_s: int
    release: str
    """Minor release of Kubernetes."""
    kubernetes: Path | None
    """Directory of its programs; None if they are not built."""


def cache() -> Path:
    """Return the directory of everything that is built here, outside the source tree."""
    home = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(home) / "hami" / "images"


def references() -> dict[str, str]:
    """Return the full reference of every image that deploy/kustomize gives a tag."""
    found: dict[str, str] = {}
    for path in sorted((ROOT / "deploy/kustomize").rglob("kustomization.yaml")):
        text = path.read_text(encoding="utf-8")
        for entry in yaml.safe_load(text).get("images", ()) if "newTag" in text else ():
            if "newTag" in entry:
                name = entry["name"]
                folder = "" if "/" in name else "library/"
                found[name.rpartition("/")[2]] = f"{REGISTRY}/{folder}{name}:{entry['newTag']}"
    return found


def names() -> tuple[str, ...]:
    """Return the images that the Containerfile builds, in its order."""
    text = (ROOT / CONTAINERFILE).read_text(encoding="utf-8")
    stages = re.split(r"(?m)^FROM \S+ AS ", text)[1:]
    return tuple(stage.split()[0] for stage in stages if "\nENTRYPOINT " in stage)


def build(
    wanted: Iterable[str] | None = None,
    *,
    base_image: str = "",
    for_platform: str = "",
    kubernetes: str | None = None,
    is_fresh: bool = False,
) -> Images:
    """Return the wanted images, or all, after building what the cache lacks.

    ``base_image`` is a reference with digest; without one, the base is made of Debian packages.
    ``for_platform`` is ``linux/amd64`` or ``linux/arm64``; default: this machine's. ``kubernetes``
    is the minor release of kube-scheduler, such as ``1.37``; default: that of the tag in
    deploy/kustomize. Where that release is not built, all images are those without kube-scheduler,
    and asking for it by name is an error. ``is_fresh`` builds again
    without anything of earlier builds but base and wheels.
    """
    chosen = tuple(names() if wanted is None else wanted)
    if unknown := set(chosen) - set(names()):
        msg = f"no image {', '.join(sorted(unknown))}; there are {', '.join(names())}"
        raise BuildFailed(msg)
    with _one_at_a_time():
        recipe = _recipe(base_image, for_platform, kubernetes)
        if recipe.kubernetes is None and SCHEDULER in chosen:
            problem = f"Kubernetes {recipe.release} is not built"
            fix = f"./dev cluster build --kubernetes {recipe.release}"
            if wanted is not None:
                raise BuildFailed(f"{SCHEDULER}: {problem}: run {fix}")
            _say(f"{SCHEDULER} is left out: {problem} ({fix})")
            chosen = tuple(name for name in chosen if name != SCHEDULER)
        found = {name: None if is_fresh else _kept(recipe, name) for name in chosen}
        if missing := [name for name, image in found.items() if image is None]:
            found |= _build(recipe, missing, is_fresh=is_fresh)
            _forget()
    return {name: image for name, image in found.items() if image is not None}


def _recipe(base_image: str, for_platform: str, kubernetes: str | None) -> Recipe:
    machine = {word: name for name, word in _MACHINES.items()}.get(platform.machine(), "")
    target = for_platform or f"linux/{machine}"
    architecture = target.removeprefix("linux/")
    if architecture not in _MACHINES:
        raise BuildFailed(f"platform {target!r}: write linux/amd64 or linux/arm64")
    if base_image and not re.search(r"@sha256:[0-9a-f]{64}$|^sha256:[0-9a-f]{64}$", base_image):
        raise BuildFailed(f"base {base_image!r} has no digest: write NAME@sha256:…")
    _needs("buildah")
    is_stand_in = not base_image
    if is_stand_in:
        _needs("mmdebstrap")
        try:
            base_image = base.stand_in(_buildah(), architecture)
        except subprocess.CalledProcessError as error:
            raise _failed("the base of Debian packages", error) from error
    epoch_s = int(os.environ.get("SOURCE_DATE_EPOCH") or EPOCH_S)
    versions = (_version(), build_console.digest())
    known = (base_image, target, epoch_s, *versions, sorted(references().items()))
    summary = hashlib.sha256(repr(known).encode())
    for name in _files(*INPUTS, *BUILDERS):
        path = ROOT / name
        is_program = os.access(path, os.X_OK)
        summary.update(f"{name}\0{is_program}\0".encode() + path.read_bytes() + b"\0")
    release = kubernetes or _release_of(references()[SCHEDULER])
    try:
        programs = cluster.find(release)
    except (cluster.BuildFailed, ValueError) as error:
        raise BuildFailed(f"{SCHEDULER}: {error}") from error
    return Recipe(
        key=summary.hexdigest()[:16],
        base=base_image,
        is_stand_in=is_stand_in,
        platform=target,
        epoch_s=epoch_s,
        release=release,
        kubernetes=programs,
    )


def _needs(program: str) -> None:
    if shutil.which(program) is None:
        raise BuildFailed(f"{program} is not in PATH: install Debian's package {program}")


def _release_of(reference: str) -> str:
    """Return the minor release in the tag of kube-scheduler."""
    return ".".join(reference.rpartition(":v")[2].split(".")[:2])


def _reference(recipe: Recipe, name: str) -> str:
    reference = references()[name]
    if name == SCHEDULER and _release_of(reference) != recipe.release:
        return f"{reference.rpartition(':')[0]}:v{named(recipe.release).version}"
    return reference


def _version() -> str:
    done = subprocess.run(["buildah", "--version"], capture_output=True, text=True, check=True)
    return done.stdout.strip()


def _files(*roots: str) -> list[str]:
    """Return the files of the repository below some paths, relative to it, sorted."""
    words = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "--", *roots]
    done = subprocess.run(words, cwd=ROOT, capture_output=True, check=False)
    if done.returncode == 0:
        listed = done.stdout.decode().split("\0")
    else:  # a release without its history
        paths = [ROOT / one for one in roots]
        files = [file for one in paths for file in ([one] if one.is_file() else one.rglob("*"))]
        listed = [str(file.relative_to(ROOT)) for file in files if "__pycache__" not in file.parts]
    return sorted(
        {name for name in listed if (ROOT / name).is_file() and not name.startswith(UNUSED)}
    )


def _folder(recipe: Recipe, name: str) -> Path:
    key = recipe.key
    if name == SCHEDULER:
        key = hashlib.sha256(f"{key} {recipe.kubernetes}".encode()).hexdigest()[:16]
    return cache() / key


def _kept(recipe: Recipe, name: str) -> Image | None:
    folder = _folder(recipe, name)
    try:
        facts: dict[str, Any] = json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return None
    os.utime(folder)
    paths = {key: folder / facts.pop(key) for key in ("path", "sbom")}
    return Image(**facts, **paths)


def _build(recipe: Recipe, missing: list[str], *, is_fresh: bool) -> dict[str, Image]:
    built: dict[str, Image] = {}
    subprocess.run(_buildah("rm", "--all"), capture_output=True, check=False)  # interrupted
    with tempfile.TemporaryDirectory(prefix="hami-images-") as scratch:
        context = Path(scratch) / "context"
        _stage(context)
        for name in missing:
            started_s = time.monotonic()
            _say(f"building {name}")
            words = _command(recipe, name, context)
            if is_fresh:
                words.insert(-1, "--no-cache")
            try:
                subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2, check=True)
                layout = Path(scratch) / name
                _push(name, layout)
            except subprocess.CalledProcessError as error:
                raise _failed(name, error) from error
            built[name] = _finish(recipe, name, archive.Layout(layout), started_s)
            shutil.rmtree(layout)
    return built


def _stage(context: Path) -> None:
    """Copy the inputs, with modes that do not depend on this machine's umask."""
    for name in _files(*INPUTS):
        target = context / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(ROOT / name, target)
        target.chmod(0o755 if os.access(ROOT / name, os.X_OK) else 0o644)
    _stage_console(context / CONSOLE)
    for folder in [context, *(path for path in context.rglob("*") if path.is_dir())]:
        folder.chmod(0o755)


def _stage_console(target: Path) -> None:
    """Build the console, if its sources have changed, and copy it."""
    try:
        built = build_console.build()
    except subprocess.CalledProcessError as error:
        raise _failed("the console", error) from error
    for path in sorted(built.rglob("*")):
        if path.is_file():
            copy = target / path.relative_to(built)
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(path, copy)
            copy.chmod(0o644)


def _buildah(*words: str) -> list[str]:
    storage = cache() / "storage"
    return ["buildah", "--root", str(storage), "--runroot", str(storage / "run"), *words]


def _command(recipe: Recipe, name: str, context: Path) -> list[str]:
    words = _buildah("build", "--quiet", "--layers", "--format", "oci", "--identity-label=false")
    words += ["--timestamp", str(recipe.epoch_s), "--platform", recipe.platform]
    words += ["--file", str(context / CONTAINERFILE), "--target", name, "--tag", _local(name)]
    words += ["--build-arg", f"BASE={recipe.base}"]
    words += ["--network", "none" if recipe.is_stand_in else "host"]
    wheels = _wheels(recipe.platform.removeprefix("linux/"))
    words += ["--volume", f"{wheels / 'files'}:{WHEELS}:ro"]
    words += ["--volume", f"{wheels / 'pip.conf'}:/etc/pip.conf:ro"]
    words += ["--volume", f"{wheels / 'uv.toml'}:/etc/uv/uv.toml:ro"]
    if name == SCHEDULER:
        words += ["--build-context", f"kubernetes={recipe.kubernetes}"]
    return [*words, str(context)]


def _local(name: str) -> str:
    return f"localhost/hami-build/{name}"


def _wheels(architecture: str) -> Path:
    """Return the folder of the wheels of all requirements, after fetching them if needed.

    ``files`` has the wheels, ``pip.conf`` and ``uv.toml`` make pip and uv use no index.
    """
    pins = sets.needed()
    rows = [row.text for row in pins if _applies(row.text, architecture)]
    wanted = "\n".join(rows).encode()
    key = hashlib.sha256(architecture.encode() + wanted).hexdigest()[:16]
    folder = cache() / f"wheels-{key}"
    if folder.exists():
        os.utime(folder)
        return folder
    _say("fetching wheels")
    with tempfile.TemporaryDirectory(dir=cache(), prefix=".wheels-") as scratch:
        fresh = Path(scratch) / "fresh"
        fresh.mkdir(mode=0o755)
        (fresh / "requirements.txt").write_bytes(wanted)
        machine = _MACHINES[architecture]
        tags = [f"manylinux_2_{minor}_{machine}" for minor in GLIBC_MINORS]
        tags += [f"manylinux{year}_{machine}" for year in ("1", "2010", "2014")]
        words = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps"]
        words += ["--require-hashes", "--only-binary", ":all:", "--python-version", PYTHON]
        words += [part for tag in tags for part in ("--platform", tag)]
        words += ["--dest", str(fresh / "files"), "--requirement", str(fresh / "requirements.txt")]
        try:
            subprocess.run(words, stdin=subprocess.DEVNULL, stdout=2, check=True)
        except subprocess.CalledProcessError as error:
            raise _failed("wheels", error) from error
        (fresh / "pip.conf").write_text(f"[global]\nno-index = true\nfind-links = {WHEELS}\n")
        (fresh / "uv.toml").write_text(f'no-index = true\nfind-links = ["{WHEELS}"]\n')
        fresh.rename(folder)
    return folder


def _applies(pin: str, architecture: str) -> bool:
    """Report if a pin is for the Python of the base; markers see this machine otherwise."""
    marker = Requirement(re.split(r"\s+--hash", pin.replace("\\\n", " "))[0].rstrip(" \\")).marker
    target = {
        "python_version": PYTHON,
        "python_full_version": f"{PYTHON}.0",
        "platform_machine": _MACHINES[architecture],
        "sys_platform": "linux",
    }
    return marker is None or marker.evaluate(target)


def _push(name: str, layout: Path) -> None:
    words = _buildah("push", "--quiet", "--disable-compression", "--format", "oci", _local(name))
    words.append(f"oci:{layout}:image")
    subprocess.run(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, check=True)


def _finish(recipe: Recipe, name: str, layout: archive.Layout, started_s: float) -> Image:
    """Write archive, bill and record of one image; the record last."""
    folder = _folder(recipe, name)
    folder.mkdir(parents=True, exist_ok=True)
    reference, path = _reference(recipe, name), folder / f"{name}.oci.tar"
    digest = archive.write(layout, path, reference=reference, compressed=cache() / "layers")
    bill = folder / f"{name}.cdx.json"
    packages = archive.inventory(layout, version=reference.rpartition(":")[2])
    at = datetime.fromtimestamp(recipe.epoch_s, tz=UTC)
    bill.write_text(bill_of_image(reference, digest, packages, at=at), encoding="utf-8")
    image = Image(
        name=name,
        reference=reference,
        digest=digest,
        path=path,
        unpacked_bytes=archive.unpacked_bytes(layout),
        seconds=round(time.monotonic() - started_s, 1),
        sbom=bill,
    )
    facts = image._asdict() | {"path": path.name, "sbom": bill.name}
    record = folder / f"{name}.json"
    record.with_suffix(".new").write_text(json.dumps(facts, indent=1), encoding="utf-8")
    record.with_suffix(".new").replace(record)
    return image


def _forget() -> None:
    """Remove the results that were not used for the longest time."""
    for pattern in ("[0-9a-f]" * 16, "wheels-*"):
        found = sorted(cache().glob(pattern), key=lambda path: path.stat().st_mtime)
        for path in found[:-_KEPT]:
            shutil.rmtree(path, ignore_errors=True)
    found = sorted((cache() / "layers").iterdir(), key=lambda path: path.stat().st_mtime)
    for path in found[: -_KEPT * len(names())]:
        path.unlink(missing_ok=True)
    files = (cache() / "storage").rglob("*")
    if sum(path.lstat().st_blocks * _BLOCK_BYTES for path in files) > _STORAGE_BYTES:
        # All but the base and the last images; the next build makes its layers again.
        subprocess.run(_buildah("rmi", "--prune", "--force"), stdout=2, check=False)


def _failed(what: str, error: subprocess.CalledProcessError) -> BuildFailed:
    program = Path(error.cmd[0]).name
    return BuildFailed(f"{what}: {program} exited {error.returncode}; its messages are above")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    cache().mkdir(parents=True, exist_ok=True)
    with (cache() / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            _say("waiting for another build of images")
            fcntl.flock(lock, fcntl.LOCK_EX)
        try:
            yield
        finally:
            mounted = cache() / "storage" / "overlay"
            if mounted.is_mount():  # buildah leaves it
                subprocess.run(["umount", mounted], capture_output=True, check=False)


def _say(text: str) -> None:
    print(f"images: {text}", file=sys.stderr, flush=True)
