"""Which way the rooms may import, read from the source; and which files know private names of torch."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import pytest

import vsa_inductor

PACKAGE = Path(vsa_inductor.__file__).parent
LOWERINGS = Path(vsa_inductor.lowerings.__file__).parent
ROOT = PACKAGE.parent
# For lowerings, for their registration, and for `compile` and `explain`.
COMPAT = [LOWERINGS / f"_inductor_compat{part}.py" for part in ("", "_registration", "_capture")]
# For gradients under torch.func.
FUNCTORCH_COMPAT = PACKAGE / "ops" / "_functorch_compat.py"
# Private compilers of torch. torch.compiler is their public face.
PRIVATE = ("torch._inductor", "torch._dynamo", "torch._functorch")


def module_name(path: Path) -> str:
    relative = path.relative_to(LOWERINGS if path.is_relative_to(LOWERINGS) else PACKAGE).with_suffix("")
    parts = ["vsa_inductor", *(["lowerings"] if path.is_relative_to(LOWERINGS) else []), *relative.parts]
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def sources(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.py"))


def ids(path: Path) -> str:
    return module_name(path)


EVERYTHING = [*sources(PACKAGE), *(p for p in sources(LOWERINGS) if not p.is_relative_to(PACKAGE))]


@dataclass(frozen=True)
class Import:
    """One imported module, absolute; ``late`` inside a function, ``typing`` under TYPE_CHECKING."""

    module: str
    late: bool
    typing: bool


def imports_of(path: Path) -> list[Import]:
    """Every import of a file; `from a import b` counts as both a and a.b, since b may be a module."""
    found: list[Import] = []
    name = module_name(path)
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]

    def visit(node: ast.AST, late: bool, typing: bool) -> None:
        if isinstance(node, ast.Import):
            found.extend(Import(alias.name, late, typing) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                parents = package.split(".")
                parents = parents[: len(parents) - node.level + 1]
                base = ".".join([*parents, *([base] if base else [])])
            found.append(Import(base, late, typing))
            found.extend(Import(f"{base}.{alias.name}", late, typing) for alias in node.names)
        late = late or isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda))
        typing = typing or (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
        for child in ast.iter_child_nodes(node):
            visit(child, late, typing)

    visit(ast.parse(path.read_text()), False, False)
    return found


def names_of(path: Path) -> list[str]:
    """Every dotted name of a file in full: what it imports, and attributes of that."""
    imports = [node for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, (ast.Import, ast.ImportFrom))]
    full = {
        alias.asname or alias.name: f"{node.module}.{alias.name}"
        for node in imports
        if isinstance(node, ast.ImportFrom) and not node.level
        for alias in node.names
    } | {alias.asname: alias.name for node in imports if isinstance(node, ast.Import) for alias in node.names}
    names = [x.module for x in imports_of(path)]
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            first, _, rest = ast.unparse(node).partition(".")
            names.append(f"{full.get(first, first)}.{rest}")
    return names


def private_to_autograd(name: str) -> bool:
    """``torch._C``, and what begins with an underscore within ``torch.autograd`` and ``torch.func``."""
    return within(name, "torch._C") or (within(name, "torch.autograd", "torch.func") and "._" in name)


def within(module: str, *packages: str) -> bool:
    return any(module == package or module.startswith(package + ".") for package in packages)


def at_import_time(path: Path) -> list[str]:
    return [x.module for x in imports_of(path) if not (x.late or x.typing)]


def standard(module: str) -> bool:
    return module.partition(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("path", sources(PACKAGE / "ops"), ids=ids)
def test_ops_import_torch_their_own_room_and_the_errors(path):
    for module in at_import_time(path):
        allowed = within(module, "torch", "vsa_inductor.ops", "vsa_inductor.errors") or standard(module)
        assert allowed or module == "vsa_inductor", f"{path.name} imports {module}"


@pytest.mark.parametrize("path", sources(PACKAGE / "reference"), ids=ids)
def test_reference_imports_torch_only(path):
    for x in imports_of(path):
        assert within(x.module, "torch", "vsa_inductor.reference") or standard(x.module), f"{path.name}: {x.module}"


# What a backend may build on besides the reference, the operators and its own kernels.
SHARED_BY_BACKENDS = ("contract", "identity", "layout")
# Who may know every backend.
ABOUT_BACKENDS = ("__init__", "capability", "report")


@pytest.mark.parametrize("path", sources(PACKAGE / "backends"), ids=ids)
def test_no_backend_imports_another(path):
    if path.stem in ABOUT_BACKENDS:
        return
    own = [f"vsa_inductor.backends.{stem}" for stem in (*SHARED_BY_BACKENDS, path.stem)]
    for x in imports_of(path):
        if within(x.module, "vsa_inductor.backends") and x.module != "vsa_inductor.backends":
            assert within(x.module, *own), f"{path.name} imports {x.module}"


@pytest.mark.parametrize("path", sources(PACKAGE / "backends"), ids=ids)
def test_kernels_are_imported_when_they_launch(path):
    """Importing the package needs no triton and no native library."""
    for module in at_import_time(path):
        assert not within(module, "triton", "vsa_inductor.kernels"), f"{path.name} imports {module}"


@pytest.mark.parametrize("path", EVERYTHING, ids=ids)
def test_private_compiler_names_stand_in_one_file(path):
    for name in names_of(path):
        assert path in COMPAT or not within(name, *PRIVATE), f"{path.name} uses {name}"
        assert path == FUNCTORCH_COMPAT or not private_to_autograd(name), f"{path.name} uses {name}"


def test_the_private_names_are_really_in_that_file():
    for path in COMPAT:
        assert any(within(name, *PRIVATE) for name in names_of(path)), "else the test above looks for nothing"
    found = {name for name in names_of(FUNCTORCH_COMPAT) if private_to_autograd(name)}
    for name in ("torch._C._functorch", "torch.autograd.function._SingleLevelFunction"):
        assert name in found, "else the test above looks for nothing"
    assert "torch.autograd.forward_ad._set_fwd_grad_enabled" in found, "under another name"


@pytest.mark.parametrize("path", sources(LOWERINGS), ids=ids)
def test_lowerings_name_no_architecture_and_no_kernel(path):
    for x in imports_of(path):
        if within(x.module, "vsa_inductor"):
            ours = [
                f"vsa_inductor.{room}" for room in ("ops", "backends", "lowerings", "reference", "options", "errors")
            ]
            assert within(x.module, *ours) or x.module == "vsa_inductor", f"{path.name} imports {x.module}"
            named = [f"vsa_inductor.backends.{name}" for name in vsa_inductor.backend_names()]
            assert not within(x.module, *named), f"{path.name} imports {x.module}"


# Commands of their own and a plugin of pytest, never traced.
APPLICATIONS = (PACKAGE / "demo", PACKAGE / "__main__.py", PACKAGE / "pytest_plugin")
# FastVideo's switches are variables; what traced code reads of them is a constant on purpose.
SWITCHES = PACKAGE / "integrations" / "fastvideo.py"


@pytest.mark.parametrize(
    "path", [p for p in EVERYTHING if not any(p.is_relative_to(a) for a in (*APPLICATIONS, SWITCHES))], ids=ids
)
def test_nothing_reads_the_environment(path):
    """A variable read while tracing is baked into the graph."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            assert ast.unparse(node) not in ("os.environ", "os.getenv"), f"{path.name}:{node.lineno}"


