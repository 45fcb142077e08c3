// Quantized keys and values: codes with scales, as KVView (pagoda/kernels/types.py) describes them, made and widened. The codes
// are those of pagoda/kernels/quantized.py, to the bit.
#pragma once

#include "vec.h"

namespace pagoda::PAGODA_ISA {
namespace {

template <typename T>
constexpr int format_of = 0;
template <>
constexpr int format_of<float> = kF32;
template <>
constexpr int format_of<bf16> = kBF16;
template <>
constexpr int format_of<f16> = kF16;
template <>
constexpr int format_of<int8_t> = kInt8;

struct e4m3 {
    uint8_t bits;
};
struct e5m2 {  // the upper half of a float16
    uint8_t bits;
};
struct ScaleCode {  // the upper half of a float16 that has no sign
    uint8_t bits;
};

typedef uint8_t Bytes __attribute__((vector_size(kWidth)));
typedef int16_t Shorts __attribute__((vector_size(kWidth * 2)));

inline Bytes load_bytes(const void* p, int64_t lanes = kWidth) {
    Bytes bytes = {};
    memcpy(&bytes, p, lanes);
    return bytes;
}
// GCC would convert one after the other.
inline Vec to_floats(Bytes bytes) {
#if defined(__AVX512F__)
    return (Vec)_mm512_cvtepi32_ps(_mm512_cvtepu8_epi32((__m128i)bytes));
#elif defined(__AVX2__)
    return (Vec)_mm256_cvtepi32_ps(_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)&bytes)));
#else
    return __builtin_convertvector(bytes, Vec);
#endif
}
inline Vec load(const e5m2* p) { return from_half(__builtin_convertvector(load_bytes(p), HalfBits) << 8); }
inline Vec load(const ScaleCode* p) { return from_half(__builtin_convertvector(load_bytes(p), HalfBits) << 7); }
// A float16 has one bit of exponent more, and a bias that is greater by 8. Of the sign's copies that one stays which is the sign.
inline Vec load(const e4m3* p) {
    const Shorts wide = __builtin_convertvector((Codes)load_bytes(p), Shorts);
    return from_half((HalfBits)(wide << 7) & 0xbfff) * 256.0f;
}

inline Vec round_even(Vec x) {  // |x| < 2^22
    constexpr float kRound = 12582912.0f;
    return (x + kRound) - kRound;
}
inline Vec magnitude(Vec x) { return (Vec)((BitVec)x & 0x7fffffff); }

template <typename Code>
inline void store_bytes(Code* p, IntVec codes, int64_t lanes) {
    const Bytes bytes = __builtin_convertvector(codes, Bytes);
    memcpy(p, &bytes, lanes);
}

// Codes of values within the largest code's.
inline IntVec encode(const int8_t*, Vec x) { return __builtin_convertvector(round_even(x), IntVec); }
// An eight-bit float: the upper bits of a float32 whose exponent has another bias, rounded; below the least normal number, the nearest
// multiple of the least one.
template <int kMantissa, int kBias>
inline IntVec encode_float(Vec x) {
    constexpr int kDropped = 23 - kMantissa;
    const BitVec bits = (BitVec)magnitude(x);
    const BitVec normal = ((bits + ((1u << (kDropped - 1)) - 1) + ((bits >> kDropped) & 1)) >> kDropped) - ((127u - kBias) << kMantissa);
    const float units = (float)(1 << (kBias - 1 + kMantissa)), least = 1.0f / (float)(1 << (kBias - 1));
    const IntVec subnormal = __builtin_convertvector(round_even(min(magnitude(x), splat(least)) * units), IntVec);
    const IntVec code = magnitude(x) < least ? subnormal : (IntVec)normal;
    return code | (IntVec)((BitVec)x >> 24 & 0x80);
}
inline IntVec encode(const e4m3*, Vec x) { return encode_float<3, 7>(x); }
inline IntVec encode(const e5m2*, Vec x) { return encode_float<2, 15>(x); }

