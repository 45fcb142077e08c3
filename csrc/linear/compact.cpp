#include "linear/compact.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "threads.h"

namespace pagoda {
namespace {

constexpr int kClasses = 128;  // high bytes without their sign
constexpr uint8_t kNone = 0xff;

// body(strip) for all strips.
template <typename Body>
void for_strips(int64_t num_out, int threads, Body body) {
    parallel_ranges(num_out / kStripRows, 1, threads, [&](int64_t begin, int64_t end) {
        for (int64_t strip = begin; strip < end; strip++) body(strip);
    });
}

std::array<int32_t, kClasses> count_classes(const uint16_t* values, int64_t count) {
    std::array<int32_t, kClasses> found{};
    for (int64_t i = 0; i < count; i++) found[values[i] >> 8 & 0x7f]++;
    return found;
}

}  // namespace

void plan_compact(const uint16_t* values, int64_t num_out, int64_t num_in, uint8_t* high_bytes, int64_t* first_exceptions, int threads) {
    constexpr int kKept = kHighBytes / 2;
    first_exceptions[0] = 0;
    for_strips(num_out, threads, [&](int64_t strip) {
        const auto counts = count_classes(values + strip * kStripRows * num_in, kStripRows * num_in);
        std::array<uint8_t, kClasses> order;
        std::iota(order.begin(), order.end(), 0);
        std::partial_sort(order.begin(), order.begin() + kKept, order.end(), [&](int a, int b) { return counts[a] > counts[b]; });
        int64_t exceptions = kStripRows * num_in;
        for (int i = 0; i < kKept; i++) {
            exceptions -= counts[order[i]];
            high_bytes[strip * kHighBytes + i] = order[i];
            high_bytes[strip * kHighBytes + kKept + i] = order[i] | 0x80;
        }
        first_exceptions[strip + 1] = exceptions;
    });
    std::partial_sum(first_exceptions, first_exceptions + num_out / kStripRows + 1, first_exceptions);
}

void compact(const uint16_t* values, int64_t num_out, int64_t num_in, const uint8_t* high_bytes, const int64_t* first_exceptions,
             uint8_t* strips, Exception* exceptions, int threads) {
    const int64_t tiles = num_in / kCompactDepth;
    for_strips(num_out, threads, [&](int64_t strip) {
        std::array<uint8_t, 256> codes;
        codes.fill(kNone);
        for (int code = 0; code < kHighBytes; code++) codes[high_bytes[strip * kHighBytes + code]] = code;
        Exception* next = exceptions + first_exceptions[strip];
        std::fill_n(strips + strip * tiles * kCompactTile, tiles * kCompactTile, uint8_t{0});
        for (int64_t tile = 0; tile < tiles; tile++) {
            uint8_t* to = strips + (strip * tiles + tile) * kCompactTile;
            for (int64_t row = 0; row < kStripRows; row++) {
                uint8_t* group = to + row / 4 * kCompactGroup;
                const int64_t pair = row % 4 / 2, half = row % 2 * 8;
                const uint16_t* from = values + (strip * kStripRows + row) * num_in + tile * kCompactDepth;
                for (int64_t column = 0; column < kCompactDepth; column++) {
                    const int64_t at = column / 8 * 16 + half + column % 8;
                    const uint8_t code = codes[from[column] >> 8];
                    group[64 * pair + at] = static_cast<uint8_t>(from[column]);
                    if (code == kNone) {
                        const int64_t place = kTileValues * tile + kCompactDepth * row + column;
                        *next++ = {static_cast<uint32_t>(place), from[column], 0};
                    } else {
                        group[128 + at] |= static_cast<uint8_t>(code << 4 * pair);
                    }
                }
            }
        }
    });
}

}  // namespace pagoda
