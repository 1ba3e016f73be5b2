"""PTX text for the engines' tests: a kernel around a body, and the waits that most bodies need."""

from __future__ import annotations

import itertools

_labels = itertools.count()


def kernel(params: str, body: str, shared: int = 0, directives: str = "") -> str:
    """A module with one kernel `k`. `params`: "m:map p:u64 n:u32"; `shared`: bytes of dynamic-like memory `smem`."""
    kinds = {"map": ".param .align 64 .b8 {}[128]", "u64": ".param .u64 {}", "u32": ".param .u32 {}"}
    texts = [kinds[kind].format(name) for name, _, kind in (p.partition(":") for p in params.split())]
    memory = f".shared .align 1024 .b8 smem[{shared}];" if shared else ""
    loads = []
    for name, _, kind in (p.partition(":") for p in params.split()):
        if kind == "map":
            loads.append(f".reg .b64 %{name}; mov.b64 %{name}, {name}; cvta.param.u64 %{name}, %{name};")
        else:
            loads.append(f".reg .b{kind[1:]} %{name}; ld.param.{kind} %{name}, [{name}];")
    return f"""
.version 9.0
.target sm_100a
.address_size 64
.visible .entry k({", ".join(texts)}) {directives}
{{
.reg .pred %p<8>; .reg .b16 %h<8>; .reg .b32 %r<64>; .reg .b64 %d<16>; .reg .b128 %q<4>;
{memory}
mov.u32 %r60, %tid.x;
setp.ne.s32 %p7, %r60, 0;
{"".join(loads)}
{body}
ret;
}}
"""


def init(barrier: str, count: int = 1) -> str:
    return f"mbarrier.init.shared.b64 [{barrier}], {count}; fence.mbarrier_init.release.cluster;\n"


def expect(barrier: str, size: int | str) -> str:
    return f"mbarrier.arrive.expect_tx.shared.b64 _, [{barrier}], {size};\n"


def wait(barrier: str, parity: int | str = 0) -> str:
    label = f"W{next(_labels)}"
    return f"{label}: mbarrier.try_wait.parity.shared.b64 %p6, [{barrier}], {parity};\n@!%p6 bra {label};\n"


def store_bulk(target: str, source: str, size: int | str) -> str:
    """From shared to global memory, waited for."""
    return (
        f"cp.async.bulk.global.shared::cta.bulk_group [{target}], [{source}], {size};\n"
        "cp.async.bulk.commit_group;\ncp.async.bulk.wait_group 0;\n"
    )


def load_bulk(target: str, source: str, size: int | str, barrier: str) -> str:
    """From global to shared memory; announced, not waited for."""
    return expect(barrier, size) + (
        f"cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [{target}], [{source}], {size}, "
        f"[{barrier}];\n"
    )
