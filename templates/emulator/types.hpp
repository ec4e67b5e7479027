// The names that a generated body takes for granted: integer types, and CUDA's keywords, which mean nothing here.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define DI static inline
#define INF __builtin_inff()

// The last parameter of a primitive that can fail: the line of the body that calls it.
#define LINE int line = __builtin_LINE()
