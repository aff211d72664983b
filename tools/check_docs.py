# SPDX-License-Identifier: Apache-2.0
"""Checks commands, snippets, links and headings of the pages.

``python -m tools.check_docs`` prints the problems, then the number of commands per test that runs
them; ``--list`` names each. Every command matches an entry of ``FATES``: a test that runs it
unchanged, or the reason why no test does, and then the program's own parser still reads its
arguments. Manifests pass the webhook's core, TOML the schema of the file that it is about. History
pages (``HISTORY``) are checked for links only. Commands that need a cluster are collected and run
by the tests that have one, see ``tests/support/docs.py``.
"""

import argparse
import contextlib
import io
import json
import re
import subprocess
import sys
import tempfile
import textwrap
import tomllib
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any
from unittest import mock

import click
import msgspec
import yaml

from hami_common.errors import SettingsInvalid
from hami_common.pods.podview import PodView
from hami_common.runtime import settings
from hami_common.skus import catalog as skus
from hami_common.vendors.catalog import Catalog, VendorSettings
from hami_common.vendors.nvidia import NvidiaSettings
from hami_core.quota import queues
from hami_core.replay import policies
from hami_registry.core import device_config
from hami_sim.apiserver import dra
from hami_sim.apiserver.errors import Cause, Obj
from hami_webhook.core.mutate import AdmissionPolicy, Circumstances, mutate
from hamictl.cli import main as hamictl_main
from tools.docs_text import Command, Page, Snippet, read
from tools.gen_settings import SERVICES

ROOT = Path(__file__).resolve().parent.parent
HISTORY = ("docs/adr/", "docs/design.md", "CHANGELOG.md")
INVENTED = ("docs/adding-a-vendor.md",)
"""Pages with snippets about a fictitious vendor, which a contract test builds."""
TRACE = f"00-{'1' * 32}-{'2' * 16}-01"
PROFILES = ("1g.10gb", "1g.10gb+me", "3g.40gb")
"""Profiles that docs/mig.md lists, each a resource of its own there."""
MODULE_BY_RECIPE = {
    "demo": "hami_sim.demo",
    "cluster": "tests.cluster.__main__",
    "bench": "tests.bench.{}",
    "console": "tools.build_console",
    "fuzz": "tests.attack.fuzz.__main__",
    "images": "tools.images.__main__",
    "build": "tools.build_{}",
    "pin-images": "tools.pin_images",
    "sbom": "tools.sbom",
    "gpu": "tests.gpu.runner",
}
BARE_WORDS = 3
"""``kubectl describe pod`` names a command, ``kubectl describe pod web`` is one."""
NAMED = (["import-config"], ["defrag"], ["resize"])
"""Commands of hamictl without their arguments, whose parser accepts an empty list."""
STAND_INS = {"SHELL": "bash", "SEQUENCE": "1"}
"""Stand-ins for words in capitals that a parser would reject."""
REQUIRED = {
    "hami_nodeagent": ["--set", "node_name=n"],
    "hami_scheduler": ["--set", "signing_key_file=k"],
}


@dataclass(frozen=True, kw_only=True)
class Fate:
    """Test, or reason without one, for the commands that ``pattern`` matches."""

    pattern: str
    run_by: tuple[str, str] = ("", "")
    """A file of tests, and a regular expression for the code in it that runs them."""
    why_not: str = ""

    def matches(self, command: Command) -> bool:
        """Return True when the whole command matches."""
        return re.fullmatch(self.pattern, " ".join(command.words)) is not None


