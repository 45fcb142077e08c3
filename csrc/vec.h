// A vector of floats as wide as the instruction set has, and conversions from and to the element types.
//
// GCC's vector extensions give arithmetic, comparison and selection on every target; intrinsics appear only where they
// are much better: conversions and sums across lanes.
#pragma once

#include <math.h>
#include <string.h>

#include "prefetch.h"
#include "types.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

namespace pagoda::PAGODA_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kWidth = 16;
#elif defined(__AVX2__)
constexpr int kWidth = 8;
#else
constexpr int kWidth = 4;
#endif

// For functions whose accumulators must stay in registers.
#define PAGODA_INLINE inline __attribute__((always_inline))

typedef float Vec __attribute__((vector_size(kWidth * 4)));
typedef int32_t IntVec __attribute__((vector_size(kWidth * 4)));
typedef uint32_t BitVec __attribute__((vector_size(kWidth * 4)));
typedef uint16_t HalfBits __attribute__((vector_size(kWidth * 2)));
typedef int8_t Codes __attribute__((vector_size(kWidth)));

template <typename T>
inline T smaller(T a, T b) {
    return a < b ? a : b;
}
template <typename T>
inline T larger(T a, T b) {
    return a > b ? a : b;
}

inline Vec splat(float x) { return x - Vec{}; }
inline Vec select(IntVec mask, Vec yes, Vec no) { return mask ? yes : no; }
inline Vec max(Vec a, Vec b) { return a > b ? a : b; }
inline Vec min(Vec a, Vec b) { return a < b ? a : b; }

inline Vec load(const float* p) {
    Vec v;
    memcpy(&v, p, sizeof v);
    return v;
}
inline void store(float* p, Vec v) { memcpy(p, &v, sizeof v); }

inline Vec load(const bf16* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i*)p)), 16);
#elif defined(__AVX2__)
    return (Vec)_mm256_slli_epi32(_mm256_cvtepu16_epi32(_mm_loadu_si128((const __m128i*)p)), 16);
#else
    HalfBits h;
    memcpy(&h, p, sizeof h);
    return (Vec)(__builtin_convertvector(h, BitVec) << 16);
#endif
}
inline void store(bf16* p, Vec v) {
    const BitVec bits = (BitVec)v;
    const BitVec rounded = bits + 0x7fff + ((bits >> 16) & 1);  // to nearest, ties to even
    const BitVec quiet_nan = (bits | 0x400000);
    const BitVec high = (v == v ? rounded : quiet_nan) >> 16;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)high));
#else
    const HalfBits h = __builtin_convertvector(high, HalfBits);
    memcpy(p, &h, sizeof h);
#endif
}

// Values that bf16 has.
inline void store_exact(bf16* p, Vec v) {
    const BitVec high = (BitVec)v >> 16;
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtepi32_epi16((__m512i)high));
#else
    const HalfBits h = __builtin_convertvector(high, HalfBits);
    memcpy(p, &h, sizeof h);
#endif
}

inline float scalar(bf16 x) {
    const uint32_t bits = (uint32_t)x.bits << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

inline Vec from_half(HalfBits bits) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtph_ps((__m256i)bits);
#elif defined(__F16C__)
    return (Vec)_mm256_cvtph_ps((__m128i)bits);
#else
    Vec v;
    for (int i = 0; i < kWidth; i++) {
        const uint16_t lane = bits[i];
        _Float16 h;
        memcpy(&h, &lane, sizeof h);
        v[i] = (float)h;
    }
    return v;
#endif
}
inline Vec load(const f16* p) {
    HalfBits bits;
    memcpy(&bits, p, sizeof bits);
    return from_half(bits);
}
inline void store(f16* p, Vec v) {
#if defined(__AVX512F__)
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)v, _MM_FROUND_TO_NEAREST_INT));
#elif defined(__F16C__)
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)v, _MM_FROUND_TO_NEAREST_INT));
#else
    for (int i = 0; i < kWidth; i++) {
        const _Float16 h = (_Float16)v[i];
        memcpy(p + i, &h, sizeof h);
    }
#endif
}

inline Vec load(const int8_t* p) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    Codes codes;
    memcpy(&codes, p, sizeof codes);
    return __builtin_convertvector(codes, Vec);
