"""Attention in float64 numpy, and inputs whose products are exact.

Shapes: q [heads, queries, D]; k, v [heads, keys, D]; lse, delta [heads, queries].
"""

from __future__ import annotations

import numpy as np


def quarters(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Multiples of 1/4 in [-2, 2]: exact in every format down to e5m2, sums of their products exact in float32."""
    return rng.integers(-8, 9, shape) / 4.0


def normal(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Standard normal values, rounded to bf16's eight bits so that every 16-bit format holds them exactly."""
    mantissa, exponent = np.frexp(rng.standard_normal(shape))
    return np.ldexp(np.round(mantissa * 256.0) / 256.0, exponent)


def attention(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, scale: float, mask: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Output and logarithm of the sum of exponentials; `mask` [.., queries, keys] is true where a key counts."""
    scores = scale * q @ k.swapaxes(-1, -2)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf)
    largest = scores.max(-1, keepdims=True)
    p = np.exp(scores - largest)
    total = p.sum(-1, keepdims=True)
    return (p / total) @ v, (largest + np.log(total))[..., 0]


def attention_backward(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, do: np.ndarray, scale: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """lse, delta, dq, dk, dv of full attention."""
    out, lse = attention(q, k, v, scale)
    delta = (out * do).sum(-1)
    p = np.exp(scale * q @ k.swapaxes(-1, -2) - lse[..., None])
    ds = scale * p * (do @ v.swapaxes(-1, -2) - delta[..., None])
    return lse, delta, ds @ k, ds.swapaxes(-1, -2) @ q, p.swapaxes(-1, -2) @ do
