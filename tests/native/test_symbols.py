# SPDX-License-Identifier: Apache-2.0
"""The one list of entry points against the headers of every supported CUDA release.

The headers' wheels are fetched once per machine, which needs a package index. All releases together
take about 10 s.
"""

import re
import subprocess
from pathlib import Path

import pytest

from tests.support import cuda_headers
from tests.support.cuda_headers import OLD_NAMES, PINS, Release
from tools import gen_symbols

SOURCES = gen_symbols.SOURCE.parent
ABI = {False: SOURCES / "cuda_abi.h", True: SOURCES / "nvml_abi.h"}
HEADER = {False: "cuda.h", True: "nvml.h"}
PINNED = [line.split()[0] for line in PINS.read_text().splitlines() if not line.startswith("#")]

_FORM = re.compile(r"(.*?)(?:_v\d+)?(_ptsz|_ptds)?$")
_TYPED = re.compile(r"^(CUDA|NVML)_(?:HOOK|CALL)\((\w+), (\w+), (\(.*?\)), \(", re.MULTILINE)
_STRUCT = re.compile(r"typedef struct (\w+) \{(.*?)\n\} (\w+)(?:, \w+)*;", re.DOTALL)
_FIELD = re.compile(r"^ {4}(?:\} |\w[\w ]*?[ *])(\w+)(?:\[\d+\])?;|^ {8}\w+ (alloc);", re.MULTILINE)
_VALUE = re.compile(r"^ {4}((?:CU|CUDA|NVML)_\w+) = ", re.MULTILINE)
_NOT_THEIRS = ("later", "reserved")
"""Fields whose names differ between releases; the size of the whole covers them."""


@pytest.fixture(scope="module")
def symbols() -> gen_symbols.Symbols:
    """The list."""
    return gen_symbols.read(gen_symbols.SOURCE.read_text())


@pytest.fixture(params=PINNED, scope="module")
def release(request: pytest.FixtureRequest) -> Release:
    """Each release of the headers."""
    return next(r for r in cuda_headers.releases() if r.name == request.param)


@pytest.fixture(scope="module")
def declared(release: Release) -> set[str]:
    """All declarations of its headers."""
    return cuda_headers.declared(release)


def test_headers_of_every_major_release_are_read() -> None:
    driver = [pin for pin in PINNED if "nvml" not in pin]
    assert {pin.split("==")[1].split(".")[0] for pin in driver} == {"11", "12", "13"}


def test_every_entry_point_of_the_headers_is_classified(
    declared: set[str], symbols: gen_symbols.Symbols
) -> None:
    assert len(declared) > 250
    listed = {hook[0] for hook in symbols.hooks} | {name for name, _ in symbols.passed}
    assert sorted(declared - listed) == []


def test_no_entry_point_is_listed_twice(symbols: gen_symbols.Symbols) -> None:
    names = [hook[0] for hook in symbols.hooks] + [name for name, _ in symbols.passed]
    assert len(names) == len(set(names))


def test_hooks_are_in_search_order(symbols: gen_symbols.Symbols) -> None:
    names = [hook[0] for hook in symbols.hooks]
    assert names == sorted(names)


def test_functions_that_allocate_or_start_work_are_hooked_or_have_a_reason(
    declared: set[str], symbols: gen_symbols.Symbols
) -> None:
    """Independent of the list: functions with such names must not pass as mere queries."""
    passed = dict(symbols.passed)
    makes = re.compile(
        r"^cu(Mem(Alloc|Create|Pool(Create|Import))|(Array|Array3D|MipmappedArray)Create"
        r"|Launch|GraphLaunch|GraphInstantiate|GraphAddMemAlloc|GraphAddNode|ImportExternalMemory"
        r"|CtxCreate|DevicePrimaryCtxRetain|ModuleLoad|LibraryLoad|Ipc(Open|Get)Mem|GraphicsMap"
        r"|GLMap|MulticastCreate)"
    )
    assert sorted(n for n in declared if makes.match(n) and passed.get(n) == "QUERY") == []


