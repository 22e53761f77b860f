"""What the code can tell people when something is not as it should be: its texts, found by where they stand.

A text is collected as a template: its fixed words, with ``…`` for whatever is filled in. These are the places:

- the problem of an error of ours (its first argument), and what is given to ``click.UsageError``, ``BadParameter``,
  ``ClickException`` and a parameter's ``fail``;
- what is passed for a parameter or a field that is named like a reason (``REASON``: why, fix, words, …; also as a part
  of a name: ``why_not``), whoever's it is: its place is read from where the function or the dataclass is defined;
- what is assigned or added to a name like that, an attribute or a key of one included;
- what a function returns that is named like that, or whose docstring says that it tells why, or what is or went wrong;
- findings of the doctor (``bad``, ``note``, ``skipped`` and their fixes; ``ok`` tells of nothing wrong);
- what a ValueError says that the same module passes on, where the function that raises it says so in its docstring or
  catches it itself;
- the values of an enumeration of reasons (its docstring says why), and what lies under the key ``error``;
- what is printed on standard error or in red, and warnings and errors that are logged;
- what a dial is answered with, and the bootstrap's lines.

What p2pd says is passed on as it is, and stands here by itself (``P2PDS``).

A name is followed to what the same function assigns or appends to it, and both sides of a condition count. What is
filled into a text is not looked into: a text that is made of several gives each of them a name like a reason's.

Exempt are: assertions and exceptions that are none of ours, which are faults of the code; ``logger.info`` and
``logger.debug``; remedies, which are printed below their problem; and faults of fields (lists named ``faults``), which
begin with the field and say what it may be: docs/ERRORS.md explains that form once.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from p2ptrain import errors

PASSED_ON = "…"
"""The template of a text that is somebody else's: an exception's text, a list of faults."""

REASON = re.compile("why|reasons?|words|problem|fault|troubles?|missed|unmeasured|refusals|fix")
"""A name is like a reason when a part of it (between underscores) is one of these."""

PARAMETERS = {"found"}
"""Parameters and fields that take one beside: what a check of the doctor found."""

RETURNS_WHY = re.compile(r"\b[Ww]hy\b|\bwhat (went|is|was) wrong\b|^What (went|is|was) wrong\b")
TEXTS = re.compile(r"\bstr\b")
"""In the annotation of what a function returns, or of a parameter: texts are among it."""

P2PDS = {
    "connect: connection refused",
    "dial backoff",
    "peer id mismatch: expected …, but remote key matches …",
    "error opening relay circuit: NO_RESERVATION (204)",
    "failed to find any peer in table",
    "failed to negotiate protocol: protocols not supported: […]",
}
"""What go-libp2p says and we pass on. ``tests/net/test_own_words.py`` hears each from a real p2pd."""

CLICK_ERRORS = {"UsageError", "BadParameter", "ClickException"}
OURS = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
LOUD = {"warning", "error", "exception", "critical"}
"""Of a logger: what Python prints without any setting."""

Function = ast.FunctionDef | ast.AsyncFunctionDef


def template(node: ast.expr) -> str:
    """The fixed words of a message, ``…`` where something is filled in."""
    match node:
        case ast.Constant(value=str(text)):
            return text
        case ast.JoinedStr(values=parts):
            return "".join(template(part) for part in parts)
        case ast.BinOp(left=left, op=ast.Add(), right=right):
            return template(left) + template(right)
        case ast.Call(func=ast.Attribute(attr="join"), args=[ast.List(elts=[first, *_])]):
            return template(first)  # the first of several lines
        case _:
            return PASSED_ON


def tidy(text: str) -> str:
    return re.sub("…+", "…", " ".join(text.split()))


def is_like_a_reason(name: str) -> bool:
    parts = name.lower().split("_")
    return any(map(REASON.fullmatch, parts)) and parts[-1] != "faults"


def name_of(node: ast.expr) -> str:
    """Of a variable, an attribute, or of what is looked up or called."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
        case ast.Subscript(value=inner) | ast.Call(func=inner):
            return name_of(inner)
        case _:
            return ""


