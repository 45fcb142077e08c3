// Where a tile's keys and values are, and which of them each of its rows sees.
#pragma once

#include "kv_codes.h"

namespace pagoda::PAGODA_ISA {
namespace {

inline int64_t padded(int64_t head_dim) { return (head_dim + 15) / 16 * 16; }

// Where the outputs of a KV head's row are among those of all tokens and heads. `row` counts as a tile's rows do.
inline int64_t output_of(const AttentionArgs& a, int64_t first_token_row, int kv_head, int64_t row) {
    const int64_t group = a.num_heads / a.pool.num_kv_heads;
    return (first_token_row + row / group) * a.num_heads + kv_head * group + row % group;
}

// Entries that are in one place. Where blocks are quantized when they are full (Pool::staged), a tile reads two: all blocks before
// a row's own from the pool, and its own as it was.
//
//     block            0    1    2    3             rows of a tile in blocks 1 to 3
//     earlier        [ r123 r23  r3  ]              in codes
//     own                 [ r1   r2   r3 ]          staged
struct Stretch {
    enum Blocks { kAll, kEarlier, kOwn };
    Blocks of;
    const PoolPart *keys, *values;
    const int32_t* slot_of;  // where a block is among the staged ones; null: where its id says
    int64_t begin, end;
};

struct Stretches {
    Stretch each[2];
    int count;
    const Stretch* begin() const { return each; }
    const Stretch* end() const { return each + count; }
};

inline int64_t position_of(const AttentionArgs& a, const Tile& t, int64_t row) {
    const int64_t token = row / (a.num_heads / a.pool.num_kv_heads);
    return a.places ? a.places[t.first_token_row + token] : t.first_position + token;
}

inline Stretches stretches(const AttentionArgs& a, const Tile& t) {
    const Pool& pool = a.pool;
    if (!pool.staged.slot_of) return {{{Stretch::kAll, &pool.keys, &pool.values, nullptr, t.key_begin, t.key_end}}, 1};
    auto own = [&](int64_t row) { return position_of(a, t, row) / pool.block_size * pool.block_size; };
    const int64_t first_own = own(t.row_begin), last_own = own(t.row_end - 1);
    return {{{Stretch::kEarlier, &pool.keys, &pool.values, nullptr, t.key_begin, smaller(last_own, t.key_end)},
             {Stretch::kOwn, &pool.staged.keys, &pool.staged.values, pool.staged.slot_of, larger(first_own, t.key_begin), t.key_end}},
            2};
}

// Where the sequence's first token is in full, if the tile has it; -1: it is an entry like the others. Rows of the block that it is in
// read it with the others of that block, which is their own.
inline int32_t first_row(const AttentionArgs& a, const Tile& t) {
    const Staged& staged = a.pool.staged;
    return staged.slot_of && t.key_begin == 0 ? staged.firsts.row_of[t.blocks[0]] : -1;
}

// A row's own part of the keys [begin, end), counted from `begin`: it sees first <= j < last.
struct Seen {
    int first, last;
};
inline Seen seen(const AttentionArgs& a, const Tile& t, const Stretch& s, int64_t row, int64_t begin, int64_t end) {
    const int64_t position = position_of(a, t, row), own = position / a.pool.block_size * a.pool.block_size;
    int64_t first = a.window > position ? 0 : position - a.window + 1, last = position + 1;
    if (s.of == Stretch::kEarlier) last = own;
    if (s.of == Stretch::kOwn) first = larger(first, own);
    return {(int)(smaller(larger(first, begin), end) - begin), (int)(larger(smaller(last, end), begin) - begin)};
}

// Where the entries that are met together, at most kTileKeys, end if they begin at `begin`: at the same places in every part and window, so
// that all but the first lie together in blocks.
inline int64_t tile_end(int64_t begin, int64_t end) { return smaller((begin / kTileKeys + 1) * kTileKeys, end); }

// A part's entries of one head.
struct Place {
    const char* data;
    int64_t block_bytes, slot_bytes;
    Place(const PoolPart& part, int kv_head) {
        const int64_t unit = bytes_of(part.format);
        data = (const char*)part.data + kv_head * part.head_stride * unit;
        block_bytes = part.block_stride * unit;
        slot_bytes = part.slot_stride * unit;
    }
};

// Where up to kTileKeys consecutive KV entries are. `count` is rounded up to 4 by repeating the last entry, so that
// kernels need no tail; the repeated ones are masked.
template <typename T>
struct Entries {
    const T* keys[kTileKeys];
    const T* values[kTileKeys];
    int count = 0;

