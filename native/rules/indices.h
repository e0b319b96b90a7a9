#pragma once

// Row numbers that a graph reads from memory. A wrong one would make a kernel
// read or write outside of its tensor, or end the process, and no rule on shapes
// can tell: the numbers themselves have to be looked at.

#include "ggml.h"
#include "rules/rules.h"

#include <cstddef>
#include <cstdint>
#include <functional>
#include <vector>

namespace mesh {

// Every number in `tensor` has to be at least 0 and less than `bound`.
struct index_check {
    const ggml_tensor * tensor;
    int64_t bound;
    bool distinct;      // and no number may come twice in a row
    size_t before = 0;  // the node that takes them, by its place in the graph; 0 where no node writes them
};

// A node, and its place in the table that it came from.
struct placed_node {
    size_t index;
    const ggml_tensor * node;
};

// What has to be checked when these nodes run, which come in the order of execution; so do the checks. Numbers that
// are computed on the way need none where they come from ARGSORT and TOP_K, whose results are bounded by what they sort,
// or are copied from there, and nothing is written over them. Others are looked at once they are computed, before the
// node that takes them. Throws std::invalid_argument.
std::vector<index_check> index_checks(const std::vector<placed_node> & nodes);

// Whether each row of `ids` lies within one row of `sorted`, side by side, so that no number comes twice.
bool is_part_of_rows(const ggml_tensor & ids, const ggml_tensor & sorted);

// Bytes that have just been written to a graph's memory, or are on their way there.
struct fresh_bytes {
    byte_range place;
    const std::vector<uint8_t> * bytes;
};

// Reads the numbers, from `fresh` where that is possible: a device may be slow to give them back. `settle` is
// called before anything is read from the device's memory. Throws std::invalid_argument where one is out of bounds.
void run_checks(
    const std::vector<index_check> & checks, const std::vector<fresh_bytes> & fresh = {},
    const std::function<void()> & settle = [] {}
);

// What the nodes of a graph write inside of `within` when it runs with `fresh`: their results, of which SET_ROWS may
// write only rows. `checks` are the graph's.
std::vector<byte_range> written_ranges(
    const ggml_cgraph & graph, const std::vector<index_check> & checks, const std::vector<fresh_bytes> & fresh,
    const byte_range & within
);

}  // namespace mesh
