"""Speed of the PTX emulator (tests/ptx_emulator) on one CPU core, plain and with race detection.

    python -m benchmarks.bench_ptx_emulator [--repeat 5]

The bars, on Triton's warp-specialised attention: 100 thousand warp instructions a second plain, 50 with race detection.
"""

from __future__ import annotations

import argparse
import os
import platform
from pathlib import Path

RECORD = Path(__file__).resolve().parent / "data" / "ptx_emulator.csv"
CASE = "sm_100a/triton/attention_ws"
BARS = {"plain": 100.0, "race": 50.0}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--output", type=Path, default=RECORD)
    args = parser.parse_args()
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ[name] = "1"  # read when numpy is imported

    import numpy as np

    from benchmarks.harness import Quantiles, RowWriter
    from tests.ptx_emulator.speed import measure

    writer = RowWriter(args.output)
    missed = []
    for mode, bar in BARS.items():
        instructions, seconds = measure(CASE, mode == "race", args.repeat)
        rates = sorted(instructions / s / 1e3 for s in seconds)
        p20, p50, p80 = (float(np.quantile(rates, q)) for q in (0.2, 0.5, 0.8))
        writer.write(
            kernel="ptx_emulator",
            provider=mode,
            mode="forward",
            metric="throughput",
            unit="thousand warp instructions/s",
            x_name="instructions",
            x_value=instructions,
            quantiles=Quantiles(p50=p50, p20=p20, p80=p80),
            config={"case": CASE, "cpu": platform.processor() or platform.machine(), "numpy": np.__version__},
        )
        print(
            f"{mode:6} {p50:7.0f} thousand warp instructions/s ({instructions} in the launch)"
            f" {'ok' if p50 >= bar else 'MISSED'}"
        )
        if p50 < bar:
            missed.append(mode)
    if missed:
        raise SystemExit(f"below the bar: {', '.join(missed)}")


if __name__ == "__main__":
    main()
