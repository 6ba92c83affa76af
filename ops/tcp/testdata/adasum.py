"""Combines vectors with Adasum, in the tree that the comment of package tcp defines.

Reads cases from the standard input until it ends. A case begins with a line: the element type, the number of
ranks, and the number of elements of each tensor. Then follow the vectors of all ranks, in the machine's byte
order. A vector is the concatenation of the tensors of a rank. Writes the combined vector of each case to the
standard output.
"""

import sys

import numpy as np

TINY = np.sqrt(np.finfo(np.float64).tiny)


def factor(dot, square):
    return 1.0 if square < TINY else 1.0 - dot / square / 2


def pair(a, b):
    """Returns the adaptive sum of two tensors, computed in float64 and rounded once."""
    x, y = a.astype(np.float64), b.astype(np.float64)
    dot = np.dot(x, y)
    return (factor(dot, np.dot(x, x)) * x + factor(dot, np.dot(y, y)) * y).astype(a.dtype)


def adasum(v):
    """Returns the combination of the tensors of all ranks. v has one tensor for each rank."""
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
