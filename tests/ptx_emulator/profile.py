"""A launch in a page: instructions by class, bytes by path, peak shared and tensor memory, barriers."""

from __future__ import annotations

from .launch import Report

# First prefix that fits decides.
CLASSES = (
    ("tensor core", ("tcgen05.mma", "wgmma.mma_async", "mma")),
    ("tensor memory", ("tcgen05.ld", "tcgen05.st", "tcgen05.cp", "tcgen05.shift", "tcgen05.alloc", "tcgen05.dealloc")),
    ("tensor core control", ("tcgen05", "wgmma")),
    ("asynchronous copy", ("cp", "st.async", "red.async", "prefetch", "tensormap")),
    (
        "barrier",
        ("mbarrier", "bar", "barrier", "fence", "membar", "clusterlaunchcontrol", "griddepcontrol", "nanosleep"),
    ),
    ("matrix fragments", ("ldmatrix", "stmatrix", "movmatrix")),
    ("atomic", ("atom", "red")),
    ("load and store", ("ld", "ldu", "st")),
    ("across lanes", ("shfl", "vote", "match", "redux", "elect", "activemask")),
    ("control flow", ("bra", "brx", "ret", "exit", "call", "trap")),
    ("conversion", ("cvt", "cvta")),
    ("special function", ("ex2", "lg2", "rcp", "rsqrt", "sqrt", "sin", "cos", "tanh", "div")),
    ("predicate", ("setp", "set", "selp", "slct")),
    ("move", ("mov", "prmt", "mapa", "getctarank")),
)
FLOAT_TYPES = ("f16", "bf16", "f16x2", "bf16x2", "f32", "f32x2", "f64")


def class_of(name: str) -> str:
    """Class of an instruction by its dotted name."""
    for title, prefixes in CLASSES:
        if any(name == p or name.startswith(p + ".") for p in prefixes):
            return title
    return "float arithmetic" if any(part in FLOAT_TYPES for part in name.split(".")) else "integer arithmetic"


def by_class(report: Report) -> dict[str, int]:
    """Warp instructions of each class, most first."""
    totals: dict[str, int] = {}
    for name, n in report.counts.items():
        title = class_of(name)
        totals[title] = totals.get(title, 0) + n
    return dict(sorted(totals.items(), key=lambda item: -item[1]))


def summary(report: Report, seconds: float | None = None) -> str:
    """Text of a launch for a reader."""
    rate = f", {report.instructions / seconds / 1e3:.0f}k/s" if seconds else ""
    lines = [
        f"{report.kernel}: {report.blocks} blocks, {report.instructions} warp instructions{rate}",
        "",
        "instructions by class",
    ]
    lines += [
        f"  {n:>10}  {100 * n / max(1, report.instructions):5.1f} %  {title}" for title, n in by_class(report).items()
    ]
    lines += ["", "bytes by path"]
    lines += [f"  {n:>12}  {path}" for path, n in sorted(report.bytes.items(), key=lambda item: -item[1])] or ["  none"]
    lines += [
        "",
        f"shared memory      {report.shared_bytes} bytes a block",
        f"tensor memory      {report.peak_tensor_columns} columns at most",
        f"mbarriers          {report.barriers} initialised, {report.phases} phases completed",
        f"ordering events    {report.events}",
        f"lints              {len(report.lints)}",
    ]
    lines += ["  " + f"{lint.kind}: {lint}".replace("\n", "\n  ") for lint in report.lints[:10]]
    return "\n".join(lines)
