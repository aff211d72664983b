# SPDX-License-Identifier: Apache-2.0
"""Assembles the root file systems of images inside a build, from files of the build's own system.

    root.py python DIR             interpreter, standard library, and the libraries they load
    root.py static DIR [APPLET…]   no library at all; applets of the static busybox
    root.py shell DIR [APPLET…]    only the applets, to be laid over a root of `python`
    root.py wheel DIR VENV NAME    programs of one package that is installed in an environment
    root.py packages DIR           prune and compile what an installer wrote below DIR/opt/hami

A root has what a program reads at run time. Of each Debian package that owns a copied file, it
also has the copyright file and the entry of the package database
(``/var/lib/dpkg/status.d/NAME``), where scanners of images look for it. Byte code is checked
against nothing (``unchecked-hash``), so it has no time in it, and equal input gives equal
files. Runs on the Python of the base image, in /usr (Debian) or /usr/local
(Docker's), with the standard library alone.
"""

import argparse
import compileall
import os
import platform
import py_compile
import re
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Iterable
from pathlib import Path

PREFIX = Path("/opt/hami")
USER = 65532
UNUSED_MODULES = frozenset(
    {
        *("ensurepip", "idlelib", "lib2to3", "pydoc_data", "test", "tkinter", "turtledemo"),
        *("dist-packages", "site-packages", "__pycache__"),
    }
)
"""Folders of the standard library that no service imports."""
UNUSED_EXTENSIONS = re.compile(
    r"(_ctypes_test|_curses|_curses_panel|_dbm|_gdbm|_test\w+|_tkinter|_xx\w+|nis|ossaudiodev"
    r"|readline|xxlimited\w*)\."
)
"""Compiled modules for terminals, windows, old databases and tests."""
UNUSED_FILES = frozenset(
    {".a", ".c", ".cc", ".cpp", ".f90", ".h", ".hash", ".hpp", ".pxd", ".pxi", ".pyi", ".pyx"}
)
"""Suffixes of what only compilers and type checkers read."""
INSTALLER_FILES = frozenset(
    {
        ".lock",
        "INSTALLER",
        "RECORD",
        "REQUESTED",
        "direct_url.json",
        "uv_build.json",
        "uv_cache.json",
    }
)
"""Notes of an installer to itself; they name paths and times of the build."""
UNUSED_PATHS = (
    *("numpy/distutils", "numpy/f2py", "numpy/_core/_simd.*", "numpy/_core/_*_tests.*"),
)
"""Parts of packages that nothing imports at run time: of other uses, compilers and tests."""
GENERATED = ("kubernetes_asyncio/client/api", "kubernetes_asyncio/client/models")
"""A thousand generated classes, mostly docstrings, of which a login with a kubeconfig needs one.
They are byte code without docstrings and source: 8 MB instead of 45 MB."""
LIBRARIES = (
    *("libc.so.6", "libdl.so.2", "libm.so.6", "libpthread.so.0", "libresolv.so.2", "librt.so.1"),
    *("libutil.so.1", "libgcc_s.so.1", "libstdc++.so.6", "libz.so.1"),
)
"""Libraries that wheels for manylinux may expect; ``packages`` checks that they suffice."""
FILES = (
    *("/etc/debian_version", "/etc/os-release", "/usr/lib/os-release", "/etc/ld.so.conf"),
    *("/etc/ld.so.conf.d", "/etc/ssl/certs/ca-certificates.crt"),
)
"""Other files, where they exist: NVIDIA's runtime reads which distribution this is."""


def python(root: Path) -> None:
    """Copy the running interpreter with its library, and the link ``/opt/hami/bin/python``."""
    skeleton(root)
    tree = Tree(root)
    interpreter = Path(sys.executable).resolve()
    library = Path(sysconfig.get_path("stdlib"))
    tree.copy(interpreter)
    tree.link(interpreter.parent / "python3", interpreter.name)
    for path in sorted(library.rglob("*")):
        inner = path.relative_to(library)
        is_unused = UNUSED_MODULES.intersection(inner.parts) or inner.parts[0].startswith("config-")
        if not is_unused and not UNUSED_EXTENSIONS.match(path.name) and path.is_file():
            tree.copy(path)
    for name in LIBRARIES:
        tree.copy_library(name)
    for name in FILES:
        tree.copy_all(Path(name))
    tree.owners.add("ca-certificates")
    tree.close()
    # For libraries of Docker's Python, which are in /usr/local/lib.
    subprocess.run(["ldconfig", "-r", root, "-X"], check=True)
    shutil.rmtree(root / "var/cache", ignore_errors=True)
    compile_all(root, root / library.relative_to("/"))
    (root / "opt/hami/bin").mkdir(parents=True)
    (root / "opt/hami/bin/python").symlink_to(interpreter)
    (root / "opt/hami/bin/python3").symlink_to("python")
    settings = f"home = {interpreter.parent}\nversion = {platform.python_version()}\n"
    (root / "opt/hami/pyvenv.cfg").write_text(f"{settings}include-system-site-packages = false\n")
    tree.describe()


