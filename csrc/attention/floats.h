// Floats of eight bits become bf16, 64 at a time, through a table.
#pragma once

#include "attention/entries.h"

#if defined(__AVX512VBMI__)

namespace pagoda::PAGODA_ISA {
namespace {

// What codes of eight-bit floats without a sign are as bf16: upper bytes, then lower ones.
struct FloatTable {
    alignas(64) uint8_t upper[128], lower[128];
    constexpr FloatTable(int mantissa, int bias) : upper(), lower() {
        for (int code = 0; code < 128; code++) {
            int exponent = code >> mantissa, number = code & ((1 << mantissa) - 1);
            uint32_t bits = 0;
            if (exponent == (1 << (7 - mantissa)) - 1 && (mantissa == 2 || number == 7)) {  // e4m3 has no infinity, and one NaN
                bits = 0x7f80 | (number ? 0x40 : 0);
            } else if (exponent || number) {
                if (exponent == 0) {  // subnormal: as if it had a leading one
                    for (exponent = 1; !(number >> mantissa); number <<= 1) exponent--;
                    number &= (1 << mantissa) - 1;
                }
                bits = (uint32_t)((exponent - bias + 127) << 7 | number << (7 - mantissa));
            }
            upper[code] = (uint8_t)(bits >> 8);
            lower[code] = (uint8_t)bits;
        }
    }
};
template <typename Code>
constexpr FloatTable float_table(3, 7);
template <>
constexpr FloatTable float_table<e5m2>(2, 15);

// To [count, head_dim], which is a multiple of 64.
template <typename Code>
inline void widen_floats(const uint8_t* const* rows, int count, int64_t head_dim, bf16* to) {
    const FloatTable& table = float_table<Code>;
    const __m512i first_upper = _mm512_load_si512(table.upper), last_upper = _mm512_load_si512(table.upper + 64);
    const __m512i first_lower = _mm512_load_si512(table.lower), last_lower = _mm512_load_si512(table.lower + 64);
    const __m512i halves[2] = {_mm512_set_epi64(11, 10, 3, 2, 9, 8, 1, 0), _mm512_set_epi64(15, 14, 7, 6, 13, 12, 5, 4)};
    for (int j = 0; j < count; j++, to += padded(head_dim)) {
        for (int64_t i = 0; i < head_dim; i += 64) {
            const __m512i codes = _mm512_loadu_si512(rows[j] + i), sign = _mm512_set1_epi8((char)0x80);
            const __m512i upper = _mm512_ternarylogic_epi64(_mm512_permutex2var_epi8(first_upper, codes, last_upper), codes, sign, 0xf8);
            const __m512i lower = _mm512_permutex2var_epi8(first_lower, codes, last_lower);
            const __m512i a = _mm512_unpacklo_epi8(lower, upper), b = _mm512_unpackhi_epi8(lower, upper);
            _mm512_storeu_si512(to + i, _mm512_permutex2var_epi64(a, halves[0], b));
            _mm512_storeu_si512(to + i + 32, _mm512_permutex2var_epi64(a, halves[1], b));
        }
    }
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA

#endif