HAMICTL_TESTS = ("tests/e2e/test_hamictl.py", "test_commands_of_the_docs_do_what_they_say")
KUBECTL_TESTS = ("tests/e2e/test_docs_kubectl.py", "test_command_of_the_docs_is_taken")
OFFLINE_TESTS = ("tests/integration/tools/test_docs_commands.py", "def test_")
FATES = (
    Fate(
        pattern=r"\./dev",
        run_by=("tests/integration/tools/test_dev.py", "test_dev_lists_the_recipes"),
    ),
    Fate(
        pattern=r"\./dev setup",
        run_by=("tests/integration/tools/test_dev.py", "test_failed_setup_leaves_no_stamp"),
    ),
    Fate(
        pattern=r"\./dev demo( --once.*)?",
        run_by=("tests/e2e/test_demo.py", r'"hami_sim\.demo", "--once", "--json"'),
    ),
    Fate(
        pattern=r"\./dev demo( --scenario \S+)+",
        run_by=("tests/e2e/test_scenarios.py", "test_scenario_in_a_cluster_keeps_its_bounds"),
    ),
    Fate(
        pattern=r"\./dev demo .*--profile mixed.*",
        run_by=("tests/e2e/test_demo_mixed.py", r"--profile.*mixed"),
    ),
    Fate(
        pattern=r"\./dev cluster (status|down)",
        run_by=(
            "tests/integration/tools/test_docs_commands.py",
            "test_cluster_that_does_not_run_is_reported",
        ),
    ),
    Fate(
        pattern=r"\./install\.sh .*",
        run_by=("tests/unit/deploy/test_offline_install.py", '"--import-only"'),
    ),
    Fate(
        pattern=r"\./dev cluster (up( --node)?|install|build)",
        why_not="holds a control plane that outlives the test; the real tier builds and runs one",
    ),
    Fate(
        pattern=r"\./dev (test|check|gen|pins|fmt|build|console)( .*)?",
        why_not="runs the tests, or writes the tree; continuous integration runs ./dev test",
    ),
    Fate(
        pattern=r"\./dev images.*",
        run_by=("tests/install/test_images.py", r"tool\.build"),
    ),
    Fate(
        pattern=r"\./dev pin-images.*",
        run_by=("tests/unit/tools/test_pin_images.py", "pin_images.main"),
    ),
    Fate(
        pattern=r"\./dev sbom .*",
        run_by=("tests/unit/tools/test_sbom.py", "sbom.main"),
    ),
    Fate(
        pattern=r"\./dev fuzz.*",
        run_by=("tests/attack/test_fuzz.py", "attack\\(target, SEED, target.few"),
    ),
    Fate(
        pattern=r"\./dev gpu --fake( --fault)?",
        run_by=("tests/native/test_gpu_suite.py", r"run_check\(bench, check, is_faulty=True"),
    ),
    Fate(
        pattern=r"(\./dev gpu|python3 tests/gpu/run\.py).*",
        why_not="needs a GPU; tests/native/test_gpu_suite.py runs the checks on the fake driver",
    ),
    Fate(pattern=r"\./dev bench .*", why_not="measures for minutes and wants a quiet machine"),
    Fate(
        pattern=r"(python -m tests\.bench\.|git worktree add ).*",
        why_not="reads what a bench wrote, or measures with two checkouts",
    ),
    Fate(
        pattern=r"(\.venv/bin/pytest|pytest|python -m pytest) .*",
        why_not="is a part of ./dev test",
    ),
    Fate(
        pattern=r"(hamictl|kubectl hami) bootstrap.*",
        run_by=("tests/integration/hamictl/test_bootstrap.py", "bootstrap"),
    ),
    Fate(
        pattern=r"hamictl replay .*",
        run_by=("tests/unit/hamictl/test_replay.py", "def test_"),
    ),
    Fate(
        pattern=r"hamictl import-config .*",
        run_by=OFFLINE_TESTS,
    ),
    Fate(
        pattern=r"hamictl verify.*",
        run_by=("tests/integration/hamictl/test_verify.py", '"hamictl", "verify"'),
    ),
    Fate(
        pattern=r"hamictl uninstall.*",
        run_by=("tests/integration/hamictl/test_uninstall.py", r"\.uninstaller\(\)\.run\(\)"),
    ),
    Fate(
        pattern=r"hamictl rotate-key.*",
        run_by=("tests/integration/hamictl/test_rotate_key.py", r"\.rotation\(\)\.run\(\)"),
    ),
    Fate(
        pattern=r"hamictl events .*--follow.*", why_not="goes on for ever; it runs without --follow"
    ),
    Fate(
        pattern=r"hamictl usage .*-o opencost",
        run_by=("tests/unit/hamictl/test_usage.py", "opencost"),
    ),
    Fate(pattern=r"(hamictl|kubectl hami) .*", run_by=HAMICTL_TESTS),
    Fate(
        pattern=r"kubectl port-forward.*",
        why_not="needs a kubelet that runs containers of the cluster",
    ),
    Fate(pattern=r"kubectl .*", run_by=KUBECTL_TESTS),
    Fate(
        pattern=r"python -m tools\.check_docs.*",
        run_by=("tests/integration/tools/test_check_docs.py", r"check_docs\.problems"),
    ),
    Fate(pattern=r"python -m hami_\w+ .*", run_by=OFFLINE_TESTS),
    Fate(
        pattern=r"\w+=.* (python )?examples/integrations/(to_sqlite\.py|tail\.sh)",
        run_by=("tests/integration/examples/test_integrations.py", r"to_sqlite\.py(.|\n)*tail\.sh"),
    ),
    Fate(pattern=r"nats .*", why_not="needs the program nats, which no test of ours has"),
)
"""The first match counts."""