#endif
}

// The first n < kWidth lanes; the others are zero.
template <typename T>
inline Vec load_part(const T* p, int64_t n) {
    T lanes[kWidth] = {};
    memcpy(lanes, p, n * sizeof(T));
    return load(lanes);
}
template <typename T>
inline void store_part(T* p, Vec v, int64_t n) {
    T lanes[kWidth];
    store(lanes, v);
    memcpy(p, lanes, n * sizeof(T));
}

// Calls body(offset, lanes) for each vector of [0, n); only the last may have fewer than kWidth lanes.
template <typename Body>
inline void for_each_vector(int64_t n, Body body) {
    int64_t i = 0;
    for (; i + kWidth <= n; i += kWidth) body(i, (int64_t)kWidth);
    if (i < n) body(i, n - i);
}
template <typename T>
inline Vec load_lanes(const T* p, int64_t lanes) {
    return lanes == kWidth ? load(p) : load_part(p, lanes);
}
template <typename T>
inline void store_lanes(T* p, Vec v, int64_t lanes) {
    if (lanes == kWidth) {
        store(p, v);
    } else {
        store_part(p, v, lanes);
    }
}

inline float sum(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_add_ps((__m512)v);
#else
    float total = 0;
    for (int i = 0; i < kWidth; i++) total += v[i];
    return total;
#endif
}
inline float maximum(Vec v) {
#if defined(__AVX512F__)
    return _mm512_reduce_max_ps((__m512)v);
#else
    float best = v[0];
    for (int i = 1; i < kWidth; i++) best = larger(best, v[i]);
    return best;
#endif
}

// Four sums at once share their shuffles.
inline void sum4(const Vec v[4], float* out) {
#if defined(__AVX2__)
    __m256 half[4];
    for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
        half[i] = _mm256_add_ps(_mm512_castps512_ps256((__m512)v[i]), _mm512_extractf32x8_ps((__m512)v[i], 1));
#else
        half[i] = (__m256)v[i];
#endif
    }
    const __m256 all = _mm256_hadd_ps(_mm256_hadd_ps(half[0], half[1]), _mm256_hadd_ps(half[2], half[3]));
    _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps(all, 1)));
#else
    for (int i = 0; i < 4; i++) out[i] = sum(v[i]);
#endif
}

// 2^x, relative error below 3e-7; 0 far below -126. Elsewhere than on AVX-512, x is capped at 127.
inline Vec exp2(Vec x) {
#if defined(__AVX512F__)
    // 2^f for the fraction f in [0, 1), the polynomial of least relative error; `scalef` multiplies by 2^floor(x).
    const Vec f = (Vec)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);
    Vec p = splat(1.87757667e-3f);
    p = p * f + 8.98934009e-3f;
    p = p * f + 5.58263180e-2f;
    p = p * f + 2.40153617e-1f;
    p = p * f + 6.93153073e-1f;
    p = p * f + 9.99999925e-1f;
    return (Vec)_mm512_scalef_ps((__m512)p, (__m512)x);
#else
    const IntVec underflow = x < -126.0f;
    x = max(min(x, splat(127.0f)), splat(-126.0f));
    constexpr float kRound = 12582912.0f;  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Vec shifted = x + kRound;
    const Vec f = x - (shifted - kRound);  // in [-0.5, 0.5]
    // Taylor series of 2^f to the sixth power
    Vec p = splat(1.5403530e-4f);
    p = p * f + 1.3333558e-3f;
    p = p * f + 9.6181291e-3f;
    p = p * f + 5.5504109e-2f;
    p = p * f + 2.4022651e-1f;
    p = p * f + 6.9314718e-1f;
    p = p * f + 1.0f;
    const IntVec exponent = (IntVec)shifted << 23;
    return select(underflow, Vec{}, (Vec)((IntVec)p + exponent));
#endif
}
constexpr float kLog2E = 1.44269504f;
inline Vec exp(Vec x) { return exp2(x * kLog2E); }
// Absolute error near 1e-7, which is what a score that is about to be exponentiated needs.
inline Vec tanh(Vec x) { return 1.0f - 2.0f / (exp(2.0f * x) + 1.0f); }

}  // namespace
}  // namespace pagoda::PAGODA_ISA
