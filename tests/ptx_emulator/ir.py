"""What the parser makes of PTX text: modules, functions, instructions and their operands.

Registers are numbered per class of width, over the whole kernel: `Reg("w", 5)` is row 5 of the 32-bit register file.
Addresses of variables are `Address(space, offset)`; what their base is, is known only at a launch.
"""

from __future__ import annotations

from dataclasses import dataclass, field

# Bytes of a value of each type.
SIZES = {
    **dict.fromkeys(("b8", "u8", "s8", "e4m3", "e5m2"), 1),
    **dict.fromkeys(("b16", "u16", "s16", "f16", "bf16", "e4m3x2", "e5m2x2"), 2),
    **dict.fromkeys(("b32", "u32", "s32", "f32", "f16x2", "bf16x2", "tf32", "u16x2", "s16x2"), 4),
    **dict.fromkeys(("b64", "u64", "s64", "f64", "f32x2"), 8),
    "b128": 16,
}
# Register class by size in bytes; predicates have their own.
CLASS_OF_SIZE = {1: "h", 2: "h", 4: "w", 8: "d", 16: "q"}


@dataclass(frozen=True)
class Reg:
    cls: str  # "p" predicate, "h" 16, "w" 32, "d" 64, "q" 128 bits
    index: int
    negated: bool = False  # !%p


@dataclass(frozen=True)
class Imm:
    value: int  # raw bits of a float, or a signed or unsigned integer
    bits: int = 0  # 32 or 64 where the text states a float, else 0


@dataclass(frozen=True)
class Vec:
    items: tuple


@dataclass(frozen=True)
class Mem:
    base: object  # Reg, Imm or Address
    offset: int = 0


@dataclass(frozen=True)
class TensorMem:
    """`[map, {coordinates}]`, or any bracket of several parts."""

    base: object
    parts: tuple


@dataclass(frozen=True)
class Pair:
    first: object
    second: object


@dataclass(frozen=True)
class Special:
    name: str  # "tid.x", "laneid", ...


@dataclass(frozen=True)
class Address:
    space: str  # "param", "shared", "global", "const", "local"
    offset: int
    name: str = ""


@dataclass(frozen=True)
class Label:
    name: str
    target: int  # index of an instruction


@dataclass(frozen=True)
class Targets:
    """The list that brx.idx jumps through."""

    targets: tuple[int, ...]


@dataclass(frozen=True)
class Name:
    """An identifier that names a function or a prototype."""

    name: str


@dataclass(frozen=True)
class Sink:
    pass


@dataclass(slots=True)
class Instruction:
    op: str
    mods: tuple[str, ...]
    pred: Reg | None
    args: tuple
    text: str  # as in the PTX, blanks squeezed
    line: int  # of the PTX text, from 1
    loc: tuple[str, int] | None  # file and line of the source, from .loc
    index: int = 0

    @property
    def name(self) -> str:
        return ".".join((self.op, *self.mods))

    @property
    def type(self) -> str:
        """The last modifier that is a type; "" where there is none."""
        return next((m for m in reversed(self.mods) if m in SIZES or m == "pred"), "")

    def has(self, modifier: str) -> bool:
        return modifier in self.mods

    def registers(self) -> list[Reg]:
        """Every register that it names, read or written, its predicate included."""
        found: list[Reg] = [] if self.pred is None else [self.pred]
        stack = list(self.args)
        while stack:
            a = stack.pop()
            if isinstance(a, Reg):
                found.append(a)
            elif isinstance(a, Vec):
                stack.extend(a.items)
            elif isinstance(a, Mem):
                stack.append(a.base)
            elif isinstance(a, TensorMem):
                stack.append(a.base)
                stack.extend(a.parts)
            elif isinstance(a, Pair):
                stack.extend((a.first, a.second))
        return found

    def where(self) -> str:
        source = f" ({self.loc[0]}:{self.loc[1]})" if self.loc else ""
        return f"line {self.line}{source}: {self.text}"


@dataclass(frozen=True)
class Param:
    name: str
    type: str  # "b8" with count > 1 for structs and tensor maps
    offset: int
    size: int
    align: int


@dataclass
class Variable:
    name: str
    space: str  # "shared", "global", "const", "local"
    offset: int
    size: int
    align: int
    data: bytes = b""  # initial value, shorter than size where the rest is zero
    relocations: list[tuple[int, str, int]] = field(default_factory=list)  # (offset, variable, addend)
    external: bool = False  # dynamic shared memory: it starts after the static


@dataclass
class Kernel:
    name: str
    params: list[Param]
    instructions: list[Instruction]
    register_counts: dict[str, int]
    shared: dict[str, Variable]
    static_shared: int  # bytes; dynamic shared memory starts at dynamic_shared_offset
    dynamic_shared_offset: int
    local_bytes: int  # per thread
    required_block: tuple[int, int, int] | None
    max_block: tuple[int, int, int] | None
    cluster: tuple[int, int, int] | None
    labels: dict[str, int]

    def leaders(self) -> set[int]:
        """Instructions that something jumps to, and the first."""
        found = {0}
        for i in self.instructions:
            for a in i.args:
                if isinstance(a, Label):
                    found.add(a.target)
                elif isinstance(a, Targets):
                    found.update(a.targets)
        return found

    @property
    def param_bytes(self) -> int:
        return max((p.offset + p.size for p in self.params), default=0)


@dataclass
class ParsedModule:
    version: str
    target: str
    kernels: dict[str, Kernel]
    variables: dict[str, Variable]  # global and const
    files: dict[int, str]
    text: str
