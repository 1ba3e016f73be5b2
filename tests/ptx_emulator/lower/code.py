"""The Python text of one straight-line run of instructions.

A run becomes `f(v, m)`: v is a `View` of 32 or 128 threads (warp.py), m the mask of active threads (None = all).
Registers are rows of numpy arrays: one ufunc call does a whole warp, or four warps that go in step.

What a generator (`@generated`) uses:
    src(operand, type)        expression: an array [width] of the type's dtype, or a numpy scalar
    dst(operand, type, expr)  statement: assign where active, widening into a wider register as PTX says (loads, cvt)
    ufunc(name, dst, type, a, b, ...)   the same for one numpy ufunc, written into the register without a copy
    const(value)              name of a constant;  helper(function) name of a Python function
    temp(expr)                name of a local that holds it;  line(text)
    mask                      "None" or the name of the mask of this instruction
"""

from __future__ import annotations

import numpy as np

from ..ir import Address, Imm, Instruction, Kernel, Mem, Reg, Sink, Special
from ..registry import Unsupported
from ..special_registers import NAMES
from ..warp import DTYPES

# Types held as bits, and the register list that holds them.
BITS_OF = {
    **dict.fromkeys(("b8", "u8", "b16", "bf16", "e4m3x2", "e5m2x2"), "u16"),
    "s8": "s16",
    **dict.fromkeys(("b32", "f16x2", "bf16x2", "tf32", "u16x2", "s16x2"), "u32"),
    **dict.fromkeys(("b64", "f32x2"), "u64"),
}
CLASS_BITS = {"h": 16, "w": 32, "d": 64}


def view_type(kind: str) -> str:
    """The View list that holds a PTX type: b32 -> u32, bf16 -> u16, f32 -> f32."""
    return BITS_OF.get(kind, kind)