    Entries() = default;
    // A head's from `begin` on, as many as fit and the stretch has: maybe none.
    Entries(const AttentionArgs& a, const Tile& t, const Stretch& s, int kv_head, int64_t begin) { find(a, t, s, kv_head, begin); }
    void find(const AttentionArgs& a, const Tile& t, const Stretch& s, int kv_head, int64_t begin) {
        count = (int)larger<int64_t>(0, tile_end(begin, s.end) - begin);
        const int64_t block_size = a.pool.block_size;
        const Place key(*s.keys, kv_head), value(*s.values, kv_head);
        int64_t slot = begin % block_size;
        const int32_t* block = t.blocks + begin / block_size;
        for (int j = 0; j < count;) {
            const int64_t at = s.slot_of ? s.slot_of[*block] : *block;
            const int slots = (int)smaller<int64_t>(block_size - slot, count - j);
            list(key.data + at * key.block_bytes + slot * key.slot_bytes, key.slot_bytes, slots, keys + j);
            list(value.data + at * value.block_bytes + slot * value.slot_bytes, value.slot_bytes, slots, values + j);
            j += slots;
            slot = 0;
            block++;
        }
        for (int j = count; j % 4; j++) {
            keys[j] = keys[count - 1];
            values[j] = values[count - 1];
        }
    }

private:
    static PAGODA_INLINE void list(const char* first, int64_t bytes, int count, const T** to) {
        for (int i = 0; i < count; i++) to[i] = (const T*)(first + i * bytes);
    }
};

// Asks for the entries that come next, a little at a time between what is computed, so that neither reading nor computing rests: blocks
// lie anywhere, and the hardware cannot foresee the next one. An entry of each quarter of the list is asked for in turn:
//
//     entry    0 1 2 ...   16 17 18 ...   32 33 34 ...   48 49 50 ...
//     turn     0 1 2 ...    0  1  2 ...    0  1  2 ...    0  1  2 ...
//
// Quarters are in different pages, and the hardware reads ahead in each page by itself. Measured, what is asked for one page after the
// other takes a third longer; in which order it is read then makes no difference.
class Lookahead {
public:
    template <typename T>
    Lookahead(const Entries<T>& next, int64_t key_bytes, int64_t value_bytes)
        : keys_((const void* const*)next.keys), values_((const void* const*)next.values), count_(next.count), quarter_((next.count + 3) / 4),
          key_bytes_(key_bytes), value_bytes_(value_bytes) {}

    // A line of each quarter's next key, and of its value.
    PAGODA_INLINE void some() {
        if (done()) return;
        if (at_ < key_bytes_) ask(keys_ + turn_);
        if (at_ < value_bytes_) ask(values_ + turn_);
        at_ += kLine;
        if (at_ < larger(key_bytes_, value_bytes_)) return;
        at_ = 0;
        turn_++;
    }
    // A share `n / of` of all there may be.
    void part(int64_t n, int64_t of) {
        if (done()) return;
        owed_ += n * (kTileKeys / 4) * ((larger(key_bytes_, value_bytes_) + kLine - 1) / kLine);
        for (; owed_ >= of; owed_ -= of) some();
    }
    void finish() {
        while (!done()) some();
    }
    bool done() const { return turn_ >= quarter_; }

private:
    static constexpr int64_t kLine = 64;

    PAGODA_INLINE void ask(const void* const* first) const {  // the list is padded to four equal quarters
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++) prefetch_line((const char*)first[i * quarter_] + at_);
    }

    const void* const *keys_, *const *values_;  // of pointers of any type: GCC takes others for different objects
    const int count_, quarter_;
    const int64_t key_bytes_, value_bytes_;
    int64_t at_ = 0, owed_ = 0;  // of the present turn's rows; shares of calls, in units of `of`
    int turn_ = 0;
};

// Entries as they lie, a head's from `begin` on, and those that come next.
template <typename T>
class InPlace {
public:
    using Element = T;
    InPlace(const AttentionArgs& a, const Tile& t, const Stretch& s, void*) : a_(a), t_(t), s_(s) {
        entries_[0].find(a, t, s, t.kv_head, s.begin);
        lookahead().finish();
    }

    // Valid until the next call, which must be for what `then` says.
    const Entries<T>& at(int /*head*/, int64_t /*begin*/, int then_head, int64_t then_begin) {
        const int now = next_;
        next_ = 1 - now;
        entries_[next_].find(a_, t_, s_, then_head, then_begin);
        return entries_[now];
    }
    Lookahead lookahead() const { return Lookahead(entries_[next_], row_bytes(), row_bytes()); }
    Lookahead key_lookahead() const { return Lookahead(entries_[next_], row_bytes(), 0); }
    // What scores, and probabilities, are multiplied with for each entry; null: nothing.
    const float* key_scales() const { return nullptr; }
    const float* value_scales() const { return nullptr; }

protected:
    int64_t row_bytes() const { return a_.pool.head_dim * (int64_t)sizeof(T); }

    const AttentionArgs& a_;
    const Tile& t_;
    const Stretch& s_;
    Entries<T> entries_[2];
    int next_ = 0;
};

}  // namespace
}  // namespace pagoda::PAGODA_ISA
