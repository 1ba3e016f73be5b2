"""A GPU to run kernels on: global memory, arguments, the grid, and what a run reports."""

from __future__ import annotations

import operator
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from .cta import Cta
from .errors import KINDS, EmulatorError, Finding, LaunchError, UnknownInstructions
from .hb import HOST, Order, Shadow, Token
from .ir import SIZES, Kernel, ParsedModule
from .memory import GLOBAL_BASE, Buffer, GlobalMemory, Memory
from .parse import align_up, parse
from .program import Program
from .schedule import ORDERS, SCHEDULES, run_grid
from .tensor_map import TensorMap, encode
from .warp import RegisterFile

MAX_SHARED = 227 * 1024
MAX_THREADS = 1024
MAX_GRID = ((1 << 31) - 1, 65535, 65535)
MAX_BLOCK = (1024, 1024, 64)
# Findings that a correct kernel of another compiler may have: see README.
DEFAULT_SEVERITY = dict.fromkeys(("tcgen05-fence", "leftover", "same-value", "late-arrival", "proxy-reuse"), "lint")
STRICT_SEVERITY: dict[str, str] = {}


@dataclass(frozen=True)
class Options:
    """How a launch is run.

    race       happens-before checks (on by default)
    strict     our own kernels: tcgen05 fences and clean ends are demanded, only bar.warp.sync orders lanes of a warp
    schedule   "earliest": engines work at once; "latest": as late as possible; "random": all interleaves, by seed
    order      of the blocks: "forward", "reversed", "shuffled" (by seed)
    resident   blocks (clusters) that run side by side; more are started when those only spin
    severity   kind -> "error", "lint" or "ignore", over the defaults (errors.KINDS has the kinds)
    collect    findings go to Report.findings and the run continues where it can
    spurious   try_wait may fail without reason (random schedule)
    """

    race: bool = True
    strict: bool = False
    schedule: str = "earliest"
    seed: int = 0
    order: str = "forward"
    resident: int = 1
    severity: dict[str, str] = field(default_factory=dict)
    collect: bool = False
    spurious: bool = True
    max_instructions: int = 20_000_000

    def __post_init__(self) -> None:
        for name, allowed in (("schedule", SCHEDULES), ("order", ORDERS)):
            if getattr(self, name) not in allowed:
                raise LaunchError(f"{name}={getattr(self, name)!r}: allowed are {', '.join(allowed)}")
        for name, least in (("resident", 1), ("max_instructions", 1), ("seed", 0)):
            number = getattr(self, name)
            if not isinstance(number, (int, np.integer)) or number < least:
                raise LaunchError(f"{name}={number!r}: a whole number of at least {least}")
        if not isinstance(self.severity, dict):
            raise LaunchError(f"severity={self.severity!r}: a dict, kind -> level")
        for kind, level in self.severity.items():
            if kind not in KINDS or level not in ("error", "lint", "ignore"):
                raise LaunchError(
                    f"severity {kind!r}: {level!r}: kinds are {', '.join(KINDS)}; levels error, lint, ignore"
                )


@dataclass
class Report:
    """What a launch did. Counts are of warp instructions; bytes are those that instructions and engines moved."""

    kernel: str
    instructions: int = 0
    counts: dict[str, int] = field(default_factory=dict)  # opcode -> executions by a warp
    bytes: dict[str, int] = field(default_factory=dict)  # path -> bytes
    blocks: int = 0
    shared_bytes: int = 0
    peak_tensor_columns: int = 0
    barriers: int = 0  # mbarriers initialised
    phases: int = 0  # phases completed
    events: int = 0
    useful: set[int] = field(default_factory=set)  # waits (instruction numbers) that ordered something
    findings: list[Finding] = field(default_factory=list)
    lints: list[Finding] = field(default_factory=list)  # noted, each message once


class Module:
    """A parsed module; kernels are lowered when first launched (`load` lowers all, to show unknown opcodes)."""

    def __init__(self, parsed: ParsedModule) -> None:
        self.parsed = parsed
        self.programs: dict[str, Program] = {}

    def program(self, name: str | None) -> Program:
        kernels = self.parsed.kernels
        if name is None:
            if len(kernels) != 1:
                raise LaunchError(f"kernel=None: the module has {len(kernels)}: {', '.join(kernels)}")
            name = next(iter(kernels))
        if name not in kernels:
            raise LaunchError(f"kernel={name!r}: the module has {', '.join(kernels)}")
        if name not in self.programs:
            self.programs[name] = Program(kernels[name])
        return self.programs[name]