inline constexpr float largest_code(const int8_t*) { return 127.0f; }
inline constexpr float largest_code(const e4m3*) { return 448.0f; }
inline constexpr float largest_code(const e5m2*) { return 57344.0f; }

inline bf16 to_bf16(float value) {
    bf16 lanes[kWidth];
    store(lanes, splat(value));
    return lanes[0];
}
constexpr bf16 kNaN = {0x7fc0};
constexpr float kLeastScale = 1.17549435e-38f;  // the least normal float32: its reciprocal is finite

// Whether each entry has a scale of its own. Keys of such parts are stored mixed.
inline bool scaled_by_row(const PoolPart& part) { return part.format >= kInt8 && part.format != kNibbles; }

inline int64_t mix_order(int64_t dim) { return dim & -dim; }  // the greatest power of two that divides it
// Multiplies each run of `mix_order` values with a Hadamard matrix, by sums and differences of values that are `apart`. Rounded as
// the reference rounds, whatever the vectors' width. `x` is as long as whole vectors.
inline void mix(float* x, int64_t dim) {
    int64_t apart = mix_order(dim) / 2;
    for (; apart >= kWidth; apart /= 2) {
        for (int64_t run = 0; run < dim; run += 2 * apart) {
            for (int64_t i = run; i < run + apart; i += kWidth) {
                const Vec first = load(x + i), second = load(x + i + apart);
                store(x + i, first + second);
                store(x + i + apart, first - second);
            }
        }
    }
    IntVec lane;
    for (int i = 0; i < kWidth; i++) lane[i] = i;
    for (int64_t i = 0; i < dim; i += kWidth) {
        Vec v = load(x + i);
#pragma GCC unroll 4
        for (int near = kWidth / 2; near; near /= 2) {
            if (near > apart) continue;
            v = __builtin_shuffle(v, lane ^ near) + select((lane & near) != 0, -v, v);
        }
        store(x + i, v);
    }
}

// A sum of zeros that is not zero if a value is not finite.
inline bool is_finite(Vec zeros) { return sum(zeros) == 0.0f; }

template <typename Code, typename T>
inline void encode_row(const T* x, int64_t dim, Code* to, bf16* scale) {
    constexpr float kLargest = largest_code((const Code*)nullptr);
    Vec top = {}, zeros = {};
    for_each_vector(dim, [&](int64_t i, int64_t lanes) {
        const Vec v = load_lanes(x + i, lanes);
        top = max(top, magnitude(v));
        zeros += v * 0.0f;
    });
    const bool finite = is_finite(zeros);
    *scale = finite ? to_bf16(larger(maximum(top) / kLargest, kLeastScale)) : kNaN;
    const float inverse = 1.0f / scalar(*scale);
    for_each_vector(dim, [&](int64_t i, int64_t lanes) {
        const Vec scaled = max(min(load_lanes(x + i, lanes) * inverse, splat(kLargest)), splat(-kLargest));
        store_bytes(to + i, finite ? encode((const Code*)nullptr, scaled) : IntVec{}, lanes);
    });
}

// Four bits: value = zero + code * scale. The scale is the ScaleCode nearest to a 15th of the spread, as float16; what it falls short
// of is cut off at both ends alike.
inline ScaleCode scale_code(float scale) {
    constexpr float kMostHalf = 65504.0f;
    constexpr int kMostCode = 0x7bff >> 7;
    const _Float16 half = (_Float16)smaller(larger(scale, 0.0f), kMostHalf);
    uint16_t bits;
    memcpy(&bits, &half, sizeof bits);
    return {(uint8_t)larger(1, smaller((bits + 0x40) >> 7, kMostCode))};
}
inline float scalar(ScaleCode code) {
    const uint16_t bits = (uint16_t)(code.bits << 7);
    _Float16 half;
    memcpy(&half, &bits, sizeof half);
    return (float)half;
}
inline bf16 zero_point(float least, float spread, float scale) {
    return to_bf16(least + smaller(larger(spread - 15.0f * scale, 0.0f), scale) * 0.5f);  // both products are exact
}
inline IntVec encode_nibble(Vec x, Vec zero, Vec inverse) {
    // Cut off first: a product that is added to at once would not be rounded before.
    return __builtin_convertvector(round_even(max(min((x - zero) * inverse, splat(15.0f)), Vec{})), IntVec);
}