def static(root: Path, applets: list[str]) -> None:
    """Make a root for programs that are linked statically."""
    skeleton(root)
    tree = Tree(root)
    tree.copy_all(Path("/etc/ssl/certs/ca-certificates.crt"))
    tree.owners.add("ca-certificates")
    shell(root, applets, tree)


def shell(root: Path, applets: list[str], tree: "Tree | None" = None) -> None:
    """Add links to the static busybox, which holds all applets in one file."""
    tree = tree or Tree(root)
    if applets:
        busybox = shutil.which("busybox")
        if busybox is None:
            raise SystemExit("images: busybox is missing: install the package busybox-static")
        tree.copy(Path(busybox), at=Path("/usr/bin/busybox"))
    for applet in applets:
        tree.link(Path("/usr/bin") / applet, "busybox")
    tree.describe()


def wheel(root: Path, environment: Path, name: str) -> None:
    """Copy the programs of an installed package, with its record and its licenses."""
    [record] = environment.glob(f"lib/*/site-packages/{name.replace('-', '_')}-*.dist-info")
    about = root / "usr/share/doc" / record.name
    about.mkdir(parents=True)
    shutil.copyfile(record / "METADATA", about / "METADATA")
    for text in sorted(record.glob("licenses/*")):
        shutil.copyfile(text, about / text.name)
    programs = root / "usr/local/bin"
    programs.mkdir(parents=True, exist_ok=True)
    for line in (record / "RECORD").read_text(encoding="utf-8").splitlines():
        path = (record.parent / line.partition(",")[0]).resolve()
        if path.parent == environment / "bin":
            shutil.copyfile(path, programs / path.name)
            (programs / path.name).chmod(0o755)


def packages(root: Path) -> None:
    """Prune installed packages, give scripts the image's interpreter, and compile the modules."""
    prefix = root / PREFIX.relative_to("/")
    prefix.mkdir(parents=True, exist_ok=True)
    prune(prefix)
    for script in sorted((prefix / "bin").glob("*")):
        text = script.read_bytes()
        script.write_bytes(re.sub(rb"\A#!.*python.*", f"#!{PREFIX}/bin/python".encode(), text))
    for site in prefix.glob("lib/*/site-packages"):
        for library in sorted(site.rglob("*.so*")):
            shrink(library, site)
        for name in GENERATED:
            if (site / name).is_dir():
                compile_all(root, site / name, is_alone=True)
        compile_all(root, site)


def prune(prefix: Path) -> None:
    """Remove what no program reads from installed packages."""
    for pattern in UNUSED_PATHS:
        for path in sorted(prefix.glob(f"lib/*/site-packages/{pattern}")):
            shutil.rmtree(path) if path.is_dir() else path.unlink()
    for name in ("include", "share"):
        shutil.rmtree(prefix / name, ignore_errors=True)
    for path in sorted(prefix.rglob("*"), reverse=True):
        if path.is_dir():
            if path.name in {"tests", "__pycache__"}:
                shutil.rmtree(path)
            elif not any(path.iterdir()):
                path.rmdir()
        elif (
            path.suffix in UNUSED_FILES
            or path.name in INSTALLER_FILES
            or (path.suffix == ".md" and ".dist-info" not in str(path))
        ):
            path.unlink()


def shrink(library: Path, site: Path) -> None:
    """Strip a shared library, and check that the image has the libraries that it needs."""
    # Wheels with libraries of their own were edited by patchelf; strip breaks these files.
    package = library.relative_to(site).parts[0].removesuffix(".libs")
    if not (site / f"{package}.libs").exists():
        subprocess.run(["strip", "--strip-unneeded", library], check=True)
    if missing := _needed_by(library, site) - set(LIBRARIES):
        raise SystemExit(f"images: {library} needs {', '.join(sorted(missing))}; see LIBRARIES")


def compile_all(root: Path, *folders: Path, is_alone: bool = False) -> None:
    """Compile all modules below some folders of a root, in sorted order.

    ``is_alone``: byte code takes the place of the source and has no docstrings.
    """
    for folder in folders:
        is_done = compileall.compile_dir(
            folder,
            quiet=1,
            legacy=is_alone,
            optimize=2 if is_alone else -1,
            stripdir=str(root),
            prependdir="/",
            maxlevels=30,
            invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH,
        )
        if not is_done:
            raise SystemExit(f"images: a module in {folder} does not compile; see above")
        for source in folder.rglob("*.py") if is_alone else ():
            source.unlink()


