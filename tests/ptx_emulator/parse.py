"""PTX text into `ParsedModule`: scopes, registers, variables, operands, source lines; device functions put inline.

A call of a function that the module defines is replaced by its body (registers and labels of its own), because a thread
then needs no call stack and reconvergence stays what it is inside a kernel. Recursion is refused.
"""

from __future__ import annotations

import re
import struct
from dataclasses import dataclass, field

from .errors import PtxSyntaxError
from .ir import (
    CLASS_OF_SIZE,
    SIZES,
    Address,
    Imm,
    Instruction,
    Kernel,
    Label,
    Mem,
    Name,
    Pair,
    Param,
    ParsedModule,
    Reg,
    Sink,
    Special,
    Targets,
    TensorMem,
    Variable,
    Vec,
)
from .lexer import Statement, split_arguments, statements

_VARIABLE = re.compile(
    r"(?P<prefix>(?:\.(?:visible|extern|weak|common)\s+)*)\.(?P<space>global|const|shared|local|param)"
    r"(?P<attrs>(?:\s*\.(?:align\s+\d+|attribute\s*\([^)]*\)|unified|ptr\b|v[248]))*)\s*\.(?P<type>\w+)\s+(?P<name>[$\w%]+)"
    r"(?P<dims>(?:\[\d*\])*)\s*(?:=\s*(?P<init>.*))?$"
)
_HEADER = re.compile(
    r"(?:\.(?:visible|weak|extern|common)\s+)*\.(?P<kind>entry|func)\s*(?P<ret>\([^)]*\))?\s*(?P<name>[$\w]+)\s*"
    r"(?:\((?P<params>[^)]*)\))?(?P<directives>.*)$"
)
_PARAM = re.compile(
    r"\.param\s*(?:\.align\s+(?P<align>\d+)\s*)?\.(?P<type>\w+)\s*(?P<ptr>\.ptr[^%$\w]*(?:\.\w+\s*|\d+\s*)*)?"
    r"\s(?P<name>[$\w]+)(?:\[(?P<count>\d+)\])?$"
)
_MNEMONIC = re.compile(r"[\w.:]+")
_REGISTER_RANGE = re.compile(r"(%?[\w$]+)<(\d+)>")
_MAX_INLINE_DEPTH = 16
# Statements whose parts are missing or of a wrong kind fail in these ways; they become a PtxSyntaxError with the line.
_MALFORMED = (ArithmeticError, AttributeError, LookupError, TypeError, ValueError)
_MAX_REGISTERS = 1 << 16  # of a kernel, after inlining
_MAX_LOCAL = 512 << 10  # bytes a thread: the limit of the hardware


@dataclass
class _Function:
    name: str
    params: list[str]
    results: list[str]
    body: list[Statement]
    statement: Statement
    directives: str
    raw_params: str


@dataclass
class _Scope:
    """Names visible in a pair of braces."""

    parent: _Scope | None
    registers: dict[str, Reg] = field(default_factory=dict)
    variables: dict[str, Address] = field(default_factory=dict)
    labels: dict[str, Label] = field(default_factory=dict)
    targets: dict[str, list[str]] = field(default_factory=dict)
    return_label: str | None = None  # of an inlined function: where ret goes
    barrier: bool = False  # an inlined body does not see the caller's names

    def find(self, table: str, name: str) -> object:
        scope: _Scope | None = self
        while scope is not None:
            value = getattr(scope, table).get(name)
            if value is not None:
                return value
            scope = None if scope.barrier else scope.parent
        return None


def align_up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def parse(text: str) -> ParsedModule:
    """Reads a module. Raises `PtxSyntaxError` with the line of what it cannot read."""
    if not isinstance(text, str):
        raise PtxSyntaxError(f"PTX text is a str, not {type(text).__name__}")
    return _ModuleParser(text).run()


