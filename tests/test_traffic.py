"""The bytes that `explain` gives for kernels, library calls and operators, against counts made by hand."""

import contextlib
import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from vsa_inductor import TileLayout, block_sparse_attention, video_sparse_attention
from vsa_inductor.compiling import compile, explain
from vsa_inductor.lowerings import _inductor_compat_capture as compat
from vsa_inductor.reporting import Call, RegionReport, size_of
from vsa_inductor.selection import BlockSelection

ROWS, COLUMNS = 64, 32
N = ROWS * COLUMNS
FP32, INT64 = 4, 8


def _x(dtype: torch.dtype = torch.float32, device: str = "cpu") -> Tensor:
    return torch.randn(ROWS, COLUMNS, dtype=dtype, device=device)


def _only(report: RegionReport) -> Call:
    (call,) = report.calls
    return call


def _moved(call: Call) -> tuple[int | None, int | None]:
    return call.bytes_read, call.bytes_written


def _add_row(x: Tensor, row: Tensor) -> Tensor:
    return x + row


def _from_view(x: Tensor) -> Tensor:
    return x[:, : COLUMNS // 2] * 2


def _gather(x: Tensor, rows: Tensor) -> Tensor:
    return x[rows] * 2


def _read_twice(x: Tensor) -> Tensor:
    return x.exp() / (x + 2)


def _only_intermediates(x: Tensor) -> Tensor:
    return ((x + 1).sin() * 2).relu()


@pytest.mark.parametrize(
    ("fn", "inputs", "expected"),
    [
        (lambda x: x.sin() + 1, lambda: (_x(),), (N * 4, N * 4)),
        (_add_row, lambda: (_x(torch.bfloat16), torch.randn(COLUMNS)), (N * 2 + COLUMNS * 4, N * 4)),
        (_from_view, lambda: (_x(),), (N // 2 * 4, N // 2 * 4)),
        (_gather, lambda: (_x(), torch.arange(5)), (5 * COLUMNS * 4 + 5 * 8, 5 * COLUMNS * 4)),
        (_read_twice, lambda: (_x(),), (N * 4, N * 4)),
        (_only_intermediates, lambda: (_x(),), (N * 4, N * 4)),
        (lambda x: x.sum(0), lambda: (_x(),), (N * 4, COLUMNS * 4)),
        (lambda x: x > 0, lambda: (_x(),), (N * 4, N)),
    ],
    ids=["pointwise", "broadcast", "view", "gather", "read twice", "intermediates", "reduction", "bool"],
)
def test_a_kernel(fn: Callable[..., Any], inputs: Callable[[], tuple[Tensor, ...]], expected: tuple[int, int]) -> None:
    assert _moved(_only(explain(fn, *inputs()))) == expected


def test_the_tensors_of_a_kernel() -> None:
    call = _only(explain(_add_row, _x(torch.bfloat16), torch.randn(COLUMNS)))
    assert call.reads is not None and call.writes is not None
    assert {(access.shape, access.dtype, access.num_bytes) for access in call.reads} == {
        ((ROWS, COLUMNS), "bfloat16", N * 2),
        ((COLUMNS,), "float32", COLUMNS * FP32),
    }
    assert [(access.shape, access.dtype) for access in call.writes] == [((ROWS, COLUMNS), "float32")]


def test_a_kernel_neither_stores_nor_reads_what_only_it_needs() -> None:
    """A softmax needs the exponentials twice."""
    call = _only(explain(lambda x: x.softmax(-1), _x()))
    assert call.reads is not None and [access.num_bytes for access in call.reads] == [N * FP32]
    assert call.writes is not None and [access.shape for access in call.writes].count((ROWS, COLUMNS)) == 1


def test_the_order_of_the_loops_does_not_matter() -> None:
    """One kernel goes through the same view by rows and by columns."""

    def both(x: Tensor) -> tuple[Tensor, Tensor]:
        view = x[:, :, : COLUMNS // 2]
        return view.softmax(-1), view.sum((0, 1))

    call = _only(explain(both, _x().view(4, ROWS // 4, COLUMNS)))
    assert call.bytes_read == N // 2 * FP32


def test_a_kernel_that_changes_its_input() -> None:
    def step(x: Tensor) -> None:
        x.add_(1)

    call = _only(explain(step, _x()))
    assert call.reads is not None and call.reads == call.writes
    assert _moved(call) == (N * FP32, N * FP32)


def test_a_kernel_that_writes_over_its_input_does_not_read_it() -> None:
    def step(x: Tensor, y: Tensor) -> None:
        x.copy_(y * 2)

    call = _only(explain(step, _x(), _x(torch.bfloat16)))
    assert _moved(call) == (N * 2, N * FP32)
    assert call.reads is not None and call.writes is not None and call.reads[0].buffer != call.writes[0].buffer


def test_a_product_reads_what_a_cat_made_in_parts() -> None:
    kernel, product = explain(lambda x, y: torch.cat([x.sin(), x.cos()], 1) @ y, _x(), torch.randn(64, 8)).calls
    assert kernel.writes is not None and product.reads is not None
    assert (kernel.generated, product.kind, product.name) == (True, "extern", "mm")
    assert _moved(kernel) == (N * FP32, 2 * N * FP32)
    assert _moved(product) == ((2 * N + 64 * 8) * FP32, ROWS * 8 * FP32)
    assert {access.buffer for access in kernel.writes} <= {access.buffer for access in product.reads}


def test_the_attention_call() -> None:
    layout = TileLayout.from_video_shape(5, 4, 4)
    heads, dim, blocks = 2, 16, layout.num_blocks
    tokens = heads * layout.num_slots
    lists = BlockSelection.dense(1, heads, blocks, blocks)
    q, k, v = (torch.randn(1, heads, layout.num_slots, dim) for _ in range(3))

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return block_sparse_attention(
            q, k, v, lists.kv_indices, lists.kv_num_blocks, layout.kv_block_sizes, return_lse=True
        )

    (call,) = (call for call in explain(attend, q, k, v).calls if call.name == "vsa.attention_eager")
    operands = 3 * tokens * dim + heads * blocks * blocks + heads * blocks + blocks
    assert _moved(call) == (operands * FP32, (tokens * dim + tokens) * FP32)


def test_what_is_kept_for_the_backward() -> None:
    x, y = _x().requires_grad_(), _x().requires_grad_()
    # A product's backward keeps both inputs, which are there anyway; a sort's keeps the indices.
    (graph,) = explain(lambda x, y: (x * y).sort(-1).values, x, y).graphs
    (kept,) = graph.kept
    assert (kept.tensor.dtype, kept.tensor.num_bytes) == ("int64", N * INT64)
    assert "keeps 16.0 KiB for the backward" in str(RegionReport((graph,), (), (), ()))
    assert explain(lambda x, y: x * y, x, y).graphs[0].kept == ()


def test_symbolic_sizes_count_as_in_the_run() -> None:
    report = explain(compile(lambda x: x.sin() + 1, dynamic=True), _x())
    call = _only(report)
    assert call.reads is not None and all(isinstance(size, str) for size in call.reads[0].shape)
    assert _moved(call) == (N * FP32, N * FP32)
    assert "at the sizes of this run" in str(report)
    assert "at the sizes of this run" not in str(explain(torch.sin, _x()))


@pytest.mark.parametrize("needs_grad", [False, True], ids=["inference", "training"])
def test_unknown_where_only_the_run_tells_a_size(needs_grad: bool) -> None:
    """How many blocks a sparsity given as an argument keeps; what has another size stays known."""
    layout = TileLayout.from_video_shape(5, 4, 4)

    def attend(q: Tensor, sparsity: float) -> Tensor:
        return video_sparse_attention(q, q, q, layout, sparsity=sparsity)

    q = torch.randn(1, layout.num_tokens, 2, 16, requires_grad=needs_grad)
    report = explain(compile(attend, dynamic=True), q, 0.5)
    moved = {call.name: _moved(call) for call in report.calls}
    assert moved["vsa.select_blocks"] == moved["vsa.attention_eager"] == (None, None)
    (untile,) = (call for call in report.calls if "vsa.untile" in call.fused and call.direction != "backward")
    assert untile.bytes_written == q.numel() * FP32
    for graph in report.graphs:
        tensors = [output.tensor for direction in graph.directions for output in direction.outputs]
        tensors += [access for call in report.calls for access in (*(call.reads or ()), *(call.writes or ()))]
        # An unbacked size is called u0.
        assert tensors and not [tensor for tensor in tensors if "u" in "".join(map(str, tensor.shape))]
        # The lists of kept blocks, whose size is unknown, hide no result behind them: lse.
        kept = [output.tensor.num_bytes for output in graph.kept if output.tensor.dtype == "float32"]
        assert (2 * layout.num_slots * FP32 in kept) == needs_grad


@contextlib.contextmanager
def _nothing() -> Iterator[dict[str, Any]]:
    yield {}


def test_unknown_where_torch_does_not_number_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat, "_schedules", _nothing)
    report = explain(lambda x: x.sin() + 1, _x())
    assert _moved(_only(report)) == (None, None)
    assert "unknown    unknown" in str(report) and "1 call of unknown traffic left out" in str(report)
    (direction,) = json.loads(report.to_json())["graphs"][0]["directions"]
    assert (direction["unknown"], direction["calls"][0]["bytes_read"], direction["calls"][0]["reads"]) == (
        1,
        None,
        None,
    )
    assert "unknown" in report.to_html()


def test_a_name_that_is_gone_leaves_the_rest_known(monkeypatch: pytest.MonkeyPatch) -> None:
    def gone(*arguments: Any) -> Any:
        raise AttributeError("gone")

    monkeypatch.setattr(compat, "_of_kernel", gone)
    kernel, product = explain(lambda x: x.sin() @ x.t(), _x()).calls
    assert _moved(kernel) == (None, None)
    assert _moved(product) == (2 * N * FP32, ROWS * ROWS * FP32)


@pytest.mark.parametrize(
    ("num_bytes", "words"),
    [(None, "unknown"), (0, "0 B"), (1023, "1023 B"), (1024, "1.0 KiB"), (1 << 20, "1.0 MiB"), (1048570, "1.0 MiB")],
)
def test_sizes_in_words(num_bytes: int | None, words: str) -> None:
    assert size_of(num_bytes) == words
    assert size_of(5 << 50) == "5120.0 TiB"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_triton_kernels() -> None:
    call = _only(explain(lambda x: x.sin() + 1, _x(device="cuda")))
    assert (call.kind, *_moved(call)) == ("triton", N * FP32, N * FP32)
    # What a kernel makes and nobody else reads is not stored, in place either.
    call = _only(explain(_only_intermediates, _x(torch.bfloat16, "cuda")))
    assert _moved(call) == (N * 2, N * 2)