def load(text: str) -> Module:
    """Parses and lowers PTX. Raises `PtxSyntaxError`, or `UnknownInstructions` with all that the module lacks."""
    module = Module(parse(text))
    missing: dict[str, str] = {}
    for name in module.parsed.kernels:
        try:
            module.program(name)
        except UnknownInstructions as unknown:
            missing = {**unknown.missing, **missing}
    if missing:
        raise UnknownInstructions(missing)
    return module


class Device:
    """Global memory of one GPU, and launches on it."""

    def __init__(self, bytes: int = 256 << 20) -> None:
        if not isinstance(bytes, (int, np.integer)) or bytes < 0:
            raise LaunchError(f"bytes={bytes!r}: a whole number")
        self.memory = GlobalMemory(bytes)
        self.tensor_maps: list[TensorMap] = []
        self._variables: dict[Module, tuple[int, Memory]] = {}

    def upload(self, array: np.ndarray) -> Buffer:
        """Copies an array into new global memory."""
        array = np.asarray(array)
        if array.dtype.hasobject:
            raise LaunchError(f"array: {array.dtype} has no bytes; numbers are needed")
        return self.memory.upload(array)

    def empty(self, shape: int | Sequence[int], dtype: Any) -> Buffer:
        """New global memory; reading it before writing is a finding."""
        try:
            shape = tuple(operator.index(n) for n in ((shape,) if np.ndim(shape) == 0 else shape))  # type: ignore[arg-type,union-attr]
            kind = np.dtype(dtype)
        except TypeError as reason:
            raise LaunchError(f"shape={shape!r}, dtype={dtype!r}: {reason}") from None
        if min(shape, default=0) < 0 or kind.hasobject:
            raise LaunchError(f"shape={shape!r}, dtype={dtype!r}: no memory has these")
        return self.memory.empty(shape, kind)

    def tensor_map(self, buffer: Buffer, **kwargs: Any) -> TensorMap:
        """A tiled tensor map of `buffer`; arguments as tensor_map.encode."""
        made = encode(len(self.tensor_maps), buffer, **kwargs)
        self.tensor_maps.append(made)
        return made

    def variables(self, module: Module) -> tuple[int, Memory]:
        """(offset of the module's .global variables, its constant bank), made at the first launch."""
        if module not in self._variables:
            placed = [v for v in module.parsed.variables.values()]
            size = max((v.offset + v.size for v in placed if v.space == "global"), default=0)
            base = self.memory.allocate(size, True)
            constant = Memory("const", max((v.offset + v.size for v in placed if v.space == "const"), default=0) + 16)
            for v in placed:
                data = bytearray(v.data.ljust(v.size, b"\0"))
                for at, name, addend in v.relocations:
                    target = module.parsed.variables[name]
                    start = GLOBAL_BASE + base if target.space == "global" else 0
                    data[at : at + 8] = (start + target.offset + addend).to_bytes(8, "little")
                where = self.memory.u8 if v.space == "global" else constant.u8
                start = v.offset + (base if v.space == "global" else 0)
                where[start : start + v.size] = np.frombuffer(bytes(data), np.uint8)
            self._variables[module] = (base, constant)
        return self._variables[module]

    def variable(self, module: Module, name: str, dtype: Any = np.uint8) -> np.ndarray:
        """Live view of a .global variable."""
        base, _ = self.variables(module)
        v = module.parsed.variables[name]
        return self.memory.u8[base + v.offset : base + v.offset + v.size].view(dtype)

    def launch(
        self,
        module: Module,
        grid: Sequence[int] = (1, 1, 1),
        block: Sequence[int] = (32, 1, 1),
        args: Sequence[Any] = (),
        kernel: str | None = None,
        shared: int = 0,
        cluster: Sequence[int] | None = None,
        options: Options | None = None,
    ) -> Report:
        """Runs a kernel to its end. `args` as the parameters: Buffer, TensorMap, int, float, numpy scalar or bytes.

        Raises `LaunchError` before anything ran, or a `Finding` of the run.
        """
        if not isinstance(module, Module) or not isinstance(options, (Options, type(None))):
            raise LaunchError(
                f"module and options: {type(module).__name__}, {type(options).__name__}; what load returns and Options"
            )
        launch = Launch(self, module, kernel, grid, block, cluster, shared, args, options or Options())
        # Overflow, invalid operations and division by zero are ordinary in float instructions.
        with np.errstate(all="ignore"):
            try:
                run_grid(launch)
            except (ArithmeticError, AttributeError, LookupError, TypeError, ValueError) as reason:
                raise _failed(launch, reason) from reason
            return launch.close()


