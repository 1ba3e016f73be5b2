"""Video sparse attention as a first-class citizen of torch.compile. Public names only."""

from . import backends, lowerings, ops  # registers every operator and its lowering
from .attention import block_sparse_attention, video_sparse_attention
from .backends.capability import backend_names
from .backends.report import backend_report
from .errors import ArgumentError, BackendUnavailableError, NativeLibraryError
from .native import load_library, load_packaged
from .options import Options, options
from .selection import BlockSelection
from .tiling import TileLayout

load_packaged()

__all__ = [
    "ArgumentError",
    "BackendUnavailableError",
    "BlockSelection",
    "NativeLibraryError",
    "Options",
    "TileLayout",
    "backend_names",
    "backend_report",
    "backends",
    "block_sparse_attention",
    "load_library",
    "lowerings",
    "ops",
    "options",
    "video_sparse_attention",
]