@dataclass
class Signatures:
    """At which places calls by a name take a reason; from all sources, since callers are elsewhere."""

    places: dict[str, set[int]] = field(default_factory=dict)
    errors: set[str] = field(default_factory=lambda: set(OURS | CLICK_ERRORS))

    def read(self, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                rows = [(each.target.id, each.annotation) for each in node.body if _is_field(each)]
                self._add(node.name, rows)
                if not self.errors.isdisjoint(map(name_of, node.bases)):
                    self.errors.add(node.name)
            elif isinstance(node, Function):
                rows = [(each.arg, each.annotation) for each in node.args.args if each.arg not in ("self", "cls")]
                self._add(node.name, rows)

    def _add(self, name: str, rows: Iterable[tuple[str, ast.expr | None]]) -> None:
        for place, (parameter, annotation) in enumerate(rows):
            is_text = annotation is not None and TEXTS.search(ast.unparse(annotation))
            if is_text and (is_like_a_reason(parameter) or parameter in PARAMETERS):
                self.places.setdefault(name, set()).add(place)


def _is_field(node: ast.stmt) -> bool:
    return isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)


class _Reader:
    """One source file."""

    def __init__(self, tree: ast.Module, signatures: Signatures) -> None:
        self._tree, self._signatures = tree, signatures
        self.found: set[str] = set()
        for scope, nodes in _scopes(tree):
            self._scope, self._nodes = scope, nodes
            for node in nodes:
                self._read(node)

    def _read(self, node: ast.AST) -> None:
        match node:
            case ast.Call():
                self._call(node)
            case ast.Assign(targets=targets, value=value):
                for target in targets:
                    self._assigned(target, value)
            case ast.AnnAssign(target=target, value=ast.expr() as value) | ast.AugAssign(target=target, value=value):
                self._assigned(target, value)
            case ast.NamedExpr(target=target, value=value):
                self._assigned(target, value)
            case ast.Return(value=ast.expr() as value) if self._returns_why():
                self._take(value)
            case ast.Return(value=ast.expr() as value):
                self._take_dial(value)
            case ast.Raise(exc=ast.Call(func=ast.Name(id="ValueError"), args=[text])) if self._hands_on():
                self._take(text)
            case ast.Dict(keys=keys, values=values):
                for key, value in zip(keys, values, strict=True):
                    if isinstance(key, ast.Constant) and key.value == "error":
                        self._take(value)
            case ast.ClassDef(body=body) if _is_enumeration(node) and RETURNS_WHY.search(ast.get_docstring(node) or ""):
                for each in body:
                    if isinstance(each, ast.Assign):
                        self._take(each.value)

    def _returns_why(self) -> bool:
        if not isinstance(self._scope, Function) or self._scope.returns is None:
            return False
        says_so = RETURNS_WHY.search(ast.get_docstring(self._scope) or "") or is_like_a_reason(self._scope.name)
        return bool(says_so and TEXTS.search(ast.unparse(self._scope.returns)))

    def _hands_on(self) -> bool:
        """Whether somebody here tells people what a ValueError of this function says."""
        if not isinstance(self._scope, Function):
            return False
        handlers = [node for node in ast.walk(self._scope) if isinstance(node, ast.ExceptHandler)]
        if "ValueError" in (ast.get_docstring(self._scope) or ""):
            handlers += [node for node in ast.walk(self._tree) if isinstance(node, ast.ExceptHandler)]
        return any(_tells(handler) for handler in handlers)

    def _take_dial(self, node: ast.expr) -> None:
        """How a dial went, and why."""
        match node:
            case ast.IfExp(body=one, orelse=other):
                self._take_dial(one)
                self._take_dial(other)
            case ast.Tuple(elts=[ast.Attribute(value=ast.Name(id="Dialed")), why]):
                self._take(why)

    def _call(self, call: ast.Call) -> None:
        name, args = name_of(call.func), call.args
        keywords = {each.arg: each.value for each in call.keywords if each.arg}
        if name != "ok":
            self._take(*(args[place] for place in self._signatures.places.get(name, ()) if place < len(args)))
            self._take(*(value for keyword, value in keywords.items() if is_like_a_reason(keyword)))
        match call.func:
            case ast.Attribute(attr="append" | "extend", value=owner) if is_like_a_reason(name_of(owner)):
                self._take(*args)
            case ast.Attribute(attr=attr, value=owner) if attr in LOUD and name_of(owner) == "logger":
                self._take(args[0])
            case ast.Attribute(attr="_say"):
                self._take(args[-1])
            case ast.Name(id="say") if len(args) == 2 and isinstance(args[0], ast.Constant):  # a tag and its text
                self._take(args[1])
            case ast.Attribute(attr="fail") if len(args) == 3:
                self._take(args[0])
            case _ if name in self._signatures.errors and args:
                self._take(args[0])
        aside = keywords.get("err") or keywords.get("file") or keywords.get("style")
        if args and aside is not None and re.search(r"True|sys\.stderr|\bred\b", ast.unparse(aside)):
            self._take(args[0], fewest_words=2)

    def _assigned(self, target: ast.expr, value: ast.expr) -> None:
        """Of several targets each gets its own."""
        if isinstance(target, ast.Tuple) and isinstance(value, ast.Tuple) and len(target.elts) == len(value.elts):
            for one, its in zip(target.elts, value.elts, strict=True):
                self._assigned(one, its)
        elif is_like_a_reason(name_of(target)):
            self._take(value)

    def _take(self, *nodes: ast.expr, fewest_words: int = 1) -> None:
        for node in nodes:
            for each in self._sides(node, frozenset()):
                text = re.sub("%[sdrgi]", "…", template(each))
                if len(re.findall("[A-Za-z]{2,}", text)) >= fewest_words:
                    self.found.add(tidy(text))

    def _sides(self, node: ast.expr, seen: frozenset[str]) -> Iterator[ast.expr]:
        """What an expression can be."""
        match node:
            case ast.IfExp(body=one, orelse=other):
                yield from self._sides(one, seen)
                yield from self._sides(other, seen)
            case (
                ast.BoolOp(values=several)
                | ast.List(elts=several)
                | ast.Tuple(elts=several)
                | ast.Dict(values=several)
                | ast.Call(func=ast.Name(id="next") | ast.Attribute(attr="get" | "pop"), args=[_, *several])
            ):
                for each in several:
                    yield from self._sides(each, seen)
            case ast.NamedExpr(value=inner) | ast.Starred(value=inner) | ast.ListComp(elt=inner):
                yield from self._sides(inner, seen)
            case ast.Call(func=ast.Name(id="str"), args=[inner]):
                yield from self._sides(inner, seen)
            case ast.Name(id=name) if name not in seen:
                for each in self._given(name):
                    yield from self._sides(each, seen | {name})
            case _:
                yield node

    def _given(self, name: str) -> Iterator[ast.expr]:
        """What this function assigns or appends to a name, or else the module."""
        places = [*self._nodes, *(each for each in self._tree.body if isinstance(each, ast.Assign | ast.AnnAssign))]
        for node in places:
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    yield value
                case ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value) if target == name:
                    yield value
                case ast.AugAssign(target=ast.Name(id=target), value=value) if target == name:
                    yield value
                case ast.Call(func=ast.Attribute(attr="append" | "extend", value=ast.Name(id=target)), args=args):
                    if target == name:
                        yield from args


