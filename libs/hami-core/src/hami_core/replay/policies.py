# SPDX-License-Identifier: Apache-2.0
"""Parses the policies file: named placement policies, a canary, and tests (ADR 48).

One file serves the scheduler and the pipeline; each ignores the parts of the other. A policy has
the fields of the scheduler's setting ``policy``; those that are absent have that setting's
defaults. The canary gives one policy to some namespaces, all others are its control group. A test
gives bounds of the figures that ``compare`` computes. Times in seconds.
"""

import difflib
import re
from collections.abc import Mapping
from hashlib import blake2b
from pathlib import PurePath
from typing import Annotated, Any, Final, Literal, NoReturn, get_args

import msgspec
from msgspec import Meta, Struct

from hami_common import documents
from hami_common.errors import SettingsInvalid
from hami_common.model.prices import Prices
from hami_common.model.request import DevicePolicy, NodePolicy, PlacementPolicy, ScoringWeights

FILE: Final = "policies file"
YAML_SUFFIXES: Final = (".yaml", ".yml")
POLICIES_MOST: Final = 64
TESTS_MOST: Final = 1000
_NAME: Final = re.compile(r"[a-z0-9]([-a-z0-9.]{0,61}[a-z0-9])?")

Measure = Literal[
    "placed",
    "waited",
    "never_placed",
    "wait_p95_s",
    "wait_most_s",
    "wait_total_s",
    "packing_pct",
    "stranded_pct",
    "devices_used_peak",
    "device_hours",
    "cost",
]
CanaryMeasure = Literal["refused_pct", "refusals_per_min", "wait_p95_s", "packing_pct"]
OF_PODS: Final = frozenset(get_args(Measure)[:6])
"""Measures of pods, which may be limited to a namespace."""


