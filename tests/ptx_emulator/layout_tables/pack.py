"""Turn the records that enumerate.cpp writes into `tables.npz`, the file that tables.py reads.

To make it anew, with CUTLASS's headers in $CUTLASS/include and CUDA's (and its CCCL's) in $CUDA/include:

    g++ -std=c++17 -w -DNDEBUG -I $CUTLASS/include -I $CUDA/include -I $CUDA/include/cccl enumerate.cpp -o enumerate
    ./enumerate records.bin > /dev/null
    python pack.py records.bin 4.2.0 tables.npz

4.2.0 is the version of CUTLASS, for the record (PyPI package nvidia-cutlass 4.2.0.0); g++ takes two minutes. Only
numbers are kept, nothing of the headers' text.
"""

from __future__ import annotations

import json
import sys

import numpy as np


def read_records(path: str) -> dict[str, np.ndarray]:
    """The records of enumerate.cpp: name -> int32 array of the stated dimensions. ValueError if the file is cut off."""
    with open(path, "rb") as file:
        data = file.read()
    records: dict[str, np.ndarray] = {}
    position = 0
    while position < len(data):
        end = data.index(b"\n", position)
        name, *numbers = data[position:end].decode("ascii").split()
        shape = tuple(int(number) for number in numbers)
        count = int(np.prod(shape))
        if end + 1 + 4 * count > len(data):
            raise ValueError(f"{path} ends inside the record {name}")
        records[name] = np.frombuffer(data, "<i4", count, end + 1).reshape(shape)
        position = end + 1 + 4 * count
    return records


def differences(table: np.ndarray) -> np.ndarray:
    """The table differenced along its last two axes: layouts are nearly affine, so that nearly all of it is zero."""
    for axis in range(max(0, table.ndim - 2), table.ndim):
        table = np.diff(table, axis=axis, prepend=np.int32(0))
    return table.reshape(-1)


def pack(records: dict[str, np.ndarray], version: str, path: str) -> None:
    """Write one compressed file: the differences of all tables in two 16-bit halves, and names and shapes as JSON."""
    index = {"cutlass": version, "tables": {name: list(table.shape) for name, table in records.items()}}
    words = np.concatenate([differences(table) for table in records.values()]).astype("<i4").view("<u2").reshape(-1, 2)
    header = np.frombuffer(json.dumps(index, separators=(",", ":")).encode("ascii"), np.uint8)
    np.savez_compressed(path, index=header, low=words[:, 0], high=words[:, 1])


def main(arguments: list[str]) -> int:
    """Command line: RECORDS VERSION OUTPUT."""
    if len(arguments) != 3:
        print("usage: pack.py RECORDS CUTLASS_VERSION OUTPUT.npz", file=sys.stderr)
        return 2
    records, version, output = arguments
    pack(read_records(records), version, output)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