def test_requested_versions_are_those_of_the_headers(
    release: Release, declared: set[str], symbols: gen_symbols.Symbols
) -> None:
    if release.is_nvml:
        assert all(not since for name, since, _, _ in symbols.hooks if name.startswith("nvml"))
        return
    known = cuda_headers.versions(release)
    wrong = []
    for name, since, _, _ in symbols.hooks:
        form = _FORM.match(name)
        assert form is not None
        if name in declared and (form[1], since, bool(form[2])) not in known:
            wrong.append((name, since))
    assert wrong == []


def test_prototypes_are_those_of_the_headers(
    release: Release, declared: set[str], tmp_path: Path
) -> None:
    family = "NVML" if release.is_nvml else "CUDA"
    typed = _TYPED.findall(gen_symbols.SOURCE.read_text())
    rows = [row for row in typed if row[0] == family and row[2] in declared]
    assert len(rows) > (8 if release.is_nvml else 80)
    source = f'#include "{HEADER[release.is_nvml]}"\n' + "".join(
        f"extern {result}(*const check_{name}){parameters};\n"
        f"{result}(*const check_{name}){parameters} = {name};\n"
        for _, result, name, parameters in rows
    )
    path = tmp_path / "prototypes.c"
    path.write_text(source)
    folders = ["-I", str(release.include), *cuda_headers.STANDARD]
    mode = ["-DNVML_NO_UNVERSIONED_FUNC_DEFS"] if release.is_nvml else [OLD_NAMES]
    strict = ["-Werror=incompatible-pointer-types", "-Werror=implicit-function-declaration"]
    done = subprocess.run(
        ["cc", "-std=c11", *mode, *strict, *folders, "-fsyntax-only", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr


def test_layouts_and_values_are_those_of_the_headers(release: Release, tmp_path: Path) -> None:
    abi = ABI[release.is_nvml].read_text()
    theirs = cuda_headers.preprocessed(release, f'#include "{HEADER[release.is_nvml]}"\n')
    words = set(re.findall(r"\w+", theirs))
    lines = []
    for _, body, name in _STRUCT.findall(abi):
        if name not in words:
            continue
        lines.append(f'printf("{name} %zu\\n", sizeof({name}));')
        lines += [
            f'printf("{name}.{field} %zu\\n", offsetof({name}, {field}));'
            for field in map("".join, _FIELD.findall(body))
            if not field.startswith(_NOT_THEIRS)
        ]
    lines += [
        f'printf("{value} %lld\\n", (long long){value});'
        for value in _VALUE.findall(abi)
        if value in words
    ]
    assert len(lines) > (25 if release.is_nvml else 100)
    printed = []
    for header, folder in (
        (HEADER[release.is_nvml], release.include),
        (ABI[release.is_nvml].name, SOURCES),
    ):
        path = tmp_path / "layout.c"
        path.write_text(
            f'#include <stdio.h>\n#include "{header}"\n'
            f"int main(void)\n{{\n{chr(10).join(lines)}\nreturn 0;\n}}\n"
        )
        program = tmp_path / "layout"
        folders = ["-I", str(folder), *cuda_headers.STANDARD]
        subprocess.run(["cc", "-std=c11", *folders, "-o", str(program), str(path)], check=True)
        printed.append(subprocess.run([program], capture_output=True, text=True, check=True).stdout)
    assert printed[0] == printed[1]


def test_size_of_every_array_format_is_known(release: Release) -> None:
    if release.is_nvml:
        assert "CU_AD_FORMAT" not in (release.include / "nvml.h").read_text()
        return
    text = (release.include / "cuda.h").read_text()
    values = re.findall(r"CU_AD_FORMAT_(?!MAX)\w+ *= (0x[0-9a-f]+)", text)
    known = re.findall(r"\{(0x[0-9a-f]{2}), \d", (SOURCES / "memory_array.c").read_text())
    assert len(values) >= 20
    assert {int(value, 16) for value in values} <= {int(value, 16) for value in known}
