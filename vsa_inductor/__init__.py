"""Video sparse attention as a first-class citizen of torch.compile. Public names only."""

from . import backends, checkpointing, exporting, lowerings, ops, testing  # registers every operator and its lowering
from .attention import block_sparse_attention, video_sparse_attention
from .backends.capability import backend_names
from .backends.report import backend_report
from .compiling import compile, explain
from .errors import ArgumentError, BackendUnavailableError, NativeLibraryError
from .exporting import export_training_step, package
from .integrations import sparsify
from .native import load_library, load_packaged
from .options import Options, options
from .reporting import RegionReport
from .selection import BlockSelection
from .tiling import TileLayout

load_packaged()

__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "BlockSelection",
    "NativeLibraryError",
    "Options",
    "RegionReport",
    "TileLayout",
    "backend_names",
    "backend_report",
    "backends",
    "block_sparse_attention",
    "checkpointing",
    "compile",
    "explain",
    "export_training_step",
    "exporting",
    "load_library",
    "lowerings",
    "ops",
    "options",
    "package",
    "sparsify",
    "testing",
    "video_sparse_attention",
]