def pages() -> list[Page]:
    """Every Markdown page that is tracked or untracked and not ignored by git."""
    listing = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard", "*.md"],
        cwd=ROOT,
        capture_output=True,
        check=True,
    )
    names = sorted(name for name in listing.stdout.decode().split("\0") if name)
    return [read(ROOT, name) for name in names if (ROOT / name).is_file()]


def is_history(page: str) -> bool:
    """Return True for a page of history, whose commands need not work."""
    return page.startswith(HISTORY)


def commands(found: list[Page] | None = None) -> list[Command]:
    """Return every command of the pages, except pages of history."""
    looked = pages() if found is None else found
    return [one for page in looked if not is_history(page.name) for one in page.commands]


def fate_of(command: Command) -> Fate | None:
    """Return the entry for the command; a mark on the page gives the reason for not running it."""
    if command.mark:
        return Fate(pattern="", why_not=command.mark)
    if command.inline and is_form(command):
        return Fate(pattern="", why_not="shows a form or names a command; its words are read")
    return next((fate for fate in FATES if fate.matches(command)), None)


def is_form(command: Command) -> bool:
    """Return True when a command within a sentence only shows a form, or names a command."""
    words = command.words
    if re.search("[…<]", command.text) or any(
        re.fullmatch(r"[A-Z]{3,}[.]*", word) for word in words
    ):
        return True
    if command.program == "hamictl":
        return words[1:] in NAMED or "Missing" in hamictl_problem(words[1:])
    is_bare = len(words) <= BARE_WORDS and not any(word.startswith("-") for word in words)
    return command.program == "kubectl" and is_bare


def to_run(test: tuple[str, str]) -> list[Command]:
    """Return the commands that ``test`` has to run."""
    return [one for one in commands() if (fate := fate_of(one)) and fate.run_by == test]


def problems(found: list[Page]) -> Iterator[str]:
    """Return all problems."""
    yield from link_problems(found)
    for page in found:
        if is_history(page.name):
            continue
        for command in page.commands:
            problem = command_problem(command)
            if problem:
                yield f"{command}: {problem}"
        for snippet in page.snippets:
            is_checked = not snippet.mark and page.name not in INVENTED
            problem = snippet_problem(snippet) if is_checked else ""
            if problem:
                yield f"{snippet}: {problem}"
    for fate in FATES:
        file, needle = fate.run_by
        if file and not re.search(needle, (ROOT / file).read_text(encoding="utf-8")):
            yield f"{file} does not run {fate.pattern}: there is no {needle}"


# --- links ---------------------------------------------------------------------------------------


