"""Compute Adasum of whole vectors, in the tree that the comment of package tcp defines.

The program reads cases from the standard input until it ends. A case is a line with the element type, the number of
ranks and the number of elements of each tensor, and then the vectors of all ranks. A vector is the rank's tensors one
after another, in the machine's byte order. The program writes the combined vector of each case.
"""

import sys

import numpy as np

TINY = np.sqrt(np.finfo(np.float64).tiny)


def factor(dot, square):
    return 1.0 if square < TINY else 1.0 - dot / square / 2


def pair(a, b):
    """Return the adaptive sum of two tensors, computed in float64 and rounded once."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    dot = np.dot(x, y)
    return (factor(dot, np.dot(x, x)) * x + factor(dot, np.dot(y, y)) * y).astype(a.dtype)


def adasum(v):
    """Return the combination of the tensors of all ranks."""
    p = 1 << (len(v).bit_length() - 1)
    v = [pair(v[i], v[p + i]) if p + i < len(v) else v[i] for i in range(p)]
    while len(v) > 1:
        v = [pair(v[i], v[i + 1]) for i in range(0, len(v), 2)]
    return v[0]


def main():
    stdin, stdout = sys.stdin.buffer, sys.stdout.buffer
    for line in stdin:
        dtype, n, *lengths = line.split()
        dtype, n, lengths = np.dtype(dtype.decode()), int(n), [int(k) for k in lengths]
        size = n * sum(lengths) * dtype.itemsize
        vectors = np.frombuffer(stdin.read(size), dtype).reshape(n, -1)
        cuts = np.cumsum(lengths)[:-1]
        for tensor in np.split(vectors, cuts, axis=1):
            stdout.write(adasum(list(tensor)).tobytes())


if __name__ == "__main__":
    main()
