# SPDX-License-Identifier: Apache-2.0
"""A subset of CEL, enough for admission matchConditions: parser and evaluator.

Supported: literals (int, uint, double, string, bool, null), lists, maps, variables, member and
index access, optional access (`.?`, `[?]`, `orValue`, `hasValue`, `value`), operators
`|| && ! == != < <= > >= in + - * / % ?:`, macros `has all exists exists_one filter map`, functions
`size startsWith endsWith contains matches lowerAscii upperAscii trim split substring sum string
int double quantity semver compareTo isGreaterThan isLessThan`.
Anything else is a :class:`CelError` when the expression is compiled, never a silent guess.

Errors during evaluation (no such key, no such overload) are values to `&&`, `||`, `all` and
`exists`, which absorb them as the language asks. Obeys https://github.com/google/cel-spec (v0.20).

Kept libraries do not replace this module: in common-expression-language 0.10 an error in one
element fails `exists` and `all` although another element decides them, and neither it nor
cel-python 0.5 parses optional access; the real API server does both.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Final, TypeAlias

from hami_sim.apiserver.quantity import parse_quantity

Value: TypeAlias = Any
Env: TypeAlias = Mapping[str, Value]
Node: TypeAlias = Callable[[Env], Value]


class CelError(Exception):
    """The expression cannot be compiled, or an evaluation has no value."""


class _Optional:
    """The result of `.?`: a value that may be absent."""

    __slots__ = ("present", "value")

    def __init__(self, value: Value, *, present: bool) -> None:
        self.value = value
        self.present = present


class Ordered:
    """A quantity or a version: compared by methods, not by operators."""

    __slots__ = ("key", "kind")

    def __init__(self, kind: str, key: Any) -> None:  # noqa: ANN401 - any value with an order
        self.kind = kind
        self.key = key

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ordered) and (self.kind, self.key) == (other.kind, other.key)

    def __hash__(self) -> int:
        return hash((self.kind, self.key))


def quantity(text: str) -> Ordered:
    """Return an amount of Kubernetes as a value of the language."""
    try:
        return Ordered("quantity", parse_quantity(text).amount)
    except ValueError as error:
        raise CelError(str(error)) from error


def semver(text: str) -> Ordered:
    """Return a semantic version as a value of the language; a release follows its candidates."""
    match = _SEMVER.fullmatch(text)
    if match is None:
        msg = f"{text} is no semantic version"
        raise CelError(msg)
    numbers = tuple(int(match[part]) for part in ("major", "minor", "patch"))
    before = tuple(
        (0, int(word), "") if word.isdigit() else (1, 0, word)
        for word in (match["before"] or "").split(".")
        if word
    )
    return Ordered("semver", (*numbers, not before, before))


_SEMVER: Final = re.compile(
    r"(?P<major>\d+)\.(?P<minor>\d+)\.(?P<patch>\d+)(-(?P<before>[0-9A-Za-z.-]+))?"
    r"(\+[0-9A-Za-z.-]+)?"
)
_TOKEN: Final = re.compile(
    r"""
    (?P<space>[\s]+|//[^\n]*)
  | (?P<number>0x[0-9a-fA-F]+[uU]?|[0-9]+\.[0-9]+(?:[eE][+-]?[0-9]+)?
        |[0-9]+[eE][+-]?[0-9]+|[0-9]+[uU]?)
  | (?P<string>[rR]?(?:'''(?:\\.|[^\\])*?'''|\"\"\"(?:\\.|[^\\])*?\"\"\"
        |'(?:\\.|[^'\\\n])*'|"(?:\\.|[^"\\\n])*"))
  | (?P<name>[A-Za-z_][A-Za-z0-9_]*)
  | (?P<op>\|\||&&|==|!=|<=|>=|\.\?|\[\?|[-+*/%<>!?:.,()\[\]{}])
    """,
    re.VERBOSE | re.DOTALL,
)
_ESCAPES: Final = {
    "n": "\n",
    "t": "\t",
    "r": "\r",
    "a": "\a",
    "b": "\b",
    "f": "\f",
    "v": "\v",
    "\\": "\\",
    "'": "'",
    '"': '"',
    "`": "`",
    "?": "?",
}
_RESERVED: Final = frozenset(
    {
        "as",
        "break",
        "const",
        "continue",
        "else",
        "for",
        "function",
        "if",
        "import",
        "let",
        "loop",
        "package",
        "namespace",
        "return",
        "var",
        "void",
        "while",
    }
)


def _tokens(text: str) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = []
    position = 0
    while position < len(text):
        match = _TOKEN.match(text, position)
        if match is None:
            msg = f"Syntax error: token recognition error at: '{text[position:]}'"
            raise CelError(msg)
        if match.lastgroup != "space":
            found.append((match.lastgroup or "", match[0]))
        position = match.end()
    found.append(("end", ""))
    return found


def _unquote(text: str) -> str:
    raw = text[0] in "rR"
    text = text[1:] if raw else text
    width = 3 if text[:3] in ("'''", '"""') else 1
    body = text[width:-width]
    if raw:
        return body

    def escape(match: re.Match[str]) -> str:
        mark = match[1]
        if mark[0] in "xXuU":
            return chr(int(mark[1:], 16))
        if mark[0].isdigit():
            return chr(int(mark, 8))
        if mark not in _ESCAPES:
            msg = f"Syntax error: invalid escape \\{mark}"
            raise CelError(msg)
        return _ESCAPES[mark]

    return re.sub(
        r"\\(x[0-9a-fA-F]{2}|X[0-9a-fA-F]{2}|u[0-9a-fA-F]{4}|U[0-9a-fA-F]{8}|[0-3][0-7]{2}|.)",
        escape,
        body,
        flags=re.DOTALL,
    )


class Program:
    """A compiled expression."""

    def __init__(self, text: str, variables: frozenset[str]) -> None:
        """Compile; names that are neither variables nor bound by a macro are refused."""
        self.text = text
        self._node = _Parser(text, variables).parse()

    def __call__(self, env: Env) -> Value:
        """Evaluate with the given variables."""
        return self._node(env)

    def decide(self, env: Env) -> bool:
        """Evaluate to a truth value; anything else is an error."""
        result = self(env)
        if not isinstance(result, bool):
            msg = f"expression '{self.text}' resulted in {_type_name(result)}, want bool"
            raise CelError(msg)
        return result


class _Parser:
    """Recursive descent straight to closures."""

    def __init__(self, text: str, variables: frozenset[str]) -> None:
        self._text = text
        self._tokens = _tokens(text)
        self._at = 0
        self._bound = [set(variables)]

    def parse(self) -> Node:
        node = self._ternary()
        if self._peek()[0] != "end":
            raise self._unexpected()
        return node

    def _peek(self) -> tuple[str, str]:
        return self._tokens[self._at]

    def _take(self) -> tuple[str, str]:
        token = self._tokens[self._at]
        self._at += 1
        return token

    def _accept(self, *ops: str) -> str | None:
        kind, text = self._peek()
        if kind == "op" and text in ops:
            self._at += 1
            return text
        return None

    def _expect(self, op: str) -> None:
        if self._accept(op) is None:
            raise self._unexpected(op)

    def _unexpected(self, wanted: str = "") -> CelError:
        found = self._peek()[1] or "<EOF>"
        suffix = f" expecting '{wanted}'" if wanted else ""
        return CelError(f"Syntax error: mismatched input '{found}'{suffix} in '{self._text}'")

    def _ternary(self) -> Node:
        condition = self._or()
        if self._accept("?") is None:
            return condition
        yes = self._or()
        self._expect(":")
        no = self._ternary()

        def choose(env: Env) -> Value:
            picked = condition(env)
            if not isinstance(picked, bool):
                raise _no_overload("_?_:_", picked)
            return yes(env) if picked else no(env)

        return choose

    def _or(self) -> Node:
        terms = [self._and()]
        while self._accept("||"):
            terms.append(self._and())
        return terms[0] if len(terms) == 1 else _junction(terms, decisive=True)

    def _and(self) -> Node:
        terms = [self._relation()]
        while self._accept("&&"):
            terms.append(self._relation())
        return terms[0] if len(terms) == 1 else _junction(terms, decisive=False)

    def _relation(self) -> Node:
        left = self._sum()
        while True:
            op = self._accept("==", "!=", "<", "<=", ">", ">=")
            if op is None and self._peek() == ("name", "in"):
                self._at += 1
                op = "in"
            if op is None:
                return left
            left = _binary(op, left, self._sum())

    def _sum(self) -> Node:
        left = self._product()
        while op := self._accept("+", "-"):
            left = _binary(op, left, self._product())
        return left

    def _product(self) -> Node:
        left = self._unary()
        while op := self._accept("*", "/", "%"):
            left = _binary(op, left, self._unary())
        return left

    def _unary(self) -> Node:
        if self._accept("!"):
            operand = self._unary()

            def negate(env: Env) -> Value:
                value = operand(env)
                if not isinstance(value, bool):
                    raise _no_overload("!_", value)
                return not value

            return negate
        if self._accept("-"):
            operand = self._unary()

            def minus(env: Env) -> Value:
                value = operand(env)
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise _no_overload("-_", value)
                return -value

            return minus
        return self._postfix()

    def _postfix(self) -> Node:
        node = self._primary()
        while True:
            if self._accept("."):
                name = self._name()
                node = self._call(node, name) if self._accept("(") else _select(node, name)
            elif self._accept(".?"):
                node = _optional_select(node, _constant(self._name()))
            elif self._accept("["):
                index = self._ternary()
                self._expect("]")
                node = _index(node, index)
            elif self._accept("[?"):
                index = self._ternary()
                self._expect("]")
                node = _optional_select(node, index)
            else:
                return node

    def _name(self) -> str:
        kind, text = self._take()
        if kind != "name":
            self._at -= 1
            raise self._unexpected("identifier")
        return text

    def _primary(self) -> Node:
        kind, text = self._take()
        if kind == "number":
            return _constant(_number(text))
        if kind == "string":
            return _constant(_unquote(text))
        if kind == "name":
            return self._named(text)
        if (kind, text) == ("op", "("):
            node = self._ternary()
            self._expect(")")
            return node
        if (kind, text) == ("op", "["):
            return _list(self._arguments("]"))
        if (kind, text) == ("op", "{"):
            return self._map()
        self._at -= 1
        raise self._unexpected()

    def _named(self, text: str) -> Node:
        if text in ("true", "false", "null"):
            return _constant({"true": True, "false": False, "null": None}[text])
        if text in _RESERVED:
            msg = f"Syntax error: reserved identifier: {text}"
            raise CelError(msg)
        if self._accept("("):
            if text == "has":
                return self._has()
            return _function(text, self._arguments(")"))
        if not any(text in scope for scope in self._bound):
            msg = f"undeclared reference to '{text}' (in container '')"
            raise CelError(msg)
        return _variable(text)

    def _arguments(self, closing: str) -> list[Node]:
        found: list[Node] = []
        while self._accept(closing) is None:
            found.append(self._ternary())
            if self._accept(",") is None:
                self._expect(closing)
                break
        return found

    def _map(self) -> Node:
        pairs: list[tuple[Node, Node]] = []
        while self._accept("}") is None:
            key = self._ternary()
            self._expect(":")
            pairs.append((key, self._ternary()))
            if self._accept(",") is None:
                self._expect("}")
                break
        return lambda env: {key(env): value(env) for key, value in pairs}

    def _has(self) -> Node:
        start = self._at
        depth = 1
        end = start
        while depth:
            kind, text = self._tokens[end]
            if kind == "end":
                self._at = end
                raise self._unexpected(")")
            if kind == "op":
                depth += {"(": 1, "[": 1, "[?": 1, "{": 1, ")": -1, "]": -1, "}": -1}.get(text, 0)
            end += 1
        field = self._tokens[end - 2]
        if field[0] != "name" or self._tokens[end - 3] != ("op", "."):
            msg = f"invalid argument to has() macro in '{self._text}'"
            raise CelError(msg)
        kept = self._tokens
        self._tokens = [*kept[start : end - 3], ("end", "")]
        self._at = 0
        operand = self.parse()
        self._tokens, self._at = kept, end
        name = field[1]

        def present(env: Env) -> Value:
            value = operand(env)
            if not isinstance(value, dict):
                raise _no_overload("has", value)
            return name in value

        return present

    def _call(self, target: Node, name: str) -> Node:
        if name in _MACROS:
            return self._macro(target, name)
        if name == "orValue":
            arguments = self._arguments(")")
            _count(name, arguments, 1)
            return _or_value(target, arguments[0])
        return _method(name, target, self._arguments(")"))

    def _macro(self, target: Node, name: str) -> Node:
        variable = self._name()
        self._expect(",")
        self._bound.append({variable})
        body = self._ternary()
        second = None
        if name == "map" and self._accept(","):
            second = self._ternary()
        self._bound.pop()
        self._expect(")")
        if name in ("all", "exists"):
            return _quantifier(target, variable, body, decisive=name == "exists")
        return _collection_macro(name, target, variable, body, second)


def _number(text: str) -> int | float:
    if text[:2] in ("0x", "0X"):
        return int(text.rstrip("uU"), 16)
    if any(mark in text for mark in ".eE"):
        return float(text)
    return int(text.rstrip("uU"))


def _type_name(value: Value) -> str:
    if value is None:
        return "null_type"
    for kind, name in (
        (bool, "bool"),
        (int, "int"),
        (float, "double"),
        (str, "string"),
        (list, "list"),
        (dict, "map"),
        (_Optional, "optional_type"),
    ):
        if isinstance(value, kind):
            return name
    if isinstance(value, Ordered):
        return value.kind
    return type(value).__name__


def _no_overload(name: str, *values: Value) -> CelError:
    return CelError(
        f"no such overload: {name} applied to ({', '.join(_type_name(v) for v in values)})"
    )


def _count(name: str, arguments: list[Node], wanted: int) -> None:
    if len(arguments) != wanted:
        msg = f"found no matching overload for '{name}' with {len(arguments)} arguments"
        raise CelError(msg)


def _constant(value: Value) -> Node:
    return lambda _env: value


def _variable(name: str) -> Node:
    def read(env: Env) -> Value:
        if name not in env:
            msg = f"no such attribute(s): {name}"
            raise CelError(msg)
        return env[name]

    return read


def _list(items: list[Node]) -> Node:
    return lambda env: [item(env) for item in items]


def _select(target: Node, name: str) -> Node:
    def select(env: Env) -> Value:
        value = target(env)
        if isinstance(value, _Optional):
            return _optional_of(value.value, name) if value.present else value
        if not isinstance(value, dict):
            raise _no_overload(f"_.{name}", value)
        if name not in value:
            msg = f"no such key: {name}"
            raise CelError(msg)
        return value[name]

    return select


def _optional_of(container: Value, key: Value) -> _Optional:
    if isinstance(container, dict):
        return _Optional(container.get(key), present=key in container)
    if isinstance(container, list) and isinstance(key, int) and not isinstance(key, bool):
        fits = 0 <= key < len(container)
        return _Optional(container[key] if fits else None, present=fits)
    raise _no_overload("_?._", container, key)


def _optional_select(target: Node, index: Node) -> Node:
    def select(env: Env) -> Value:
        value = target(env)
        if isinstance(value, _Optional):
            if not value.present:
                return value
            value = value.value
        return _optional_of(value, index(env))

    return select


def _or_value(target: Node, fallback: Node) -> Node:
    def pick(env: Env) -> Value:
        value = target(env)
        if not isinstance(value, _Optional):
            raise _no_overload("orValue", value)
        return value.value if value.present else fallback(env)

    return pick


def _index(target: Node, index: Node) -> Node:
    def read(env: Env) -> Value:
        value, key = target(env), index(env)
        if isinstance(value, dict):
            if key not in value:
                msg = f"no such key: {key}"
                raise CelError(msg)
            return value[key]
        if isinstance(value, list) and isinstance(key, int) and not isinstance(key, bool):
            if not 0 <= key < len(value):
                msg = f"index out of bounds: {key}"
                raise CelError(msg)
            return value[key]
        raise _no_overload("_[_]", value, key)

    return read


def _attempt(node: Node, env: Env) -> tuple[Value, CelError | None]:
    try:
        return node(env), None
    except CelError as error:
        return None, error


def _junction(terms: list[Node], *, decisive: bool) -> Node:
    """Build `||` (decisive True) or `&&` (decisive False)."""
    name = "||" if decisive else "&&"
    return lambda env: _decided(name, ((term, env) for term in terms), decisive=decisive)


def _decided(name: str, terms: Iterable[tuple[Node, Env]], *, decisive: bool) -> bool:
    """Return `decisive` if one term has that value, absorbing the errors of the others."""
    problem: CelError | None = None
    for term, env in terms:
        value, error = _attempt(term, env)
        if error is None and not isinstance(value, bool):
            error = _no_overload(name, value)
        if error is not None:
            problem = problem or error
        elif bool(value) == decisive:
            return decisive
    if problem is not None:
        raise problem
    return not decisive


def _items(target: Node, env: Env, name: str) -> list[Value]:
    value = target(env)
    if isinstance(value, dict):
        return list(value)
    if isinstance(value, list):
        return value
    raise _no_overload(name, value)


def _quantifier(target: Node, variable: str, body: Node, *, decisive: bool) -> Node:
    name = "exists" if decisive else "all"

    def decide(env: Env) -> Value:
        each = ((body, {**env, variable: item}) for item in _items(target, env, name))
        return _decided(name, each, decisive=decisive)

    return decide


def _collection_macro(
    name: str, target: Node, variable: str, body: Node, second: Node | None
) -> Node:
    def run(env: Env) -> Value:
        items = _items(target, env, name)
        scopes = [{**env, variable: item} for item in items]
        if name == "map":
            if second is None:
                return [body(scope) for scope in scopes]
            return [second(scope) for scope in scopes if body(scope) is True]
        chosen = [item for item, scope in zip(items, scopes, strict=True) if body(scope) is True]
        return chosen if name == "filter" else len(chosen) == 1

    return run


_MACROS: Final = frozenset({"all", "exists", "exists_one", "filter", "map"})


def _same(left: Value, right: Value) -> bool:
    if isinstance(left, bool) != isinstance(right, bool):
        return False
    return bool(left == right)


def _binary(op: str, left: Node, right: Node) -> Node:
    def compute(env: Env) -> Value:
        one, two = left(env), right(env)
        if op in ("==", "!="):
            return _same(one, two) == (op == "==")
        if op == "in":
            if isinstance(two, dict):
                return isinstance(one, (str, int)) and one in two
            if isinstance(two, list):
                return any(_same(one, item) for item in two)
            raise _no_overload("@in", one, two)
        return _arithmetic(op, one, two)

    return compute


_COMPARE: Final[Mapping[str, Callable[[Any, Any], bool]]] = {
    "<": lambda one, two: one < two,
    "<=": lambda one, two: one <= two,
    ">": lambda one, two: one > two,
    ">=": lambda one, two: one >= two,
}


def _is_number(value: Value) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _arithmetic(op: str, one: Value, two: Value) -> Value:
    numbers = _is_number(one) and _is_number(two)
    if op in _COMPARE and (numbers or (isinstance(one, str) and isinstance(two, str))):
        return _COMPARE[op](one, two)
    if op == "+" and isinstance(one, str) and isinstance(two, str):
        return one + two
    if op == "+" and isinstance(one, list) and isinstance(two, list):
        return [*one, *two]
    if numbers and type(one) is type(two):
        if op == "+":
            return one + two
        if op == "-":
            return one - two
        if op == "*":
            return one * two
        return _divide(op, one, two)
    raise _no_overload(f"_{op}_", one, two)


def _divide(op: str, one: float, two: float) -> Value:
    if isinstance(one, int) and isinstance(two, int):
        if two == 0:
            raise CelError("division by zero" if op == "/" else "modulus by zero")
        quotient = abs(one) // abs(two) * (1 if (one < 0) == (two < 0) else -1)
        return quotient if op == "/" else one - quotient * two
    if op == "/":
        if two == 0:
            return float("nan") if one == 0 else float("inf") if one > 0 else float("-inf")
        return one / two
    raise _no_overload(f"_{op}_", one, two)


def _size(value: Value) -> int:
    if isinstance(value, (str, list, dict)):
        return len(value)
    raise _no_overload("size", value)


def _to_string(value: Value) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (str, int, float)):
        return str(value)
    raise _no_overload("string", value)


def _to_int(value: Value) -> int:
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return int(value)
    if isinstance(value, str) and re.fullmatch(r"-?[0-9]+", value):
        return int(value)
    raise _no_overload("int", value)


def _to_double(value: Value) -> float:
    try:
        if isinstance(value, (int, float, str)) and not isinstance(value, bool):
            return float(value)
    except ValueError as error:
        raise CelError(str(error)) from error
    raise _no_overload("double", value)


def _text(name: str, value: Value) -> str:
    if not isinstance(value, str):
        raise _no_overload(name, value)
    return value


_FUNCTIONS: Final[Mapping[str, Callable[[Value], Value]]] = {
    "size": _size,
    "string": _to_string,
    "int": _to_int,
    "double": _to_double,
    "quantity": lambda value: quantity(_text("quantity", value)),
    "semver": lambda value: semver(_text("semver", value)),
}


def _function(name: str, arguments: list[Node]) -> Node:
    call = _FUNCTIONS.get(name)
    if call is None:
        msg = f"undeclared reference to '{name}' (in container '')"
        raise CelError(msg)
    _count(name, arguments, 1)
    return lambda env: call(arguments[0](env))


def _matches(text: str, pattern: str) -> bool:
    try:
        return re.search(pattern, text) is not None
    except re.error as error:
        msg = f"error parsing regexp: {error}"
        raise CelError(msg) from error


_TEXT_METHODS: Final[Mapping[str, Callable[[str, str], Value]]] = {
    "startsWith": lambda text, part: text.startswith(part),
    "endsWith": lambda text, part: text.endswith(part),
    "contains": lambda text, part: part in text,
    "matches": _matches,
    "split": lambda text, part: text.split(part) if part else list(text),
}
_PLAIN_METHODS: Final[Mapping[str, Callable[[str], Value]]] = {
    "lowerAscii": str.lower,
    "upperAscii": str.upper,
    "trim": str.strip,
}


_ORDER_METHODS: Final[Mapping[str, Callable[[Any, Any], Value]]] = {
    "compareTo": lambda one, two: (one > two) - (one < two),
    "isGreaterThan": lambda one, two: one > two,
    "isLessThan": lambda one, two: one < two,
}


def _ordered(name: str, target: Node, argument: Node) -> Node:
    compare = _ORDER_METHODS[name]

    def call(env: Env) -> Value:
        one, two = target(env), argument(env)
        if not isinstance(one, Ordered) or not isinstance(two, Ordered) or one.kind != two.kind:
            raise _no_overload(name, one, two)
        return compare(one.key, two.key)

    return call


def _method(name: str, target: Node, arguments: list[Node]) -> Node:
    if name in _ORDER_METHODS:
        _count(name, arguments, 1)
        return _ordered(name, target, arguments[0])
    if name in _TEXT_METHODS:
        _count(name, arguments, 1)
        text_method = _TEXT_METHODS[name]

        def call(env: Env) -> Value:
            text, part = target(env), arguments[0](env)
            if not isinstance(text, str) or not isinstance(part, str):
                raise _no_overload(name, text, part)
            return text_method(text, part)

        return call
    if name in _PLAIN_METHODS:
        _count(name, arguments, 0)
        plain_method = _PLAIN_METHODS[name]

        def plain(env: Env) -> Value:
            text = target(env)
            if not isinstance(text, str):
                raise _no_overload(name, text)
            return plain_method(text)

        return plain
    if name == "substring":
        return _substring(target, arguments)
    _count(name, arguments, 0)
    if name == "size":
        return lambda env: _size(target(env))
    if name == "sum":
        return lambda env: _sum(target(env))
    if name in ("hasValue", "value"):
        return _optional_method(name, target)
    msg = f"undeclared reference to '{name}' (in container '')"
    raise CelError(msg)


def _substring(target: Node, arguments: list[Node]) -> Node:
    _count("substring", arguments, 1)

    def cut(env: Env) -> Value:
        text, start = target(env), arguments[0](env)
        if not isinstance(text, str) or isinstance(start, bool) or not isinstance(start, int):
            raise _no_overload("substring", text, start)
        if not 0 <= start <= len(text):
            msg = f"index out of range: {start}"
            raise CelError(msg)
        return text[start:]

    return cut


def _sum(values: Value) -> Value:
    if not isinstance(values, list) or not all(_is_number(value) for value in values):
        raise _no_overload("sum", values)
    return sum(values)


def _optional_method(name: str, target: Node) -> Node:
    def read(env: Env) -> Value:
        value = target(env)
        if not isinstance(value, _Optional):
            raise _no_overload(name, value)
        if name == "hasValue":
            return value.present
        if not value.present:
            msg = "optional.none() dereference"
            raise CelError(msg)
        return value.value

    return read