// A value of the first half of a head and one of the second share a byte.
template <typename T>
inline void encode_nibble_row(const T* x, int64_t dim, uint8_t* to, ScaleCode* scale, bf16* zero) {
    Vec top = splat(-INFINITY), bottom = splat(INFINITY), zeros = {};
    const int64_t half = dim / 2;
    for_each_vector(dim, [&](int64_t i, int64_t lanes) {
        Vec v = load_lanes(x + i, lanes);
        for (int64_t lane = lanes; lane < kWidth; lane++) v[lane] = v[0];
        top = max(top, v);
        bottom = min(bottom, v);
        zeros += v * 0.0f;
    });
    const bool finite = is_finite(zeros);
    const float least = -maximum(-bottom), spread = finite ? maximum(top) - least : 0.0f;
    *scale = scale_code(spread / 15.0f);
    *zero = finite ? zero_point(least, spread, scalar(*scale)) : kNaN;
    const Vec from = splat(finite ? scalar(*zero) : 0.0f), inverse = splat(1.0f / scalar(*scale));
    for_each_vector(half, [&](int64_t i, int64_t lanes) {
        const IntVec low = encode_nibble(load_lanes(x + i, lanes), from, inverse), high = encode_nibble(load_lanes(x + half + i, lanes), from, inverse);
        store_bytes(to + i, finite ? low | high << 4 : IntVec{}, lanes);
    });
}

// The keys of a full block: a scale and a zero for each channel over the block's rows, which are `stride` apart. The row `first` stands
// for those before it.
template <typename T>
inline void encode_nibble_channels(const T* x, int64_t stride, int first, int rows, int64_t dim, uint8_t* to, int64_t to_stride,
                                   ScaleCode* scales, bf16* zeros) {
    const int64_t half = dim / 2;
    auto row = [&](int r) { return x + larger(r, first) * stride; };
    for_each_vector(half, [&](int64_t i, int64_t lanes) {
        Vec from[2], inverse[2];
        IntVec finite[2];
        for (int side = 0; side < 2; side++) {
            const int64_t at = i + side * half;
            Vec top = load_lanes(row(0) + at, lanes), bottom = top, sum = {};
            for (int r = 0; r < rows; r++) {
                const Vec v = load_lanes(row(r) + at, lanes);
                top = max(top, v);
                bottom = min(bottom, v);
                sum += v * 0.0f;
            }
            finite[side] = sum == 0.0f;
            for (int64_t lane = 0; lane < lanes; lane++) {
                const bool is = finite[side][lane];
                const float spread = is ? top[lane] - bottom[lane] : 0.0f;
                scales[at + lane] = scale_code(spread / 15.0f);
                const float scale = scalar(scales[at + lane]);
                zeros[at + lane] = is ? zero_point(bottom[lane], spread, scale) : kNaN;
                from[side][lane] = is ? scalar(zeros[at + lane]) : 0.0f;
                inverse[side][lane] = 1.0f / scale;
            }
        }
        for (int r = 0; r < rows; r++) {
            const IntVec low = encode_nibble(load_lanes(row(r) + i, lanes), from[0], inverse[0]) & finite[0];
            const IntVec high = encode_nibble(load_lanes(row(r) + half + i, lanes), from[1], inverse[1]) & finite[1];
            store_bytes(to + r * to_stride + i, low | high << 4, lanes);
        }
    });
}

}  // namespace
}  // namespace pagoda::PAGODA_ISA
