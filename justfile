# SPDX-License-Identifier: Apache-2.0
# Recipes of the repository; `./dev NAME` runs one. Every fixer has a check-only twin. The recipes of the group
# "gate" are what `./dev check` runs, so a new gate is one recipe here and nothing elsewhere.

set positional-arguments := true
set shell := ["sh", "-euc"]

export PATH := justfile_directory() / ".venv/bin:" + env("PATH")

[private]
default:
    @just --list --unsorted

# make or update .venv (./dev has done so by the time this runs)
[group('setup')]
setup:
    @echo "environment is ready: .venv"

# recompile requirements/*.txt from *.in; --upgrade takes newer versions
[group('setup')]
pins *args:
    python -m tools.pins write "$@"

# all gates, none left out when one fails
[group('check')]
[no-exit-message]
check:
    @python -m tools.run_tests --gates

# format the sources
[group('check')]
fmt: && fmt-c
    ruff format .

# format the C sources
[group('check')]
fmt-c:
    git ls-files -z 'native/*.[ch]' 'libs/*.[ch]' | xargs -0 --no-run-if-empty clang-format -i

# are the sources formatted?
[group('gate')]
fmt-check:
    ruff format --check --output-format concise .

# are the C sources formatted?
[group('gate')]
fmt-c-check:
    git ls-files -z 'native/*.[ch]' 'libs/*.[ch]' | xargs -0 --no-run-if-empty clang-format --dry-run --Werror

# repair what the linter can repair
[group('check')]
lint-fix:
    ruff check --fix .

# rules of pyproject.toml, all of ruff but the listed exceptions
[group('gate')]
lint:
    ruff check --output-format concise .

# bugs and races in the C sources of the node, by native/.clang-tidy
[group('gate')]
tidy:
    git ls-files -z 'native/*/src/*.c' | xargs -0 -n 8 -P "$(nproc)" --no-run-if-empty sh -c 'clang-tidy --quiet "$@" -- -std=c11 -D_GNU_SOURCE' clang-tidy

# types, strict, tests included
[group('gate')]
types:
    mypy

# who may import whom
[group('gate')]
imports:
    lint-imports --no-logo --cache-dir .cache/import-linter

# regenerate the generated files
[group('check')]
gen:
    python -m tools.gen

# are the generated files what their sources say?
[group('gate')]
gen-check:
    python -m tools.gen --check

# format, lint, types and unit tests of the console
[group('gate')]
console-check:
    python -m tools.build_console check
    python -m tools.build_console test

# do the pinned requirements match *.in and the members?
[group('gate')]
pins-check:
    python -m tools.pins check

# correct spelling mistakes
[group('check')]
spell-fix:
    git ls-files -z | xargs -0 codespell --write-changes

# spelling
[group('gate')]
spell:
    git ls-files -z | xargs -0 codespell

# house words, free relatives, long paragraphs, by tools/house_words.toml
[group('gate')]
prose:
    python -m tools.check_prose

# subjects of commits: component, imperative, length
[group('gate')]
commits:
    python -m tools.check_commits

# no hosts, machine paths, oversized files or unfinished code in tracked files
[group('gate')]
repo-check:
    python -m tools.check_repo

# all gates and tiers; or only some: test [TIER… | pytest arguments…]
[group('test')]
[no-exit-message]
test *args:
    @python -m tools.run_tests "$@"

# one pod's life on embedded parts: --once, --json FILE
[group('test')]
[no-exit-message]
demo *args:
    @python -m hami_sim.demo "$@"

# build native: the limiter, its path is the last line [--variant release|debug|asan|ubsan|tsan]
[group('build')]
[no-exit-message]
build name *args:
    @shift; python -m "tools.build_{{ name }}" "$@"

# the console in the browser: build [--out DIR] | check | fmt | test | lock
[group('build')]
[no-exit-message]
console *args:
    @python -m tools.build_console "$@"

# build all images as OCI archives: --out DIR [--bundle] [--base NAME@DIGEST] [--platform linux/arm64] [--only NAME…]
[group('build')]
[no-exit-message]
images *args:
    @python -m tools.images "$@"

# pin the images of deploy/kustomize/overlays/prod by digest: IMAGE=NAME:TAG[@DIGEST|,ARCHIVE] …
[group('build')]
[no-exit-message]
pin-images *args:
    @python -m tools.pin_images "$@"

# bills of materials (CycloneDX) from the pinned requirements: --out DIR
[group('build')]
[no-exit-message]
sbom *args:
    @python -m tools.sbom "$@"

# measure: bench scheduler, bench throughput [--scheduler volcano] [--nodes 1000 --pods 2000], bench burst [--mode device-plugin,dra], bench churn, bench webhook, bench volcano, bench limiter, bench agent [--against CHECKOUT], bench console, bench pastevents [--events 100000]; all with [--json -]
[group('test')]
[no-exit-message]
bench name *args:
    @shift; python -m "tests.bench.{{ name }}" "$@"

# validate limiter and agent on this machine's GPU: [--fake [--fault]] [--json FILE] [--list] [ID…]
[group('test')]
[no-exit-message]
gpu *args:
    @python3 tests/gpu/run.py "$@"

# a real control plane, or a cluster of one node: up [--node] | install | down | status | build
[group('test')]
[no-exit-message]
cluster *args:
    @python -m tests.cluster "$@"

# attack the services with random input: fuzz [TARGET…] [--fresh] [--seed TEXT] [--count N] [--json FILE] [--replay FILE]
[group('test')]
[no-exit-message]
fuzz *args:
    @python -m tests.attack.fuzz "$@"
