// How a kernel reads the keys and values of one sequence and head from pages, with the sequence's block table. A
// position is that of a token in its sequence. The order of sums depends only on positions, never on the page size or
// the tokens of a step.
#pragma once
#include <algorithm>
#include "simd.h"

namespace native {

// Which keys a query sees, up to the key of its own token; 0 means no limit.
struct Sight {
    int64_t window;  // the number of newest keys that it sees
    int64_t chunk;   // it sees the keys from the last multiple of this on

    int64_t oldest(int64_t position) const {
        if (window != 0) return std::max<int64_t>(0, position + 1 - window);
        return chunk == 0 ? 0 : position / chunk * chunk;
    }
};

// The keys or the values of one head in a pool [pages][kv_heads][page_size][head_dim].
template <class T> struct Column {
    const T* start;       // of the head in page 0
    int64_t page_stride;  // from a page to the next one, in elements
    int64_t row;          // elements of a position
};

template <class T> struct Live {
    Column<T> keys, values;
    const int32_t* table;  // the page of positions i * page_size and after
    int64_t page_size;
    int64_t first, stop;  // the positions that are seen; pages without any are not read

    const T* at(const Column<T>& column, int64_t position) const {
        const auto place = (uint32_t)position, size = (uint32_t)page_size;
        return column.start + table[place / size] * column.page_stride + place % size * column.row;
    }
};

}  // namespace native