def _failed(launch: Launch, reason: Exception) -> EmulatorError:
    """Operands that ptxas would refuse are not all checked here: a failure of Python's gets its PTX lines."""
    where = ""
    trace = reason.__traceback__
    while trace is not None:
        names = trace.tb_frame.f_locals
        if isinstance(names.get("pc"), int) and names["pc"] >= 0 and isinstance(names.get("steps"), list):
            step = names["steps"][names["pc"]]
            where = launch.program.instructions[names["pc"]].where()
            where += f" (one of {step.length} instructions from here)" if step.length > 1 else ""
        trace = trace.tb_next
    return EmulatorError(
        f"{launch.kernel.name}: {type(reason).__name__}: {reason}; an operand of a wrong kind (does ptxas accept it?), "
        f"or a defect of the emulator\n  {where}"
    )


def _triple(name: str, value: Any, most: tuple[int, int, int] = MAX_GRID) -> tuple[int, int, int]:
    try:
        parts = tuple(operator.index(v) for v in ((value,) if np.ndim(value) == 0 else value))
    except TypeError:
        parts = ()
    if not 1 <= len(parts) <= 3 or min(parts) < 1:
        raise LaunchError(f"{name}={value!r}: one to three positive numbers")
    x, y, z = (*parts, 1, 1)[:3]
    if x > most[0] or y > most[1] or z > most[2]:
        raise LaunchError(f"{name}={value!r}: at most {most}")
    return x, y, z


class Launch:
    """One launch: everything that its blocks share."""

    def __init__(
        self,
        device: Device,
        module: Module,
        kernel: str | None,
        grid: Sequence[int],
        block: Sequence[int],
        cluster: Sequence[int] | None,
        shared: int,
        args: Sequence[Any],
        options: Options,
    ) -> None:
        self.device = device
        self.options = options
        self.program = module.program(kernel)
        k = self.kernel = self.program.kernel
        self.program.reset_counts()  # of a launch that a finding ended
        self.grid, self.block = _triple("grid", grid), _triple("block", block)
        self.cluster = _triple("cluster", cluster or k.cluster or (1, 1, 1))
        self.threads = self.block[0] * self.block[1] * self.block[2]
        self.blocks = self.grid[0] * self.grid[1] * self.grid[2]
        if not isinstance(shared, (int, np.integer)) or shared < 0:
            raise LaunchError(f"shared={shared!r}: a whole number of bytes")
        self.shared_bytes = align_up(k.dynamic_shared_offset + shared if shared else k.static_shared, 16)
        self.dynamic_bytes = shared
        self._check_shape(k)
        self.params = Memory("param", k.param_bytes + 64)
        self._place_arguments(k, args)
        self.module_base, self.constant = device.variables(module)
        self.eager = options.schedule == "earliest"
        self.rng = np.random.default_rng(options.seed)
        self.report = Report(k.name, blocks=self.blocks, shared_bytes=self.shared_bytes)
        self.severity = {**(STRICT_SEVERITY if options.strict else DEFAULT_SEVERITY), **options.severity}
        self.initial = Token(1 << HOST | 1, 1 << HOST, 0)
        self.shared_granule, global_granule = granules(k)
        self.order: Order | None = None
        memory = device.memory
        memory.shadow = None
        if options.race:
            self.order = Order(self.finding, k.instructions)
            memory.shadow = Shadow("global memory", memory.top, global_granule, memory.written[: memory.top + 16])
        self._files: list[RegisterFile] = []
        self.queue: list[tuple[int, int, int]] = []  # clusters not started: cluster launch control takes from here
        self.instructions = 0
        self.polled = 0  # strong accesses since another block was started last
        self._noted: set[str] = set()
        self.clock = 0  # counted on by reads of the clock registers

    def _check_shape(self, k: Kernel) -> None:
        if self.blocks > self.options.max_instructions:
            raise LaunchError(
                f"grid={self.grid}: {self.blocks} blocks do not end within {self.options.max_instructions} instructions"
            )
        if self.threads > MAX_THREADS:
            raise LaunchError(f"block={self.block}: {self.threads} threads, at most {MAX_THREADS}")
        if any(n > most for n, most in zip(self.block, MAX_BLOCK, strict=True)):
            raise LaunchError(f"block={self.block}: at most {MAX_BLOCK}")
        for name, limit, exact in (("reqntid", k.required_block, True), ("maxntid", k.max_block, False)):
            if limit is None:
                continue
            allowed = limit[0] * limit[1] * limit[2]
            if (exact and self.block != limit) or self.threads > allowed:
                raise LaunchError(f"block={self.block}: the kernel was compiled with .{name} {limit}")
        if k.cluster is not None and self.cluster != k.cluster:
            raise LaunchError(f"cluster={self.cluster}: the kernel was compiled with .reqnctapercluster {k.cluster}")
        for g, c in zip(self.grid, self.cluster, strict=True):
            if g % c:
                raise LaunchError(f"grid={self.grid} is no multiple of cluster={self.cluster}")
        if self.cluster[0] * self.cluster[1] * self.cluster[2] > 16:
            raise LaunchError(f"cluster={self.cluster}: at most 16 blocks")
        if self.shared_bytes > MAX_SHARED:
            raise LaunchError(
                f"shared={self.dynamic_bytes}: {self.shared_bytes} bytes with the static, at most {MAX_SHARED}"
            )

    def _place_arguments(self, k: Kernel, args: Sequence[Any]) -> None:
        if not isinstance(args, Sequence):
            raise LaunchError(f"args={args!r}: a list, one for each of {len(k.params)} parameters")
        if len(args) != len(k.params):
            raise LaunchError(f"args: {len(args)} given, {k.name} has {len(k.params)} parameters")
        for p, value in zip(k.params, args, strict=True):
            data = _argument(p.name, p.type, p.size, value)
            self.params.u8[p.offset : p.offset + p.size] = np.frombuffer(data, np.uint8)

    # What blocks ask --------------------------------------------------------------------------------------------------
    def register_file(self, threads: int) -> RegisterFile:
        if self._files:
            file = self._files.pop()
            file.clear()
            return file
        return RegisterFile(self.kernel.register_counts, threads)

    def release(self, cta: Cta) -> None:
        self._files.append(cta.registers)

    def finding(self, error: type[Finding], message: str) -> None:
        """A failed check, by severity: raised, collected, noted or ignored."""
        level = self.severity.get(error.kind, "error")
        if level == "ignore":
            return
        found = error(message)
        if level == "lint":
            if message not in self._noted:
                self._noted.add(message)
                self.report.lints.append(found)
            return
        if not self.options.collect:
            raise found
        self.report.findings.append(found)

    def count_bytes(self, path: str, n: int) -> None:
        self.report.bytes[path] = self.report.bytes.get(path, 0) + n

    def close(self) -> Report:
        memory = self.device.memory
        if memory.shadow is not None:
            written = np.repeat(memory.shadow.writer != 0, memory.shadow.granule)[: memory.top]
            memory.written[: len(written)] |= written
            memory.shadow = None
        else:
            memory.written[: memory.top] |= memory.valid[: memory.top]
        counts: dict[str, int] = {}
        for n, step in enumerate(self.program.steps):
            if step is not None and step.count:
                for i in self.program.instructions[n : n + step.length]:
                    counts[i.name] = counts.get(i.name, 0) + step.count
        self.program.reset_counts()
        self.report.counts = counts
        self.report.instructions = sum(counts.values())
        self.report.events = len(self.order.kinds) if self.order else 0
        return self.report