class _ModuleParser:
    def __init__(self, text: str) -> None:
        self.module = ParsedModule("", "", {}, {}, {}, text)
        self.functions: dict[str, _Function] = {}
        self.entries: list[_Function] = []
        self.shared: dict[str, Variable] = {}
        self.addresses: dict[str, Address] = {}  # module variables
        self.ends = {"global": 0, "const": 0, "shared": 0}

    def run(self) -> ParsedModule:
        found = statements(self.module.text)
        i = 0
        while i < len(found):
            try:
                i = self._top_level(found, i)
            except _MALFORMED as reason:
                raise _unreadable(found[i], reason) from reason
        for v in self.module.variables.values():
            for _, name, _ in v.relocations:
                if name not in self.module.variables:
                    raise PtxSyntaxError(f"initial value of {v.name!r}: no .global or .const variable {name!r}")
        for entry in self.entries:
            try:
                self.module.kernels[entry.name] = _KernelParser(self, entry).run()
            except _MALFORMED as reason:
                raise _unreadable(entry.statement, reason) from reason
        return self.module

    def _top_level(self, found: list[Statement], i: int) -> int:
        s = found[i]
        word = s.text.split()[0]
        if word == ".version":
            self.module.version = s.text.split()[1]
        elif word == ".target":
            self.module.target = s.text.split()[1].rstrip(",")
        elif word == ".file":
            number = s.text.split()[1]
            self.module.files[int(number)] = s.text.split('"')[1]
        elif _HEADER.match(s.text):
            return self._function(found, i)
        elif (match := _VARIABLE.match(s.text)) and match["space"] in ("global", "const", "shared"):
            self._variable(match, s)
        elif re.search(r"\.(global|const|shared)\b", s.text):
            raise PtxSyntaxError(f"line {s.line}: {s.text[:80]!r} declares nothing that can be read")
        elif word[0] != ".":
            raise PtxSyntaxError(f"line {s.line}: {s.text[:80]!r} closes nothing or stands outside of every function")
        return i + 1

    def _function(self, found: list[Statement], i: int) -> int:
        s = found[i]
        match = _HEADER.match(s.text)
        assert match is not None
        if i + 1 >= len(found) or found[i + 1].text != "{":
            return i + 1  # a declaration
        end = _skip_body(found, i + 1)
        names = [_param_name(p) for p in split_arguments(match["params"] or "")]
        results = [_param_name(p) for p in split_arguments((match["ret"] or "()")[1:-1])]
        function = _Function(
            match["name"], names, results, found[i + 2 : end - 1], s, match["directives"], match["params"] or ""
        )
        if match["kind"] == "entry":
            if any(e.name == function.name for e in self.entries):
                raise PtxSyntaxError(f"line {s.line}: a second kernel {function.name!r}")
            self.entries.append(function)
        else:
            self.functions[function.name] = function
        return end

    def _variable(self, match: re.Match, s: Statement) -> None:
        space, name = match["space"], match["name"]
        if name in self.addresses:
            return
        size, align = _extent(match)
        external = "extern" in match["prefix"] and space == "shared"
        if external:
            self.shared[name] = Variable(name, space, -1, 0, align, external=True)
            return
        offset = align_up(self.ends[space], align)
        self.ends[space] = offset + size
        variable = Variable(name, space, offset, size, align)
        if match["init"]:
            variable.data, variable.relocations = _initial(match["init"], match["type"], s)
            if len(variable.data) > size:
                raise PtxSyntaxError(f"line {s.line}: {len(variable.data)} bytes of values for {name!r} of {size}")
        (self.shared if space == "shared" else self.module.variables)[name] = variable
        self.addresses[name] = Address(space, offset, name)


def _unreadable(s: Statement, reason: Exception) -> PtxSyntaxError:
    return PtxSyntaxError(f"line {s.line}: cannot read {s.text[:80]!r} ({type(reason).__name__}: {reason})")


def _skip_body(found: list[Statement], i: int) -> int:
    """Index after the body that opens at statement i."""
    depth = 0
    while i < len(found):
        depth += (found[i].text == "{") - (found[i].text == "}")
        i += 1
        if depth == 0:
            return i
    raise PtxSyntaxError(f"line {found[-1].line}: a body that does not end")


def _param_name(text: str) -> str:
    return re.sub(r"\[\d*\]$", "", text.split()[-1])


def _extent(match: re.Match) -> tuple[int, int]:
    """Size and alignment in bytes of a declared variable."""
    unit = SIZES[match["type"]]
    vector = re.search(r"\.v([248])", match["attrs"] or "")
    unit *= int(vector[1]) if vector else 1
    size = unit
    for dim in re.findall(r"\[(\d*)\]", match["dims"] or ""):
        size *= int(dim or 0)
    stated = re.search(r"\.align\s+(\d+)", match["attrs"] or "")
    return size, max(int(stated[1]) if stated else unit, 1)