def link_problems(found: list[Page]) -> Iterator[str]:
    """Return links to missing files, or to missing headings of a page."""
    anchors = {page.name: page.anchors for page in found}
    for page in found:
        for link in page.links:
            path, _, anchor = link.target.partition("#")
            target = page.name if not path else _joined(page.name, path)
            if target not in anchors and not (ROOT / target).exists():
                yield f"{link}: there is no {target}"
            elif anchor and anchor not in anchors.get(target, ()):
                yield f"{link}: {target} has no heading #{anchor}"


def _joined(page: str, path: str) -> str:
    parts: list[str] = []
    for part in (PurePosixPath(page).parent / path).parts:
        if part == "..":
            parts = parts[:-1]
        else:
            parts.append(part)
    return "/".join(parts)


# --- commands ------------------------------------------------------------------------------------


def command_problem(command: Command) -> str:
    """Return the reason why the command would be rejected; empty when it is valid."""
    try:
        words = [STAND_INS.get(word, word) for word in command.words]
    except ValueError as error:
        return f"is not what a shell reads: {error}"
    if command.inline and "…" in command.text:
        return ""
    problem = arguments_problem(command, words)
    if problem or fate_of(command) is not None:
        return problem
    return "nobody runs it: give it a fate in tools/check_docs.py, or mark the block"


def arguments_problem(command: Command, words: list[str]) -> str:
    """Return the error of the program's own parser, where it can parse without acting."""
    if command.program == "hamictl":
        problem = hamictl_problem(words[2:] if words[0] == "kubectl" else words[1:])
        return "" if command.inline and problem.startswith("Missing") else problem
    if words[0] == "./dev":
        return dev_problem(words[1:])
    if words[:3] == ["python", "-m", "pytest"]:
        return pytest_problem([word for word in words[3:] if word not in ("sim", "real")])
    if words[:2] == ["python", "-m"]:
        return module_problem(words[2], words[3:])
    if words[0].endswith("pytest"):
        return pytest_problem(words[1:])
    return ""


def hamictl_problem(words: list[str]) -> str:
    """Return the error of hamictl's own parser, without running the command."""
    with contextlib.ExitStack() as stack, contextlib.redirect_stdout(io.StringIO()):
        for leaf in _leaves(hamictl_main):
            stack.enter_context(mock.patch.object(leaf, "callback", _nothing))
        try:
            hamictl_main.main(args=words, prog_name="hamictl", standalone_mode=False)
        except click.exceptions.NoArgsIsHelpError:
            return "Missing command."
        except click.ClickException as error:
            return error.format_message()
        except click.exceptions.Exit:
            return ""
    return ""


def _nothing(**given: object) -> None:
    del given


def _leaves(command: click.Command) -> Iterator[click.Command]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None:
                yield from _leaves(inner)
    else:
        yield command


def recipes() -> frozenset[str]:
    """Names in the justfile."""
    text = (ROOT / "justfile").read_text(encoding="utf-8")
    return frozenset(re.findall(r"(?m)^([a-z][a-z-]*)(?: [^:=\n]*)?:(?!=)", text))


def dev_problem(words: list[str]) -> str:
    """Return an error when the recipe does not exist, or its program rejects the arguments."""
    if not words:
        return ""
    recipe, *rest = words
    if recipe not in recipes():
        return f"there is no recipe {recipe}"
    if recipe == "test":
        return test_problem(rest)
    if recipe == "pins":
        return module_problem("tools.pins", ["write", *rest])
    module = MODULE_BY_RECIPE.get(recipe)
    if module is None:
        return f"{recipe} takes no arguments" if rest else ""
    if "{}" in module:
        if not rest:
            return f"{recipe} of what?"
        module, rest = module.format(rest[0]), rest[1:]
    return module_problem(module, rest)


