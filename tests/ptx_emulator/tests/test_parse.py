"""Text to instructions: scopes, lines, variables, inlined functions, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest

from .. import Device, load
from ..errors import LaunchError, PtxSyntaxError, UnknownInstructions
from ..ir import Address, Imm, Mem, Reg
from ..parse import parse

HEADER = ".version 9.0\n.target sm_90a\n.address_size 64\n"


def kernel(body: str, params: str = "", before: str = "") -> str:
    return f"{HEADER}{before}.visible .entry k({params})\n{{\n{body}\n}}\n"


def test_lines_and_sources_are_kept() -> None:
    text = kernel(".reg .b32 %r<3>;\n.loc 1 7 3\nadd.s32 %r1, %r2,\n  5; // why\n/* a\nb */ mov.b32 %r2, %r1;\nret;")
    text = text.replace(".address_size 64\n", '.address_size 64\n.file 1 "a.cu"\n')
    add, mov, _ = parse(text).kernels["k"].instructions
    assert text.split("\n")[add.line - 1].startswith("add.s32")
    assert "mov.b32" in text.split("\n")[mov.line - 1]
    assert add.loc == ("a.cu", 7)
    assert add.args == (Reg("w", 1), Reg("w", 2), Imm(5))
    assert "a.cu:7" in add.where() and f"line {add.line}" in add.where()


def test_a_scope_hides_names_and_labels() -> None:
    """Inline assembly declares the same names in braces of its own, again and again."""
    inner = "{ .reg .pred p; LOOP: setp.eq.b32 p, %r1, 0; @p bra DONE; bra LOOP; DONE: }"
    k = parse(kernel(f".reg .b32 %r<2>;\n{inner}\n{inner}\nret;")).kernels["k"]
    first, second = k.instructions[:3], k.instructions[3:6]
    assert k.register_counts["p"] == 2
    assert (first[1].pred, second[1].pred) == (Reg("p", 0), Reg("p", 1))
    assert [i.args[0].target for i in (*first[1:], *second[1:])] == [3, 0, 6, 3]


@pytest.mark.parametrize(
    ("operand", "value"),
    [
        ("0x10", 16),
        ("-3", -3),
        ("0f3F800000", 0x3F800000),
        ("0d3FF0000000000000", 0x3FF0000000000000),
        ("017", 15),
        ("5U", 5),
    ],
)
def test_immediates(operand: str, value: int) -> None:
    k = parse(kernel(f".reg .b64 %r<2>;\nmov.b64 %r1, {operand};")).kernels["k"]
    assert k.instructions[0].args[1].value == value


def test_addresses_of_variables() -> None:
    before = (
        ".shared .align 16 .b8 a[20];\n.extern .shared .align 128 .b8 d[];\n.global .align 4 .u32 g[2] = {7, 0xFF};\n"
    )
    body = ".reg .b32 %r<2>;\n.shared .align 8 .b64 own[2];\nld.shared.b32 %r1, [own+8];\nmov.u32 %r1, d;"
    module = parse(kernel(body, before=before))
    k = module.kernels["k"]
    assert k.instructions[0].args[1] == Mem(Address("shared", 32, "own"))
    assert k.static_shared == 40 and k.dynamic_shared_offset == 128
    assert k.instructions[1].args[1] == Address("shared", 128, "d")
    assert module.variables["g"].data == b"\x07\0\0\0\xff\0\0\0"


def test_parameters_have_the_abi_s_offsets() -> None:
    params = ".param .u32 a, .param .u64 .ptr .global .align 16 b, .param .align 64 .b8 map[128], .param .f32 c"
    k = parse(kernel("ret;", params)).kernels["k"]
    assert [(p.offset, p.size) for p in k.params] == [(0, 4), (8, 8), (64, 128), (192, 4)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("mov.b32 %r1, %r2", "without its end"),
        ("}\nret;", "closes nothing"),
        (".reg .b7 %r1;", r"\.b7"),
        ("bra NOWHERE!;", "NOWHERE"),
    ],
)
def test_syntax_errors_name_the_line(body: str, words: str) -> None:
    with pytest.raises(PtxSyntaxError, match=rf"(?s)line \d+.*{words}"):
        parse(kernel(f".reg .b32 %r<3>;\n{body}"))


def test_all_unknown_opcodes_are_reported_at_once() -> None:
    with pytest.raises(UnknownInstructions) as raised:
        load(kernel(".reg .b32 %r<3>;\nfoo.b32 %r1, %r2;\nmov.b32 %r1, %r2;\nbar2.sync 0;\nfoo.b32 %r2, %r1;"))
    assert set(raised.value.missing) == {"foo.b32", "bar2.sync"}
    assert "foo.b32 %r1, %r2" in str(raised.value)


def test_unknown_forms_of_all_kernels_are_reported_at_once() -> None:
    text = "".join(
        f".visible .entry k{n}()\n{{\n.reg .b32 %r<3>;\n{line}\nret;\n}}\n"
        for n, line in enumerate(("foo.b32 %r1;", "mov.u32 %r1, %nonsense;", "tcgen05.shift.cta_group::1.down [%r1];"))
    )
    with pytest.raises(UnknownInstructions, match="special register %nonsense") as raised:
        load(HEADER + text)
    assert set(raised.value.missing) == {"foo.b32", "mov.u32", "tcgen05.shift.cta_group::1.down"}


def test_launch_arguments_are_checked_before_anything_runs() -> None:
    module = load(kernel("ret;", ".param .u64 p, .param .f32 x"))
    device = Device()
    a = device.upload(np.zeros(4, np.float32))
    for args, words in (
        ([a], "1 given, k has 2"),
        ([a, "x"], "'x'|str"),
        ([1 << 70, 1.0], "does not fit"),
        ([b"123", 1.0], "3 bytes given"),
    ):
        with pytest.raises(LaunchError, match=words):
            device.launch(module, args=args)
    for shape, words in (
        ({"block": (2048,)}, "2048 threads"),
        ({"grid": (0,)}, "positive"),
        ({"cluster": (2,)}, "no multiple of cluster"),
        ({"shared": 1 << 20}, "at most"),
        ({"kernel": "other"}, "the module has k"),
    ):
        with pytest.raises(LaunchError, match=words):
            device.launch(module, args=[a, 1.0], **shape)