def _initial(text: str, kind: str, s: Statement) -> tuple[bytes, list[tuple[int, str, int]]]:
    size = SIZES[kind]
    data, relocations = bytearray(), []
    for item in split_arguments(text.replace("{", " ").replace("}", " ")):
        number = _number(item)
        if number is not None:
            data += (number.value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
            continue
        match = re.fullmatch(r"(?:0x[fF]+\()?(?:generic\()?([$\w]+)\)*(?:\s*\+\s*(\d+))?\)*", item)
        if match is None or size != 8:
            raise PtxSyntaxError(f"line {s.line}: initial value {item!r}: numbers and 64-bit addresses are supported")
        relocations.append((len(data), match[1], int(match[2] or 0)))
        data += bytes(size)
    return bytes(data), relocations


def _number(text: str) -> Imm | None:
    if re.fullmatch(r"0[fF][0-9a-fA-F]{8}", text):
        return Imm(int(text[2:], 16), 32)
    if re.fullmatch(r"0[dD][0-9a-fA-F]{16}", text):
        return Imm(int(text[2:], 16), 64)
    if re.fullmatch(r"-?(0[xX][0-9a-fA-F]+|\d+)U?", text):
        digits = text.rstrip("U")
        octal = re.fullmatch(r"-?0\d+", digits)
        return Imm(int(digits, 8 if octal else 0))
    if re.fullmatch(r"-?\d+\.\d*([eE][-+]?\d+)?", text):
        return Imm(struct.unpack("<I", struct.pack("<f", float(text)))[0], 32)
    return None


class _KernelParser:
    def __init__(self, module: _ModuleParser, entry: _Function) -> None:
        self.module = module
        self.entry = entry
        self.counts = dict.fromkeys("phwdq", 0)
        self.instructions: list[Instruction] = []
        self.pending: list[tuple[str, str, list[str], Statement, _Scope, tuple[str, int] | None]] = []
        self.shared = dict(module.shared)
        self.shared_end = module.ends["shared"]
        self.local_end = 0
        self.labels: dict[str, int] = {}
        self.loc: tuple[str, int] | None = None
        self.inlined = 0

    def run(self) -> Kernel:
        params = self._params()
        top = _Scope(None)
        for p in params:
            top.variables[p.name] = Address("param", p.offset, p.name)
        self._body(self.entry.body, top, (self.entry.name,))
        if not self.pending or self.pending[-1][0] not in ("ret", "exit", "trap"):
            self.pending.append(("ret", "ret", [], self.entry.statement, top, None))
        dynamic = self._place_dynamic()
        for word, text, arguments, s, scope, loc in self.pending:
            try:
                self.instructions.append(self._instruction(word, text, arguments, s, scope, loc))
            except _MALFORMED as reason:
                raise _unreadable(s, reason) from reason
        if self.local_end > _MAX_LOCAL:
            line = self.entry.statement.line
            raise PtxSyntaxError(f"line {line}: {self.local_end} bytes of local memory a thread, at most {_MAX_LOCAL}")
        return Kernel(
            name=self.entry.name,
            params=params,
            instructions=self.instructions,
            register_counts=self.counts,
            shared=self.shared,
            static_shared=self.shared_end,
            dynamic_shared_offset=dynamic,
            local_bytes=align_up(self.local_end, 16),
            required_block=self._triple(".reqntid"),
            max_block=self._triple(".maxntid"),
            cluster=self._triple(".reqnctapercluster"),
            labels=self.labels,
        )

    def _triple(self, directive: str) -> tuple[int, int, int] | None:
        match = re.search(re.escape(directive) + r"\s+(\d+)(?:\s*,\s*(\d+))?(?:\s*,\s*(\d+))?", self.entry.directives)
        return (int(match[1]), int(match[2] or 1), int(match[3] or 1)) if match else None

    def _params(self) -> list[Param]:
        params, offset = [], 0
        for text in split_arguments(self.entry.raw_params):
            match = _PARAM.match(text)
            if match is None:
                raise PtxSyntaxError(f"line {self.entry.statement.line}: parameter {text!r}")
            size = SIZES[match["type"]] * int(match["count"] or 1)
            align = SIZES[match["type"]]
            if match["align"] and not match["ptr"]:
                align = max(align, int(match["align"]))
            offset = align_up(offset, align)
            params.append(Param(match["name"], match["type"], offset, size, align))
            offset += size
        return params

    def _place_dynamic(self) -> int:
        """Dynamic shared memory follows the static; every extern array starts there."""
        external = [v for v in self.shared.values() if v.external]
        start = align_up(self.shared_end, max([16, *(v.align for v in external)]))
        for v in external:
            v.offset = start
            self.module.addresses[v.name] = Address("shared", start, v.name)
        return start

    # Statements -------------------------------------------------------------------------------------------------------
    def _body(self, body: list[Statement], scope: _Scope, calls: tuple[str, ...]) -> None:
        current = scope
        last_label = ""
        for s in body:
            text = s.text
            if text == "{":
                current = _Scope(current)
            elif text == "}":
                if current.parent is None or current is scope:
                    raise PtxSyntaxError(f"line {s.line}: a brace that closes nothing")
                current = current.parent
            elif text.endswith(":"):
                last_label = text[:-1]
                if last_label in current.labels:
                    raise PtxSyntaxError(f"line {s.line}: a second label {last_label!r} in one scope")
                current.labels[last_label] = Label(last_label, len(self.pending))
                self.labels.setdefault(last_label, len(self.pending))
            elif text.startswith(".branchtargets"):
                current.targets[last_label] = split_arguments(text[len(".branchtargets") :])
            else:
                try:
                    if text[0] == ".":
                        self._directive(text, s, current)
                    else:
                        self._statement(text, s, current, calls)
                except _MALFORMED as reason:
                    raise _unreadable(s, reason) from reason

    def _directive(self, text: str, s: Statement, scope: _Scope) -> None:
        if text.startswith(".loc "):
            parts = text.replace(",", " ").split()
            self.loc = (self.module.module.files.get(int(parts[1]), parts[1]), int(parts[2]))
        elif text.startswith(".reg"):
            match = re.match(r"\.reg\s*\.(\w+)\s+(.*)", text)
            if match is None:
                raise PtxSyntaxError(f"line {s.line}: {text!r}")
            for name in split_arguments(match[2]):
                ranged = _REGISTER_RANGE.fullmatch(name)
                if (int(ranged[2]) if ranged else 1) + sum(self.counts.values()) > _MAX_REGISTERS:
                    raise PtxSyntaxError(f"line {s.line}: more than {_MAX_REGISTERS} registers")
                names = [f"{ranged[1]}{i}" for i in range(int(ranged[2]))] if ranged else [name]
                for n in names:
                    scope.registers[n] = self._new_register(match[1], s)
        elif match := _VARIABLE.match(text):
            self._local_variable(match, s, scope)
        elif re.match(r"\.(extern|global|const|shared|local|param)\b", text):
            raise PtxSyntaxError(f"line {s.line}: {text[:80]!r} declares nothing that can be read")

    def _new_register(self, kind: str, s: Statement) -> Reg:
        cls = "p" if kind == "pred" else CLASS_OF_SIZE.get(SIZES.get(kind, 0))
        if cls is None:
            raise PtxSyntaxError(f"line {s.line}: registers of type .{kind}")
        self.counts[cls] += 1
        return Reg(cls, self.counts[cls] - 1)

    def _local_variable(self, match: re.Match, s: Statement, scope: _Scope) -> None:
        size, align = _extent(match)
        space, name = match["space"], match["name"]
        if space == "shared":
            if name not in self.shared:
                if "extern" in match["prefix"]:
                    self.shared[name] = Variable(name, space, -1, 0, align, external=True)
                    return
                offset = align_up(self.shared_end, align)
                self.shared_end = offset + size
                self.shared[name] = Variable(name, space, offset, size, align)
            if self.shared[name].offset >= 0:
                scope.variables[name] = Address(space, self.shared[name].offset, name)
        elif space in ("local", "param"):  # a .param inside a body passes arguments of a call
            offset = align_up(self.local_end, max(align, 8 if space == "param" else 1))
            self.local_end = offset + max(size, 1)
            scope.variables[name] = Address("local", offset, name)
        else:
            self.module._variable(match, s)

    def _statement(self, text: str, s: Statement, scope: _Scope, calls: tuple[str, ...]) -> None:
        bare = text.split(None, 1)[1] if text[0] == "@" else text
        match = _MNEMONIC.match(bare)
        if match is None:
            raise PtxSyntaxError(f"line {s.line}: {text!r}")
        word = match.group(0)
        arguments = split_arguments(bare[match.end() :])
        if word.startswith("call"):
            function = self._called(arguments)
            if function is not None:
                self._inline(function, text, arguments, s, scope, calls)
                return
        if word in ("ret", "ret.uni"):
            target = _return_label(scope)
            if target is not None:
                text, word, arguments = text.replace(word, f"bra {target}", 1), "bra", [target]
        self.pending.append((word, text, arguments, s, scope, self.loc))

    def _called(self, arguments: list[str]) -> _Function | None:
        return next((self.module.functions[a] for a in arguments if a in self.module.functions), None)

    def _inline(
        self, f: _Function, text: str, arguments: list[str], s: Statement, scope: _Scope, calls: tuple[str, ...]
    ) -> None:
        if f.name in calls or len(calls) > _MAX_INLINE_DEPTH:
            raise PtxSyntaxError(f"line {s.line}: recursion through {f.name!r} is not supported")
        lists = [split_arguments(a[1:-1]) for a in arguments if a.startswith("(")]
        results = lists[0] if f.results and lists else []
        values = lists[-1] if f.params and lists else []
        self.inlined += 1
        done = f"$return_{self.inlined}"
        if text[0] == "@":  # a guarded call: jump over the body
            guard = text.split()[0]
            opposite = "@" + (guard[2:] if guard[1] == "!" else "!" + guard[1:])
            self.pending.append(("bra", f"{opposite} bra {done}", [done], s, scope, self.loc))
        inner = _Scope(scope, return_label=done, barrier=True)
        for formal, actual in zip(f.params + f.results, values + results, strict=True):
            address = scope.find("variables", actual)
            if not isinstance(address, Address):
                raise PtxSyntaxError(f"line {s.line}: argument {actual!r} of {f.name!r} is no .param variable")
            inner.variables[formal] = address
        inner.labels[done] = Label(done, -1)
        self._body(f.body, inner, (*calls, f.name))
        label = Label(done, len(self.pending))
        inner.labels[done] = scope.labels[done] = label

    # Operands ---------------------------------------------------------------------------------------------------------
    def _instruction(
        self, word: str, text: str, arguments: list[str], s: Statement, scope: _Scope, loc: tuple[str, int] | None
    ) -> Instruction:
        op, *mods = word.split(".")
        pred = None
        if text[0] == "@":
            name = text.split()[0][1:]
            found = scope.find("registers", name.lstrip("!"))
            if not isinstance(found, Reg):
                raise PtxSyntaxError(f"line {s.line}: predicate {name!r}")
            if found.cls != "p":
                raise PtxSyntaxError(f"line {s.line}: {name!r} guards {text!r} and is no predicate")
            pred = Reg("p", found.index, name[0] == "!")
        values = tuple(self._operand(a, s, scope) for a in arguments)
        return Instruction(op, tuple(mods), pred, values, text, s.line, loc, len(self.instructions))

    def _operand(self, text: str, s: Statement, scope: _Scope) -> object:
        first = text[0]
        if first in "{(":
            return Vec(tuple(self._operand(a, s, scope) for a in split_arguments(text[1:-1])))
        if first == "[":
            parts = split_arguments(text[1:-1])
            base = self._address(parts[0], s, scope)
            if len(parts) == 1:
                return base
            return TensorMem(base, tuple(self._operand(p, s, scope) for p in parts[1:]))
        if "|" in text:
            a, b = text.split("|")
            return Pair(self._operand(a.strip(), s, scope), self._operand(b.strip(), s, scope))
        if text == "_":
            return Sink()
        if first == "!":
            found = scope.find("registers", text[1:].strip())
            if isinstance(found, Reg):
                return Reg(found.cls, found.index, True)
        found = scope.find("registers", text)
        if found is not None:
            return found
        if first == "%":
            return Special(text[1:])
        number = _number(text)
        return number if number is not None else self._name(text, s, scope)

    def _address(self, text: str, s: Statement, scope: _Scope) -> Mem:
        match = re.fullmatch(r"(.+?)\s*\+\s*(-?\w+)", text)
        base, offset = (match[1], int(match[2], 0)) if match else (text, 0)
        value = self._operand(base, s, scope)
        if isinstance(value, Address):
            return Mem(Address(value.space, value.offset + offset, value.name))
        return Mem(value, offset)

    def _name(self, text: str, s: Statement, scope: _Scope) -> object:
        match = re.fullmatch(r"([$\w]+)\s*\+\s*(\d+)", text)
        name, addend = (match[1], int(match[2])) if match else (text, 0)
        found = scope.find("variables", name) or self.module.addresses.get(name)
        if isinstance(found, Address):
            return Address(found.space, found.offset + addend, name)
        targets = scope.find("targets", name)
        if isinstance(targets, list):
            return Targets(tuple(self._target(t, s, scope) for t in targets))
        label = scope.find("labels", name)
        if isinstance(label, Label):
            return label
        if re.fullmatch(r"[$\w]+", name):
            return Name(name)
        raise PtxSyntaxError(f"line {s.line}: operand {text!r} of {s.text!r}")

    def _target(self, name: str, s: Statement, scope: _Scope) -> int:
        label = scope.find("labels", name)
        if not isinstance(label, Label):
            raise PtxSyntaxError(f"line {s.line}: no label {name!r}")
        return label.target


def _return_label(scope: _Scope | None) -> str | None:
    while scope is not None:
        if scope.return_label is not None:
            return scope.return_label
        scope = scope.parent
    return None
