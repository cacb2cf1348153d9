// What CUDA C++ has and C++ lacks, so that g++ compiles kernels.cu for one thread of a CPU.

#pragma once

#include <cstddef>
#include <tuple>

#define __device__
#define __global__

struct Index {
    unsigned x, y, z;
};

static Index threadIdx, blockIdx, blockDim;

inline float __fadd_rn(float left, float right) { return left + right; }
inline float __fmul_rn(float left, float right) { return left * right; }

inline float half_to_float(unsigned short bits)
{
    _Float16 value;
    __builtin_memcpy(&value, &bits, sizeof value);
    return value;
}

inline unsigned short float_to_half(float value)
{
    const _Float16 rounded = value;
    unsigned short bits;
    __builtin_memcpy(&bits, &rounded, sizeof bits);
    return bits;
}

// Returns the place of the next argument in a buffer that holds them one after the other, each aligned to its size, as
// cuLaunchKernel takes them.
template <typename Argument>
Argument next_argument(const char *buffer, std::size_t &offset)
{
    offset = (offset + alignof(Argument) - 1) / alignof(Argument) * alignof(Argument);
    Argument argument;
    __builtin_memcpy(&argument, buffer + offset, sizeof argument);
    offset += sizeof argument;
    return argument;
}

// Runs a kernel for all threads of a grid, one after the other.
template <typename... Arguments>
void run_grid(void (*kernel)(Arguments...), unsigned grid_x, unsigned grid_y, unsigned block_x, const char *buffer)
{
    std::size_t offset = 0;
    const std::tuple<Arguments...> arguments{next_argument<Arguments>(buffer, offset)...};
    blockDim = {block_x, 1, 1};
    for (unsigned y = 0; y < grid_y; ++y)
        for (unsigned x = 0; x < grid_x; ++x)
            for (unsigned thread = 0; thread < block_x; ++thread) {
                blockIdx = {x, y, 0};
                threadIdx = {thread, 0, 0};
                std::apply(kernel, arguments);
            }
}