def test_problem(words: list[str]) -> str:
    """Arguments of ``./dev test``: tiers, a plane, or what goes to pytest."""
    run_tests = import_module("tools.run_tests")
    rest = [word for word in words if word not in run_tests.TIERS]
    for option, values in (
        ("--plane", ("sim", "real")),
        ("--kubernetes", run_tests.NAMES),
        ("--scheduler", run_tests.SCHEDULERS),
    ):
        at = rest.index(option) if option in rest[:-1] else len(rest)
        if rest[at + 1 : at + 2] and rest[at + 1] in values:
            rest = rest[:at] + rest[at + 2 :]
    return pytest_problem(rest)


def pytest_problem(words: list[str]) -> str:
    """Return an error for missing files of a pytest command; allows ``x`` and ``name``."""
    for word in words:
        path = word.partition("::")[0]
        if path.startswith("tests/") and path != "tests/unit/x.py" and not (ROOT / path).exists():
            return f"there is no {path}"
        if word.startswith("-") and word not in ("-q", "-k", "-x", "--plane", "--screenshots"):
            return f"{word} is not an option that our pages use"
    return ""


class _Taken(BaseException):
    """The arguments were parsed; stops the program before it acts."""


def module_problem(module: str, words: list[str]) -> str:
    """Return the error of the parser of ``python -m module`` for ``words``, without acting."""
    if find_spec(module) is None:
        return f"there is no module {module}"
    if module.startswith("hami_") and module.split(".", maxsplit=1)[0] != "hami_sim":
        return ""  # ``OFFLINE_TESTS`` run services unchanged
    told = io.StringIO()
    read_arguments = argparse.ArgumentParser.parse_args

    def parse(self: argparse.ArgumentParser, args: Sequence[str] | None = None) -> None:
        read_arguments(self, args)
        raise _Taken

    entry = import_module(module).main
    with (
        mock.patch.object(argparse.ArgumentParser, "parse_args", parse),
        mock.patch.object(sys, "argv", [module, *words]),
        contextlib.redirect_stderr(told),
    ):
        try:
            entry(*([words] if entry.__code__.co_argcount else []))
        except _Taken:
            return ""
        except SystemExit:
            return told.getvalue().strip().splitlines()[-1]
    return f"{module} reads no arguments"


# --- snippets ------------------------------------------------------------------------------------


def snippet_problem(snippet: Snippet) -> str:
    """Return the problem of a block that is not a command."""
    check = CHECKS.get(snippet.language)
    return f"nobody checks {snippet.language}" if check is None else check(snippet.text)


def json_problem(text: str) -> str:
    """Return an error when the block is not JSON."""
    try:
        json.loads(text)
    except ValueError as error:
        return str(error)
    return ""


def python_problem(text: str) -> str:
    """Return an error when the block is not Python."""
    try:
        compile(textwrap.dedent(text), "snippet", "exec")
    except SyntaxError as error:
        return str(error)
    return ""


def toml_problem(text: str) -> str:
    """Validate TOML as its file: devices, queues, or a service's settings."""
    try:
        tree = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return str(error)
    try:
        if tree.keys() <= set(device_config.DeviceConfig.__struct_fields__):
            device_config.parse(text.encode(), name="devices.toml")
            return ""
        if tree.keys() == {"queue"}:
            queues.parse(tree, vendors=[vendor.name for vendor in CATALOG.vendors])
            return ""
        if "sku" in tree:
            skus.parse(text, vendors=CATALOG)
            return ""
        if "policies" in tree:
            policies.parse(tree)
            return ""
    except SettingsInvalid as error:
        return str(error)
    refused = [settings_problem(text, module) for _, module, _ in SERVICES]
    # The service that has the outermost key is the intended one.
    meant = [text for text in refused if not re.match(r"setting \w+: is not a known key", text)]
    return "" if "" in refused else min(meant or refused, key=len)


