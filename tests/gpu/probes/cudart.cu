// SPDX-License-Identifier: Apache-2.0
// A program of the CUDA runtime for check 2: one allocation, three launches.
#include <cuda_runtime.h>

__global__ void nothing() {}

int main()
{
    void *pointer = nullptr;
    if (cudaMalloc(&pointer, 1 << 20) != cudaSuccess) return 1;
    for (int i = 0; i < 3; i++) nothing<<<1, 1>>>();
    return cudaDeviceSynchronize() == cudaSuccess ? 0 : 1;
}