def skeleton(root: Path) -> None:
    """Make the directories and the two users that every root has."""
    for name in ("dev", "etc", "opt", "proc", "run", "sys", "tmp", "usr/bin", "usr/lib", "var/lib"):
        (root / name).mkdir(parents=True)
    (root / "tmp").chmod(0o1777)
    # As on Debian, whose programs and libraries are all below /usr.
    for name in ("bin", "lib", "lib64", "sbin"):
        (root / "usr" / name).mkdir(exist_ok=True)
        (root / name).symlink_to(f"usr/{name}")
    (root / "var/run").symlink_to("../run")
    users = (("root", 0, "/root"), ("hami", USER, "/nonexistent"))
    rows = [f"{name}:x:{uid}:{uid}:{name}:{home}:/nonexistent\n" for name, uid, home in users]
    (root / "etc/passwd").write_text("".join(rows))
    (root / "etc/group").write_text("".join(f"{name}:x:{uid}:\n" for name, uid, _ in users))
    (root / "etc/nsswitch.conf").write_text("hosts: files dns\n")


class Tree:
    """A root that is being filled with files of this system, and the packages that own them."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self._sources: set[Path] = set()
        self.owners: set[str] = set()
        """Packages besides the owners of copied files, such as those that generate one."""

    def copy(self, path: Path, *, at: Path | None = None) -> None:
        """Copy one file to the same place, or to ``at``; what a link points to, not the link."""
        target = self._inside(at or path)
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(path, target)
        target.chmod(0o755 if os.access(path, os.X_OK) else 0o644)
        self._sources.add(path)

    def copy_all(self, path: Path) -> None:
        """Copy a file, or all files of a folder, if it exists."""
        found = sorted(path.rglob("*")) if path.is_dir() else [path]
        for one in found:
            if one.is_file():
                self.copy(one)

    def copy_library(self, name: str) -> None:
        """Copy a shared library that the loader of this system finds by its name."""
        listed = _output("ldconfig", "-p")
        found = re.search(rf"(?m)^\s*{re.escape(name)} .*=> (\S+)$", listed)
        if found:
            self.copy(Path(found[1]))

    def link(self, path: Path, target: str) -> None:
        """Make a symbolic link unless the path exists."""
        place = self._inside(path)
        place.parent.mkdir(parents=True, exist_ok=True)
        if not place.exists():
            place.symlink_to(target)

    def close(self) -> None:
        """Copy the shared libraries that copied programs and libraries need."""
        for source in sorted(self._sources):
            if _is_elf(source):
                for needed in re.findall(
                    r"(?m)^\s*(?:\S+ => )?(/\S+) \(0x", _output("ldd", source)
                ):
                    self.copy(Path(needed))

    def describe(self) -> None:
        """Write which Debian packages the files are of, and copy their copyright files."""
        for name in sorted(_owners(self._sources) | self.owners):
            status = self._root / "var/lib/dpkg/status.d" / name
            status.parent.mkdir(parents=True, exist_ok=True)
            status.write_text(_output("dpkg-query", "--status", name))
            copyright_file = Path("/usr/share/doc") / name / "copyright"
            if copyright_file.is_file():
                target = self._root / copyright_file.relative_to("/")
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(copyright_file, target)

    def _inside(self, path: Path) -> Path:
        """Place of a path in the root: /lib and its like are links into /usr there."""
        inner = path.relative_to("/")
        if inner.parts[0] in {"bin", "lib", "lib64", "sbin"}:
            inner = Path("usr") / inner
        return self._root / inner


def _owners(files: Iterable[Path]) -> set[str]:
    """Return the Debian packages that ship some files, which may be named with or without /usr."""
    wanted: set[str] = set()
    for file in files:
        for path in {str(file), os.path.realpath(file)}:
            wanted |= {path, path.removeprefix("/usr"), f"/usr{path}"}
    found: set[str] = set()
    for listing in sorted(Path("/var/lib/dpkg/info").glob("*.list")):
        if not wanted.isdisjoint(listing.read_text().splitlines()):
            found.add(listing.stem.partition(":")[0])
    return found


def _needed_by(library: Path, prefix: Path) -> set[str]:
    """Return the names of the shared libraries that one needs from outside its packages."""
    done = subprocess.run(["ldd", library], capture_output=True, text=True, check=True)
    lines = done.stdout.splitlines()
    return {line.split()[0] for line in lines if "=>" in line and f"{prefix}/" not in line}


def _is_elf(path: Path) -> bool:
    with path.open("rb") as file:
        return file.read(4) == b"\x7fELF"


def _output(*command: str | Path) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout


def main() -> int:
    """Assemble what the arguments name."""
    parser = argparse.ArgumentParser(description="Assemble root file systems of images.")
    parser.add_argument("part", choices=("python", "static", "shell", "wheel", "packages"))
    parser.add_argument("root", type=Path)
    parser.add_argument("words", nargs="*", help="applets, or an environment and a package")
    options = parser.parse_args()
    options.root.mkdir(parents=True, exist_ok=True)
    match options.part:
        case "python":
            python(options.root)
        case "static":
            static(options.root, options.words)
        case "shell":
            shell(options.root, options.words)
        case "wheel":
            wheel(options.root, Path(options.words[0]), options.words[1])
        case _:
            packages(options.root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
