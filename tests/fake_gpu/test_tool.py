"""The tool itself, on a model without our operators."""

import subprocess
import sys

import pytest
from torch.testing import FileCheck

from .session import REPOSITORY, Run, unavailable
from .wrapper import Wrapper

pytest_plugins = ["fake_gpu.fixtures"]


def python(program: str) -> str:
    """Standard error of a fresh interpreter that ran `program` in the repository root."""
    command = [sys.executable, "-c", program]
    return subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False).stderr


class TestTool:
    """What is asserted here is Inductor's own, long settled behaviour."""

    def test_forward_is_one_kernel_before_the_projection(self, fake_gpu_run: Run) -> None:
        code = fake_gpu_run.code("plain_block")
        FileCheck().check("def call(").check_count(".run(", 1, exactly=True).check("extern_kernels.addmm(").run(
            code.forward
        )
        (normed,) = [kernel for kernel in code.kernels if kernel.direction == "forward"]
        FileCheck().check("tl.sum(").check("rsqrt(").check("tl.store(out_ptr").run(normed.source)

    def test_backward_was_generated(self, fake_gpu_run: Run) -> None:
        backward = Wrapper(fake_gpu_run.code("plain_block").backward)
        (to_input,) = [step for step in backward.steps if backward.outputs[0] in step.writes]
        incoming = backward.called("extern_kernels.mm")[0]
        assert to_input.kernel is not None
        assert incoming.writes[0] in to_input.reads

    def test_every_kernel_compiles_for_the_architecture(self, fake_gpu_run: Run) -> None:
        code, compiled = fake_gpu_run.code("plain_block"), fake_gpu_run.compiled("plain_block")
        assert {record["name"] for record in compiled} == {kernel.name for kernel in code.kernels}
        assert {record["target"] for record in compiled} == {f"sm_{fake_gpu_run.arch}a"}
        assert all(record["cubin_bytes"] for record in compiled)

    def test_graph_is_kept(self, fake_gpu_run: Run) -> None:
        code = fake_gpu_run.code("plain_block")
        assert "aten.addmm.default" in {call.target for call in code.forward_calls}
        assert "aten.mm.default" in {call.target for call in code.backward_calls}

    @pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
    def test_late_preload_is_refused(self) -> None:
        error = python("import torch; from tests.fake_gpu.preload import load; load()")
        assert "must be loaded before torch is imported" in error

    @pytest.mark.skipif(unavailable() is not None, reason=str(unavailable()))
    def test_missing_compiler_is_named(self) -> None:
        program = "import os; os.environ['CXX'] = 'no-such-compiler'; from tests.fake_gpu.preload import load; load()"
        assert "no-such-compiler not found" in python(program)


WRAPPER = """
async_compile.triton('add_one', \'\'\'
def add_one(in_out_ptr0, in_ptr0, out_ptr0, xnumel, XBLOCK : tl.constexpr):
    a = tl.load(in_out_ptr0 + x)
    b = tl.load(in_ptr0 + x)
    tl.store(in_out_ptr0 + x, a)
    tl.store(out_ptr0 + x, b)
\'\'\', device_str='cuda')
async_compile.triton('double', \'\'\'
def double(in_out_ptr0, xnumel, XBLOCK : tl.constexpr):
    tl.store(in_out_ptr0 + x, 2 * tl.load(in_out_ptr0 + x))
\'\'\', device_str='cuda')
class Runner:
    def call(self, args):
        left, right = args
        args.clear()
        assert_size_stride(left, (4, 8), (8, 1), 'input')
        with torch.cuda._DeviceGuard(0):
            buf0 = empty_strided_cuda((4, 8), (8, 1), torch.float32)
            extern_kernels.mm(left, reinterpret_tensor(right, (8, 8), (1, 8), 0), out=buf0)
            buf1 = reinterpret_tensor(buf0, (32, ), (1, ), 0); del buf0  # reuse
            buf2 = empty_strided_cuda((32, ), (1, ), torch.bfloat16)
            add_one.run(buf1, left, buf2, 32, stream=raw_stream0)
            buf6 = buf2; del buf2  # reuse
            buf7 = reinterpret_tensor(buf6, (4, 8), (8, 1), 0); del buf6  # reuse
            double.run(buf7, 32, stream=raw_stream0)
            buf3 = torch.ops.vsa.pair.default(buf1, 2.0)
            buf4 = buf3[0]
            buf5 = buf3[1]
            assert_size_stride(buf5, (2, 4), (4, 1), 'torch.ops.vsa.pair.default')
            buf8 = torch.ops.vsa.lists.default([left, buf4], 3, [])
            buf9 = buf8[0][1]
            buf10 = buf8[1]
        return (reinterpret_tensor(buf4, (4, 8), (8, 1), 0), buf5, None, )
def get_args():
    left = rand_strided((4, 8), (8, 1), device='cuda:0', dtype=torch.float32)
    right = rand_strided((8, 8), (8, 1), device='cuda:0', dtype=torch.bfloat16)
    return [left, right]
"""


def test_wrapper_parser() -> None:
    wrapper = Wrapper(WRAPPER)
    product, launch, in_place, pair, lists = wrapper.steps
    assert (product.reads, product.writes) == (["left", "right"], ["buf0"])
    assert (launch.reads, launch.writes) == (["buf0", "left"], ["buf1", "buf2"])
    # Memory whose name changes twice before the kernel runs holds what was written under the first.
    assert (in_place.reads, in_place.writes) == (["buf2"], ["buf7"])
    assert (pair.operation, pair.arguments) == ("torch.ops.vsa.pair.default", ("buf1", None))
    assert wrapper.outputs == ("buf4", "buf5", None)
    assert pair.outputs == {0: "buf4", 1: "buf5"}
    assert (lists.arguments, lists.lists) == ((None, None, None), {0: ("left", "buf4"), 2: ()})
    assert lists.reads == ["left", "buf4"]
    assert lists.outputs == {(0, 1): "buf9", 1: "buf10"}
    assert wrapper.launched() == [launch, in_place]
    assert wrapper.writers("buf5") == [pair]
    assert wrapper.upstream("buf1") == [launch]
    assert wrapper.upstream("buf4") == []
    assert wrapper.inputs == ("left", "right")
    assert wrapper.buffers["left"].numel == 32
    assert (wrapper.buffers["right"].shape, wrapper.buffers["right"].dtype) == ((8, 8), "torch.bfloat16")
    assert wrapper.buffers["buf1"].dtype == "torch.float32"
    assert wrapper.buffers["buf5"].shape == (2, 4)
