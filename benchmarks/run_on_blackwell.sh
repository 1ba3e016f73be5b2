#!/usr/bin/env bash
# Everything that a machine with a GPU of compute capability 10.0 or 10.3 can tell about the kernels of csrc/sm100, which
# so far were emulated and not yet run on silicon. Builds the native library, runs every test marked gpu, compares two
# runs at 65536 tokens, runs compute-sanitizer and the benchmark table; then says what to send back.
#
#   benchmarks/run_on_blackwell.sh [--dry-run] [--out FOLDER]
#
# From the checkout, in an environment with the package and its test tools (make venv) and nvcc >= 12.9. A step that
# fails is recorded, and the next one runs: half a report is worth sending. --dry-run prints the steps.
# Variables: PYTHON (default: python3).
set -u

here="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
python="${PYTHON:-python3}"
out=""
dry=0
while [ $# -gt 0 ]; do
  case "$1" in
    --dry-run) dry=1 ;;
    --out)
      [ $# -ge 2 ] || { echo "--out: a folder is missing" >&2; exit 2; }
      out="$2"
      shift
      ;;
    -h | --help) sed -n '2,11s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"; exit 0 ;;
    *) echo "unknown option $1; --dry-run and --out FOLDER are known" >&2; exit 2 ;;
  esac
  shift
done
cd "$here" || exit 2
out="${out:-build/blackwell_report}"
failed=()

# step NAME COMMAND...: runs it from the checkout, with all it says in a log of its name.
step() {
  local name="$1"
  shift
  if [ "$dry" = 1 ]; then
    printf 'step %s: %s\n' "$name" "$*"
    return 0
  fi
  printf '== %s: %s\n' "$name" "$*"
  "$@" >"$out/$name.log" 2>&1
  local status=$?
  printf '%s\t%s\t%s\n' "$name" "$status" "$*" >>"$out/steps.tsv"
  tail -n 3 "$out/$name.log"
  [ "$status" = 0 ] || failed+=("$name")
  return 0
}

if [ "$dry" = 0 ]; then
  "$python" - <<'END' || exit 3
import sys
try:
    import torch
except ImportError as error:
    sys.exit(f"torch is not there: {error}")
if not torch.cuda.is_available():
    sys.exit("torch sees no CUDA device")
major, minor = torch.cuda.get_device_capability()
if (major, minor) not in ((10, 0), (10, 3)):
    sys.exit(f"the device is of compute capability {major}.{minor}; this is for 10.0 and 10.3")
END
  mkdir -p "$out" || exit 2
  : >"$out/steps.tsv"
fi

library=build/native/_native.so
step commit git log -1 --format=%H
step changes git status --short
step device nvidia-smi
step software "$python" -m torch.utils.collect_env
step build "$python" csrc/build_hooks/native_build.py --architectures "90a;100a;103a"
# Where every program below finds it.
step install cp "$library" vsa_inductor/_native.so
step resources "$python" -m benchmarks.native_resources
step report "$python" -c "import vsa_inductor; print(vsa_inductor.backend_report())"
step tests "$python" -m pytest -m gpu -n 0 tests --junitxml="$out/tests.xml"
step run_to_run "$python" -m benchmarks.run_to_run --backend sm100 --tokens 65536 --heads 4 --selected 128
step run_to_run_waves "$python" -m benchmarks.run_to_run --backend sm100 --tokens 262144 --heads 2 --selected 32
step sanitizer "$python" -m benchmarks.sanitize_native --library "$library"
step benchmark "$python" -m benchmarks.bench_attention --tokens 4096 8192 16384 32768 65536 131072 262144 524288 \
  --lists random --providers sm100 triton cudnn_dense --output "$out/attention_sm100.csv"

if [ "$dry" = 1 ]; then
  printf 'send back: %s.tar.gz\n' "$out"
  exit 0
fi
tar -czf "$out.tar.gz" -C "$(dirname "$out")" "$(basename "$out")"
echo
echo "Send back $out.tar.gz: logs and states of all steps (steps.tsv), the tests (tests.xml), figures"
echo "(attention_sm100.csv). It holds the name of the GPU, versions of driver, CUDA and torch, and paths of this machine."
if [ ${#failed[@]} -gt 0 ]; then
  echo "Steps that failed: ${failed[*]}"
  exit 1
fi
echo "Every step passed."
