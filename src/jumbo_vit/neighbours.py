"""Nearest pictures by the cosine of their features."""

import numpy as np
from sklearn.neighbors import NearestNeighbors


def nearest(features: np.ndarray, count: int) -> tuple[np.ndarray, np.ndarray]:
    """The `count` nearest other rows of each row.

    Args:
        features: (N, width).
        count: Up to N - 1; 0 gives empty tables.

    Returns:
        Indices (N, count), nearest first, and their cosine similarities (N, count).
    """
    if count < 1:
        return np.zeros((len(features), 0), dtype=np.int64), np.zeros((len(features), 0), dtype=np.float32)
    lengths = np.linalg.norm(features.astype(np.float64), axis=1, keepdims=True)
    unit = features / np.maximum(lengths, 1e-12)
    # Brute force on unit vectors; asked without a query, scikit-learn leaves each row itself out.
    distances, indices = NearestNeighbors(n_neighbors=count, metric="cosine", algorithm="brute").fit(unit).kneighbors()
    return indices.astype(np.int64), (1 - distances).astype(np.float32)
