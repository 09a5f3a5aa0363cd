// bfloat16 for the emulation: the upper half of a float, rounded to nearest, ties to even.
#pragma once
#include <cstdint>
#include <cstring>

struct __nv_bfloat16 {
  uint16_t bits;
};

inline float __bfloat162float(__nv_bfloat16 x) { return __uint_as_float(static_cast<unsigned>(x.bits) << 16); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
  unsigned bits;
  std::memcpy(&bits, &x, sizeof(bits));
  if (x != x) return {0x7fff};
  return {static_cast<uint16_t>((bits + 0x7fff + (bits >> 16 & 1)) >> 16)};
}