def _tells(handler: ast.ExceptHandler) -> bool:
    """It passes the words of a ValueError on, and not to the log alone."""
    if handler.name is None or handler.type is None or not re.search("ValueError|Exception", ast.unparse(handler.type)):
        return False
    said = [node for node in handler.body if not ast.unparse(node).startswith("logger.")]
    causes = {id(node.cause) for each in said for node in ast.walk(each) if isinstance(node, ast.Raise)}
    names = [node for each in said for node in ast.walk(each) if isinstance(node, ast.Name)]
    return any(each.id == handler.name and id(each) not in causes for each in names)


def _is_enumeration(node: ast.ClassDef) -> bool:
    return any(name_of(base).endswith("Enum") for base in node.bases)


def _scopes(tree: ast.Module) -> Iterator[tuple[ast.AST, list[ast.AST]]]:
    """Every function, and the rest of the module, each with the nodes that are its own."""
    waiting: list[ast.AST] = [tree]
    while waiting:
        scope, own = waiting.pop(), []
        inner = [*ast.iter_child_nodes(scope)]
        while inner:
            node = inner.pop()
            if isinstance(node, Function):
                waiting.append(node)
            else:
                own.append(node)
                inner += ast.iter_child_nodes(node)
        yield scope, own


def signatures_of(sources: Iterable[str]) -> Signatures:
    found = Signatures()
    for source in sources:
        found.read(ast.parse(source))
    return found


def told_in(source: str, signatures: Signatures) -> set[str]:
    """The templates of all texts that a source file can tell."""
    return _Reader(ast.parse(source), signatures).found


def kinds_in(source: str) -> set[str]:
    """The kinds of all notes."""
    found = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(attr="note"), args=[ast.Constant(value=str(kind)), *_]):
                found.add(kind)
            case ast.Call(func=ast.Attribute(attr="note"), args=[ast.IfExp(body=one, orelse=other), *_]):
                found |= {template(one), template(other)}
            case ast.Call(func=ast.Name(id="Note"), keywords=keywords):
                found |= {template(each.value) for each in keywords if each.arg == "kind"}
    return found - {PASSED_ON}