def _argument(name: str, kind: str, size: int, value: Any) -> bytes:
    if isinstance(value, Buffer):
        data = struct.pack("<Q", value.address)
    elif isinstance(value, TensorMap):
        data = value.bytes
    elif isinstance(value, (bytes, bytearray)):
        data = bytes(value)
    elif isinstance(value, np.generic):
        data = value.tobytes()
    elif isinstance(value, float):
        data = struct.pack({4: "<f", 8: "<d", 2: "<e"}.get(size, "<d"), value)
    elif isinstance(value, (int, bool)):
        if not -(1 << 8 * size - 1) <= value < 1 << 8 * size:
            raise LaunchError(f"argument {name!r}: {value} does not fit in .{kind}")
        data = (value & ((1 << 8 * size) - 1)).to_bytes(size, "little")
    else:
        raise LaunchError(f"argument {name!r}: {type(value).__name__}; a Buffer, TensorMap, number or bytes is allowed")
    if len(data) != size:
        raise LaunchError(f"argument {name!r}: {len(data)} bytes given, .{kind} parameter of {size} bytes")
    return data


def granules(kernel: Kernel) -> tuple[int, int]:
    """Bytes of a granule of shared and of global memory: the smallest access that the kernel makes there, at most 4."""
    smallest = {"shared": 4, "global": 4}
    for i in kernel.instructions:
        if i.op not in ("ld", "st", "atom", "red", "ldu", "multimem") or "param" in i.mods:
            continue
        size = SIZES.get(i.type, 4)
        spaces: Iterable[str] = [s for s in smallest if any(m.startswith(s) for m in i.mods)] or smallest
        for s in spaces:
            smallest[s] = min(smallest[s], size)
    return smallest["shared"], smallest["global"]
