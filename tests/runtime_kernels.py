"""Small kernels that the tests of the runtime compile and launch."""

from __future__ import annotations

import ctypes

ADD = """struct add_params { float* x; const float* y; int n; };
extern "C" __global__ void add(const __grid_constant__ add_params p) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < p.n) p.x[i] += p.y[i];
}
"""

REVERSE = """struct reverse_params { int* x; int n; };
extern "C" __global__ void reverse(const __grid_constant__ reverse_params p) {
  extern __shared__ int tile[];
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) tile[i] = p.x[i];
  __syncthreads();
  for (int i = threadIdx.x; i < p.n; i += blockDim.x) p.x[i] = tile[p.n - 1 - i];
}
"""


class AddParams(ctypes.Structure):
    """The struct `add_params` of ADD."""

    _fields_ = (("x", ctypes.c_void_p), ("y", ctypes.c_void_p), ("n", ctypes.c_int))


class ReverseParams(ctypes.Structure):
    """The struct `reverse_params` of REVERSE."""

    _fields_ = (("x", ctypes.c_void_p), ("n", ctypes.c_int))