class _Weights(ScoringWeights, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Weights without further fields."""


class NamedPolicy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy of the file, with the fields of the scheduler's setting ``policy``."""

    node: NodePolicy = PlacementPolicy().node
    device: Annotated[tuple[DevicePolicy, ...], Meta(min_length=1, max_length=5)] = (
        PlacementPolicy().device
    )
    weights: _Weights = _Weights()

    def policy(self) -> PlacementPolicy:
        """Return it as placement uses it."""
        weights = self.weights
        return PlacementPolicy(
            node=self.node,
            device=self.device,
            weights=ScoringWeights(slot=weights.slot, core=weights.core, memory=weights.memory),
        )


class Expectation(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one figure."""

    measure: Measure
    namespace: str = ""
    """Only pods of this namespace; empty: all."""
    least: float | None = None
    most: float | None = None
    least_pct_of_recorded: float | None = None
    """Percent of the same figure of the record."""
    most_pct_of_recorded: float | None = None

    @property
    def is_relative(self) -> bool:
        """True when it needs the record."""
        return self.least_pct_of_recorded is not None or self.most_pct_of_recorded is not None


class PolicyTest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One policy on one trace, with what is expected."""

    name: str
    policy: str = ""
    """Name of the policy; may be absent if the file has one."""
    trace: Annotated[tuple[str, ...], Meta(min_length=1)]
    """Paths, relative to the file: a stimulus log; events with a snapshot; or a snapshot."""
    pods: tuple[str, ...] = ()
    """Manifests to place on a snapshot; absent: its waiting pods."""
    expect: tuple[Expectation, ...] = ()
    golden: str = ""
    """Path of a file with the expected placements; empty: none."""


class Objective(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of one figure of the canary's pods; beyond one, the canary is rolled back."""

    measure: CanaryMeasure
    least: float | None = None
    most: float | None = None
    least_pct_of_control: float | None = None
    """Percent of the same figure of the control group."""
    most_pct_of_control: float | None = None


class Canary(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A policy for some namespaces, until an objective is missed."""

    policy: str
    namespaces: tuple[str, ...] = ()
    """The namespaces; or ``percent``."""
    percent: Annotated[int, Meta(ge=0, le=100)] = 0
    """Percent of all namespaces, by a hash of their names. A larger number adds namespaces."""
    revision: int = 1
    """Another number starts a canary again that was rolled back."""
    window_s: Annotated[float, Meta(ge=60, le=86_400)] = 3600.0
    """Time over which objectives are evaluated."""
    pods_least: Annotated[int, Meta(ge=1, le=100_000)] = 20
    """Pods of the canary, and of the control group, below which nothing is evaluated."""
    objectives: Annotated[tuple[Objective, ...], Meta(min_length=1)]

    def covers(self, namespace: str) -> bool:
        """Return whether the namespace belongs to the canary."""
        if self.namespaces:
            return namespace in self.namespaces
        digest = blake2b(f"{self.policy}/{namespace}".encode(), digest_size=8).digest()
        return int.from_bytes(digest) % 100 < self.percent


class PoliciesFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The file."""

    policies: dict[str, NamedPolicy]
    default: str = ""
    """Policy of namespaces outside the canary; empty: the scheduler's setting ``policy``."""
    canary: Canary | None = None
    prices: Prices = Prices()
    """As in the registry's settings, for the measure ``cost``."""
    tests: Annotated[tuple[PolicyTest, ...], Meta(max_length=TESTS_MOST)] = ()

    def policy_of(self, test: PolicyTest) -> PlacementPolicy:
        """Return the policy of a test."""
        return self.policies[test.policy or next(iter(self.policies))].policy()

    def digest(self) -> str:
        """Return what identifies the canary: a hash of its definition and its policy."""
        if self.canary is None:
            return ""
        content = msgspec.json.encode(
            (self.canary, self.policies[self.canary.policy]), order="deterministic"
        )
        return blake2b(content, digest_size=8).hexdigest()

    def name_for(self, namespace: str, *, is_rolled_back: bool) -> str:
        """Return the name of the policy of pods that name none; empty: of the setting."""
        if self.canary is not None and not is_rolled_back and self.canary.covers(namespace):
            return self.canary.policy
        return self.default


def decode(content: bytes, *, path: PurePath, field: str) -> PoliciesFile:
    """Return the file at ``path``, which is YAML by its suffix, else TOML.

    ``SettingsInvalid`` names ``field`` where it is neither, else as ``parse``.
    """
    if path.suffix in YAML_SUFFIXES:
        return parse(documents.yaml_one(content, field=field))
    return parse(documents.toml(content, field=field))


def parse(document: object) -> PoliciesFile:
    """Return the decoded file; ``SettingsInvalid`` names the field and the fix."""
    if not isinstance(document, Mapping):
        _wrong(FILE, "is no table", "write [policies.NAME] and the fields of the policy")
    _check_words(document)
    try:
        file = msgspec.convert(document, PoliciesFile, strict=True)
    except msgspec.ValidationError as error:
        problem, _, where = str(error).partition(" - at ")
        _wrong(where.strip("`").removeprefix("$.") or FILE, problem, "see docs/policies.md")
    if not 0 < len(file.policies) <= POLICIES_MOST:
        _wrong("policies", f"has {len(file.policies)} policies", f"name 1 to {POLICIES_MOST}")
    for name, policy in file.policies.items():
        _check_policy(name, policy)
    if file.default and file.default not in file.policies:
        fix = _near(file.default, list(file.policies))
        _wrong("default", f"{file.default!r} is not in the file", fix)
    if file.canary is not None:
        _check_canary(file.canary, file)
    file.prices.check()
    seen: set[str] = set()
    for number, test in enumerate(file.tests):
        where = f"tests[{number}]"
        if not test.name or test.name in seen:
            _wrong(f"{where}.name", f"{test.name!r} is empty or there twice", "name each test")
        seen.add(test.name)
        _check_test(where, test, file)
    return file


def _check_policy(name: str, policy: NamedPolicy) -> None:
    if _NAME.fullmatch(name) is None:
        _wrong(
            f"policies.{name}",
            "is not a name that a label can have",
            "use at most 63 lower case letters, digits, '-' and '.'",
        )
    weights = policy.weights
    if not (weights.slot or weights.core or weights.memory):
        _wrong(f"policies.{name}.weights", "are all 0", "give one of them a weight above 0")
    repeated = [word for word in policy.device if policy.device.count(word) > 1]
    if repeated:
        _wrong(f"policies.{name}.device", f"names {repeated[0]} twice", "name each word once")


def _check_canary(canary: Canary, file: PoliciesFile) -> None:
    if canary.policy not in file.policies:
        fix = _near(canary.policy, list(file.policies))
        _wrong("canary.policy", f"{canary.policy!r} is not in the file", fix)
    if canary.policy == file.default:
        _wrong("canary.policy", "is the default policy as well", "name another policy")
    if bool(canary.namespaces) == bool(canary.percent):
        _wrong("canary", "needs namespaces or percent, not both", "give one of them")
    if canary.percent == 100:  # noqa: PLR2004 - percent
        _wrong("canary.percent", "leaves no control group", "give 1 to 99, or make it the default")
    for number, one in enumerate(canary.objectives):
        bounds = (one.least, one.most, one.least_pct_of_control, one.most_pct_of_control)
        if all(bound is None for bound in bounds):
            _wrong(
                f"canary.objectives[{number}]",
                "has no bound",
                "give least, most, or one in percent of the control group",
            )


def _check_test(where: str, test: PolicyTest, file: PoliciesFile) -> None:
    if not test.policy and len(file.policies) > 1:
        _wrong(f"{where}.policy", "is missing", f"name one of {', '.join(file.policies)}")
    if test.policy and test.policy not in file.policies:
        fix = _near(test.policy, list(file.policies))
        _wrong(f"{where}.policy", f"{test.policy!r} is not in the file", fix)
    if not test.expect and not test.golden:
        _wrong(where, "expects nothing", "give expect, golden or both")
    for number, one in enumerate(test.expect):
        at = f"{where}.expect[{number}]"
        bounds = (one.least, one.most, one.least_pct_of_recorded, one.most_pct_of_recorded)
        if all(bound is None for bound in bounds):
            _wrong(at, "has no bound", "give least, most, or one in percent of the record")
        if one.namespace and one.measure not in OF_PODS:
            fix = f"leave it out, or use one of {', '.join(sorted(OF_PODS))}"
            _wrong(f"{at}.namespace", f"does not apply to {one.measure}", fix)
        if one.measure == "cost" and not file.prices.currency:
            _wrong(f"{at}.measure", "cost needs prices", "add [prices], as in registry.toml")


_WORDS: Final[Mapping[str, tuple[str, ...]]] = {
    "policies.": ("node", "device", "weights"),
    "policies..weights": ("slot", "core", "memory"),
    "tests": tuple(field.name for field in msgspec.structs.fields(PolicyTest)),
    "tests.expect": tuple(field.name for field in msgspec.structs.fields(Expectation)),
    "prices": ("currency", "device_hour"),
    "canary": tuple(field.name for field in msgspec.structs.fields(Canary)),
    "canary.objectives": tuple(field.name for field in msgspec.structs.fields(Objective)),
    "": tuple(field.name for field in msgspec.structs.fields(PoliciesFile)),
}
"""Keys of the tables."""


def _check_words(document: Mapping[str, Any]) -> None:
    """Refuse an unknown key with the nearest known one."""
    _check_keys("", document, "")
    for name, policy in _table(document.get("policies")).items():
        _check_keys("policies.", policy, f"policies.{name}.")
        _check_keys("policies..weights", _table(policy).get("weights"), f"policies.{name}.weights.")
    _check_keys("prices", document.get("prices"), "prices.")
    _check_keys("canary", document.get("canary"), "canary.")
    objectives = _table(document.get("canary")).get("objectives")
    for number, one in enumerate(objectives if isinstance(objectives, list) else ()):
        _check_keys("canary.objectives", one, f"canary.objectives[{number}].")
    tests = document.get("tests")
    for number, test in enumerate(tests if isinstance(tests, list) else ()):
        _check_keys("tests", test, f"tests[{number}].")
        expect = _table(test).get("expect")
        for place, one in enumerate(expect if isinstance(expect, list) else ()):
            _check_keys("tests.expect", one, f"tests[{number}].expect[{place}].")


def _check_keys(kind: str, table: object, where: str) -> None:
    for key in _table(table):
        if key not in _WORDS[kind]:
            _wrong(f"{where}{key}", "is not a known key", _near(str(key), list(_WORDS[kind])))


def _table(value: object) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _near(word: str, words: list[str]) -> str:
    near = difflib.get_close_matches(word, words, n=1, cutoff=0.5)
    return f"did you mean {near[0]}?" if near else f"known: {', '.join(words)}"


def _wrong(field: str, problem: str, fix: str) -> NoReturn:
    raise SettingsInvalid(field=field, problem=problem, fix=fix)