@pytest.fixture
def installation() -> metadata.Distribution:
    try:
        return metadata.distribution("vsa_inductor")
    except metadata.PackageNotFoundError:
        pytest.skip("vsa_inductor is on the path, not installed")


def run_apart(code: str, folder: Path) -> None:
    # A path to the checkout would make its folders importable whatever is installed.
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    result = subprocess.run(
        [sys.executable, "-c", code], cwd=folder, env=env, capture_output=True, text=True, timeout=120, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_an_installation_has_two_top_level_names(installation):
    """The pytest plugin has one of its own, so that a session does not import torch."""
    top_level = installation.read_text("top_level.txt")
    assert top_level is None or set(top_level.split()) <= {"vsa_inductor", "vsa_inductor_pytest"}


def test_a_fresh_process_has_no_bare_lowerings_and_no_kernels(installation, tmp_path):
    run_apart(
        "import importlib.util, sys\n"
        "import vsa_inductor\n"
        "assert importlib.util.find_spec('lowerings') is None, 'importable as a bare name'\n"
        "assert 'vsa_inductor.lowerings.tile' in sys.modules\n"
        "kernels = [m for m in sys.modules if m.startswith('vsa_inductor.kernels')]\n"
        "assert not kernels, kernels\n",
        tmp_path,
    )


def test_the_package_table_maps_the_lowerings():
    tomllib = pytest.importorskip("tomllib", reason="tomllib: Python >= 3.11")
    if not (ROOT / "pyproject.toml").exists():
        pytest.skip("pyproject.toml: not a checkout")
    table = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]
    assert table["package-dir"]["vsa_inductor.lowerings"] == LOWERINGS.name
    # The plugin is a package of its own, so that a session of pytest does not import torch.
    packages = {package.replace("vsa_inductor_pytest", "vsa_inductor.pytest_plugin") for package in table["packages"]}
    assert all(package.partition(".")[0] == "vsa_inductor" for package in packages)
    folders = {
        module_name(path / "__init__.py") for path in (p.parent for p in EVERYTHING) if (path / "__init__.py").exists()
    }
    assert folders == packages, "every folder with code is installed"