class Code:
    def __init__(self, kernel: Kernel, masked: bool) -> None:
        self.kernel = kernel
        self.masked = masked
        self.lines: list[str] = []
        self.names: dict[str, object] = {"np": np, "copyto": np.copyto}
        self.instruction: Instruction | None = None
        self.mask = "None"
        self._count = 0
        self._lists: set[str] = set()

    # Names ------------------------------------------------------------------------------------------------------------
    def const(self, value: object) -> str:
        name = f"c{len(self.names)}"
        self.names[name] = value
        return name

    def helper(self, function: object) -> str:
        """Name of a Python object inside the generated text."""
        for name, known in self.names.items():
            if known is function:
                return name
        return self.const(function)

    def line(self, text: str) -> None:
        self.lines.append(text)

    def temp(self, expression: str) -> str:
        self._count += 1
        name = f"t{self._count}"
        self.lines.append(f"{name}={expression}")
        return name

    # Instructions -----------------------------------------------------------------------------------------------------
    def begin(self, instruction: Instruction) -> None:
        """Sets the mask of an instruction from its predicate."""
        self.instruction = instruction
        self.mask = "m" if self.masked else "None"
        if instruction.pred is not None:
            guard = self.predicate(instruction.pred)
            self.mask = self.temp(f"m&{guard}" if self.masked else f"{guard}" + ("" if guard[0] == "~" else ".copy()"))

    def predicate(self, reg: Reg) -> str:
        return ("~" if reg.negated else "") + f"{self._list('p')}[{reg.index}]"

    def _list(self, name: str) -> str:
        self._lists.add(name)
        return f"L{name}"

    # Operands ---------------------------------------------------------------------------------------------------------
    def src(self, operand: object, kind: str) -> str:
        if isinstance(operand, Reg):
            return self._register(operand, kind)
        if isinstance(operand, Imm):
            return self._immediate(operand, kind)
        if isinstance(operand, Special):
            if operand.name not in NAMES:
                raise Unsupported(f"special register %{operand.name}")
            value = f"v.special({operand.name!r})"
            dtype = DTYPES[view_type(kind)]
            return value if dtype is np.uint32 else f"{value}.astype({self.helper(dtype)})"
        if isinstance(operand, Address):
            dtype = DTYPES[view_type(kind)]
            return f"{self.helper(dtype)}(v.address({operand.space!r},{operand.offset}))"
        raise Unsupported(f"operand {operand!r} as .{kind}")

    def _register(self, reg: Reg, kind: str) -> str:
        if reg.cls == "p":
            return self.predicate(reg)
        if reg.cls == "q":
            return f"{self._list('q')}[{reg.index}]"
        want = view_type(kind)
        if want == "pred":
            raise Unsupported(f"a {CLASS_BITS[reg.cls]}-bit register as predicate")
        bits = int(want[1:])
        have = CLASS_BITS[reg.cls]
        if bits == have:
            return f"{self._list(want)}[{reg.index}]"
        if bits < have:  # the low part, as st and cvt read wider registers
            unsigned = f"{self._list(f'u{have}')}[{reg.index}].astype({self.helper(DTYPES[f'u{bits}'])})"
            return unsigned if want[0] == "u" else f"{unsigned}.view({self.helper(DTYPES[want])})"
        sign = "s" if want[0] == "s" else "u"
        return f"{self._list(f'{sign}{have}')}[{reg.index}].astype({self.helper(DTYPES[want])})"

    def _immediate(self, operand: Imm, kind: str) -> str:
        if kind == "pred":
            return f"{self.helper(np.bool_)}({bool(operand.value)})"
        want = view_type(kind)
        size = int(want[1:]) // 8
        value = operand.value & ((1 << 8 * size) - 1)
        if want == "f64" and operand.bits == 32:
            return self.const(np.float64(np.frombuffer(operand.value.to_bytes(4, "little"), np.float32)[0]))
        if want == "f32" and operand.bits == 64:
            return self.const(np.float32(np.frombuffer(operand.value.to_bytes(8, "little"), np.float64)[0]))
        return self.const(np.frombuffer(value.to_bytes(size, "little"), DTYPES[want])[0])

    def target(self, operand: Reg, kind: str) -> str:
        """The array that a destination register is, seen as `kind`."""
        if operand.cls == "p":
            return f"{self._list('p')}[{operand.index}]"
        if operand.cls == "q":
            return f"{self._list('q')}[{operand.index}]"
        return f"{self._list(view_type(kind))}[{operand.index}]"

    def dst(self, operand: object, kind: str, expression: str) -> None:
        if isinstance(operand, Sink):
            self.line(expression)
            return
        if not isinstance(operand, Reg):
            raise Unsupported(f"destination {operand!r}")
        want = view_type(kind)
        if operand.cls in CLASS_BITS and want != "pred" and int(want[1:]) != CLASS_BITS[operand.cls]:
            if int(want[1:]) > CLASS_BITS[operand.cls]:
                raise Unsupported(f"a .{kind} value into a {CLASS_BITS[operand.cls]}-bit register")
            # A wider register takes the value sign-extended for signed types, else zero-extended.
            if want[0] == "f":
                expression = f"({expression}).view({self.helper(DTYPES['u' + want[1:]])})"
            want = ("s" if want[0] == "s" else "u") + str(CLASS_BITS[operand.cls])
        array = self.target(operand, want)
        if self.mask == "None":
            self.line(f"{array}[...]={expression}")
        else:
            self.line(f"copyto({array},{expression},where={self.mask},casting='unsafe')")

    def ufunc(self, name: str, operand: object, kind: str, *sources: str) -> None:
        """`operand = np.name(*sources)`; the ufunc's result dtype must be that of the type."""
        function = self.helper(getattr(np, name))
        want = view_type(kind)
        if isinstance(operand, Reg) and operand.cls in CLASS_BITS and int(want[1:]) == CLASS_BITS[operand.cls]:
            where = "" if self.mask == "None" else f",where={self.mask}"
            self.line(f"{function}({','.join(sources)},out={self.target(operand, want)}{where})")
        else:
            self.dst(operand, kind, f"{function}({','.join(sources)})")

    def address(self, operand: object) -> str:
        """int64 array or scalar: the address of a bracket, as its registers hold it."""
        if not isinstance(operand, Mem):
            raise Unsupported(f"address {operand!r}")
        if isinstance(operand.base, Address):
            return f"v.address({operand.base.space!r},{operand.base.offset + operand.offset})"
        if isinstance(operand.base, Imm):
            return str(operand.base.value + operand.offset)
        if not isinstance(operand.base, Reg) or operand.base.cls not in ("w", "d"):
            raise Unsupported(f"address {operand!r}")
        if operand.base.cls == "d":
            value = f"{self._list('s64')}[{operand.base.index}]"
        else:
            value = f"{self._list('u32')}[{operand.base.index}].astype({self.helper(np.int64)})"
        return f"({value}+{operand.offset})" if operand.offset else value

    # Result -----------------------------------------------------------------------------------------------------------
    def build(self, title: str) -> object:
        head = "".join(f" L{name}=v.{name}\n" for name in sorted(self._lists))
        body = "".join(f" {line}\n" for text in self.lines for line in text.split("\n"))
        source = f"def f(v,m):\n{head}{body or ' pass'}"
        exec(compile(source, title, "exec"), self.names)
        function = self.names["f"]
        function.source = source  # type: ignore[attr-defined]
        return function