def settings_problem(text: str, module: str) -> str:
    """Return the error of one service's settings for the file."""
    struct = next(struct for _, name, struct in SERVICES if name == module)
    with tempfile.NamedTemporaryFile("w", suffix=".toml", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        argv = ["--config", file.name, *REQUIRED.get(module, [])]
        try:
            settings.load(struct, service="checked", argv=argv, environ={})
        except SettingsInvalid as error:
            return str(error)
    return ""


def yaml_problem(text: str) -> str:
    """Return an error when admission rejects the pods, or a key of a quota is not ours."""
    try:
        documents = [one for one in yaml.safe_load_all(text) if one is not None]
    except yaml.YAMLError as error:
        return str(error)
    return next(filter(None, (_document_problem(one) for one in documents)), "")


CATALOG = Catalog.from_settings(
    VendorSettings(nvidia=NvidiaSettings(mig_profiles=PROFILES, dialects=("volcano",)))
)
PUBLIC_SKUS = ROOT / "deploy/kustomize/components/public-cloud/skus.toml"
SKUS = skus.parse(
    PUBLIC_SKUS.read_text(encoding="utf-8").replace("required = true", "required = false"),
    vendors=CATALOG,
)
"""The shipped catalog, for pods that name resources of vendors, too."""
OTHER_KINDS = frozenset(
    {
        "AdmissionCheck",
        "ClusterRole",
        "Component",
        "ConfigMap",
        "Kustomization",
        "Namespace",
        "PriorityClass",
        "ProvisioningRequestConfig",
    }
)
CLAIM_KINDS: dict[str, tuple[Callable[[Obj], None], Callable[[Obj], list[Cause]]]] = {
    "ResourceClaim": (dra.default_claim, dra.check_claim),
    "ResourceClaimTemplate": (dra.default_template, dra.check_template),
}
"""Defaults and rules of the API server for these kinds."""
FRAGMENTS = frozenset(
    {"images", "components", "patches", "scrape_configs", "actions", "tiers"},
)
"""Keys of kustomizations, and of the configurations of Prometheus and Volcano's scheduler."""


def _document_problem(document: dict[str, Any]) -> str:
    kind = document.get("kind", "")
    if kind == "ResourceQuota":
        return _quota_problem(document)
    if kind in CLAIM_KINDS:
        default, check = CLAIM_KINDS[kind]
        default(document)
        return "; ".join(map(str, check(document)))
    uses_claims = kind == "Pod" and "resourceClaims" in document.get("spec", {})
    if kind in OTHER_KINDS or uses_claims or document.keys() <= FRAGMENTS:
        return ""
    pod = _pod_of(document)
    return _pod_problem(pod) if pod else "is nothing that admission could be asked about"


def _pod_of(document: dict[str, Any]) -> dict[str, Any]:
    """Complete a partial pod of a page to a whole pod."""
    if "template" in document.get("spec", {}):
        return _pod_of(document["spec"]["template"])
    if "limits" in document:
        document = {"resources": document}
    if "resources" in document:
        document = {"spec": {"containers": [document]}}
    containers = document.get("spec", {}).get("containers")
    if not containers:
        containers = [{"resources": one} for one in _resources_in(document.get("spec", {}))]
        document = {"spec": {}}
    if not containers:
        return {}
    filled = [{"name": f"c{i}", "image": "app", **one} for i, one in enumerate(containers)]
    metadata = {"name": "shown", **document.get("metadata", {})}
    spec = {**document["spec"], "containers": filled}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def _resources_in(found: object) -> Iterator[dict[str, Any]]:
    """Yield the resources of containers inside an operator's object, whatever its schema."""
    if isinstance(found, list):
        for one in found:
            yield from _resources_in(one)
    elif isinstance(found, dict):
        for key, value in found.items():
            if key in {"resources", "resourcesPerNode"}:
                yield value
            else:
                yield from _resources_in(value)


def _pod_problem(pod: dict[str, Any]) -> str:
    verdict = mutate(
        pod,
        msgspec.convert(pod, PodView),
        catalog=CATALOG,
        policy=AdmissionPolicy(dra_enabled=True),
        at=Circumstances(traceparent=TRACE, claim="claim"),
        skus=SKUS,
    )
    if not verdict.allowed:
        return verdict.message
    return "" if verdict.concerns_us else "asks for no device of ours"


def _quota_problem(document: dict[str, Any]) -> str:
    names = CATALOG.resource_names()
    for key in document["spec"]["hard"]:
        resource = key.removeprefix("limits.").removeprefix("requests.")
        if "/" in resource and resource not in names:
            return f"{key} is about no resource of ours"
    return ""


def _taken_elsewhere(text: str) -> str:
    """Accept recipes: tests/integration/monitoring/test_expressions.py runs them."""
    return "" if text.strip() else "is empty"


_NODE = r"\w+(?:[\[({]+[^\[\](){}]*[\])}]+)?"
_MERMAID = {
    "sequenceDiagram": (
        r"autonumber|end|(?:participant|actor) \w+(?: as .+)?"
        r"|(?:alt|else|opt|loop|par|and|rect)\b.*|(?:activate|deactivate) \w+"
        r"|Note (?:over|left of|right of) \w+(?:, ?\w+)?: .+"
        r"|\w+ ?(?:-|--)(?:>>|>|x|\))[+-]? ?\w+: .+"
    ),
    "flowchart": (
        r"end|subgraph .+|direction (?:TB|TD|LR|RL|BT)|(?:classDef|class|style|linkStyle) .+"
        rf"|{_NODE}(?: (?:&|-->|---|-.->|==>)(?:\|[^|]+\|)? {_NODE})*"
    ),
    "stateDiagram-v2": (
        r"direction (?:TB|LR)|state .+|}|\w+: .+"
        r"|(?:\w+|\[\*\]) --> (?:\w+|\[\*\])(?:: .+)?"
    ),
}
"""Kinds of figure that pages may have, with the lines that each kind may have."""


def mermaid_problem(text: str) -> str:
    """Return an error for an invalid line of a figure, or an undeclared participant."""
    head, *lines = [line.strip() for line in text.strip().splitlines() if line.strip()]
    kind = head.split()[0]
    if kind not in _MERMAID:
        return f"{kind}: not a kind of figure; write one of {', '.join(_MERMAID)}"
    for line in lines:
        if not line.startswith("%%") and not re.fullmatch(_MERMAID[kind], line):
            return f"{kind} has no line like {line!r}"
    if kind == "sequenceDiagram":
        declared = set(re.findall(r"^\s*(?:participant|actor) (\w+)", text, re.MULTILINE))
        sent = re.findall(r"^\s*(\w+) ?--?(?:>>|>|x|\))[+-]? ?(\w+):", text, re.MULTILINE)
        unknown = sorted({name for pair in sent for name in pair} - declared)
        if unknown:
            return f"participants without declaration: {', '.join(unknown)}"
    return ""


CHECKS: dict[str, Callable[[str], str]] = {
    "json": json_problem,
    "mermaid": mermaid_problem,
    "promql": _taken_elsewhere,
    "python": python_problem,
    "toml": toml_problem,
    "yaml": yaml_problem,
}


def main() -> int:
    """Print the problems, and the commands per test; return the exit code."""
    parser = argparse.ArgumentParser(description="Check the pages.")
    parser.add_argument("--list", action="store_true", help="name every command with its fate")
    options = parser.parse_args()
    found = pages()
    wrong = list(problems(found))
    for problem in wrong:
        print(problem, file=sys.stderr)
    every = commands(found)
    counted: Counter[str] = Counter()
    for command in every:
        fate = fate_of(command)
        word = "nobody" if fate is None else fate.run_by[0] or f"not run: {fate.why_not}"
        counted[word] += 1
        if options.list:
            print(f"{command}\n    {word}")
    print(f"{len(every)} commands in {len({one.page for one in every})} pages")
    for word, count in sorted(counted.items(), key=lambda one: (one[0].startswith("not"), one[0])):
        print(f"{count:5}  {word}")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
