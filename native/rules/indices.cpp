#include "rules/indices.h"

#include "rules/rules.h"
#include "rules/validate.h"

#include "ggml-backend.h"
#include "ggml-impl.h"

#include <algorithm>
#include <cstring>
#include <stdexcept>
#include <string>

namespace mesh {

namespace {

// Nodes that take row numbers, per graph: each is compared with all nodes before it. Known graphs have hundreds.
constexpr size_t MAX_INDEX_USERS = 8192;

// Of another device's memory that is looked at in one go. A token's numbers are a few hundred bytes.
constexpr size_t PIECE_BYTES = 64 << 10;

// Rows that a node sets are told apart up to so many; of a longer prompt they lie side by side anyway.
constexpr int64_t MAX_ROWS_APART = 256;

struct index_use {
    size_t source;
    int64_t bound;
    bool distinct;
};

// Which source of an op holds row numbers, if one does.
bool find_use(const ggml_tensor & node, index_use & use) {
    switch (node.op) {
    case GGML_OP_GET_ROWS:
        use = {1, node.src[0]->ne[1], false};
        return true;
    case GGML_OP_SET_ROWS:
        use = {1, node.ne[1], false};
        return true;
    case GGML_OP_ADD_ID:
        use = {2, node.src[1]->ne[1], false};
        return true;
    case GGML_OP_MUL_MAT_ID:
        // The repacking kernel has room for one row per token and expert.
        use = {2, node.src[0]->ne[2], true};
        return true;
    case GGML_OP_SSM_SCAN:
        use = {6, node.src[0]->ne[3], false};
        return true;
    default:
        return false;
    }
}

// All that a node may write. On other devices kernels may write behind their results, up to a round length.
byte_range written(const ggml_tensor & node) {
    byte_range all(node);
    if (is_far(node.buffer) && all.begin < all.end) {
        all.end.address =
            all.begin.address + ggml_backend_buft_get_alloc_size(ggml_backend_buffer_get_type(node.buffer), &node);
    }
    return all;
}

bool sorts(const ggml_tensor & node) {
    return node.op == GGML_OP_ARGSORT || node.op == GGML_OP_TOP_K;
}

// Copies numbers as they are.
bool copies(const ggml_tensor & node) {
    return (node.op == GGML_OP_CONT || node.op == GGML_OP_DUP) && node.type == GGML_TYPE_I32 &&
           node.src[0]->type == GGML_TYPE_I32;
}

// All bytes of `part` have been written by `writer`: rows with gaps between them would leave old numbers in the gaps.
bool wrote_all_of(const ggml_tensor & part, const ggml_tensor & writer) {
    return byte_range(writer).contains(byte_range(part)) && ggml_is_contiguous(&writer);
}

bool same_numbers(const ggml_tensor & a, const ggml_tensor & b) {
    return begin_together(a, b) && a.type == b.type && std::equal(a.ne, a.ne + GGML_MAX_DIMS, b.ne) &&
           std::equal(a.nb, a.nb + GGML_MAX_DIMS, b.nb);
}

// Layers share their row numbers: one look is enough.
void add_check(std::vector<index_check> & checks, const ggml_tensor * ids, const index_use & use) {
    for (index_check & known : checks) {
        if (known.before == 0 && same_numbers(*known.tensor, *ids)) {
            known.bound = std::min(known.bound, use.bound);
            known.distinct = known.distinct || use.distinct;
            return;
        }
    }
    checks.push_back({ids, use.bound, use.distinct});
}

// Follows a graph in the order of execution, and decides for each node that takes row numbers.
class index_finder {
  public:
    void add(size_t index, const ggml_tensor & node) {
        index_use use{};
        const bool runs = (node.flags & GGML_TENSOR_FLAG_COMPUTE) != 0 && !ggml_is_empty(&node);
        if (runs && find_use(node, use)) {
            add_use(index, node, use);
        }
        if (!op_only_renames(node.op)) {
            writers_.push_back({written(node), &node, sorter_of(node), nullptr});
        }
        ++position_;
    }

    std::vector<index_check> take() {
        std::stable_sort(checks_.begin(), checks_.end(), [](const index_check & a, const index_check & b) {
            return a.before < b.before;
        });
        return std::move(checks_);
    }

  private:
    struct writer {
        byte_range range;
        const ggml_tensor * node;
        const ggml_tensor *
            sorter;               // whose numbers it holds: its own, or a copy of them; null where it holds others
        const ggml_tensor * ids;  // the numbers that have been taken from it
    };

    std::vector<index_check> checks_;
    std::vector<writer> writers_;
    size_t users_ = 0;
    size_t position_ = 0;

    void add_use(size_t index, const ggml_tensor & node, const index_use & use) {
        const ggml_tensor & ids = *node.src[use.source];
        if (++users_ > MAX_INDEX_USERS) {
            refuse(index, node.op, "too many nodes take row numbers");
        }
        if (ids.nb[0] != ggml_type_size(ids.type)) {
            refuse(index, node.op, "its row numbers do not lie side by side");
        }
        writer * last = last_writer_of(ids);
        if (last == nullptr) {
            add_check(checks_, &ids, use);
        } else if (!is_bounded_by(ids, *last, use) || !takes_the_same(*last, ids)) {
            checks_.push_back({&ids, use.bound, use.distinct, position_});
        }
    }

    writer * last_writer_of(const ggml_tensor & tensor) {
        const byte_range range(tensor);
        const auto last = std::find_if(writers_.rbegin(), writers_.rend(), [&](const writer & each) {
            return each.range.overlaps(range);
        });
        return last != writers_.rend() ? &*last : nullptr;
    }

    // Null where nothing is known of the numbers that the node writes.
    const ggml_tensor * sorter_of(const ggml_tensor & node) {
        if ((node.flags & GGML_TENSOR_FLAG_COMPUTE) == 0 || ggml_is_empty(&node)) {
            return nullptr;
        }
        if (sorts(node)) {
            return &node;
        }
        if (!copies(node)) {
            return nullptr;
        }
        writer * from = last_writer_of(*node.src[0]);
        const bool known = from != nullptr && from->sorter != nullptr && wrote_all_of(*node.src[0], *from->node) &&
                           takes_the_same(*from, *node.src[0]);
        return known ? from->sorter : nullptr;
    }

    static bool is_bounded_by(const ggml_tensor & ids, const writer & from, const index_use & use) {
        if (from.sorter == nullptr || ids.type != GGML_TYPE_I32 || from.sorter->src[0]->ne[0] > use.bound) {
            return false;
        }
        // A copy may have other rows than what was sorted.
        const bool distinct = from.sorter == from.node && is_part_of_rows(ids, *from.node);
        return wrote_all_of(ids, *from.node) && (!use.distinct || distinct);
    }

    // GPUs choose experts in one kernel, which writes no more of what it sorts than its first user takes: a second
    // user that takes others would find old numbers there.
    static bool takes_the_same(writer & from, const ggml_tensor & ids) {
        if (is_far(ids.buffer) && from.ids != nullptr && !same_numbers(*from.ids, ids)) {
            return false;
        }
        from.ids = &ids;
        return true;
    }
};

// --- before a run ---

// Rows of numbers, in the order in which they lie. Those of another device are copied, a piece at a time: a client
// chooses how many there are and how far they lie apart.
class number_rows {
  public:
    // `near` are the tensor's bytes in this process; null where they have to be asked for.
    number_rows(const ggml_tensor & tensor, const uint8_t * near)
        : tensor_(tensor), near_(near),
          piece_(ggml_is_contiguous(&tensor) ? PIECE_BYTES : ggml_row_size(tensor.type, tensor.ne[0])) {}

    // `size` bytes at `offset`; valid until the next call.
    const uint8_t * at(size_t offset, size_t size) {
        if (near_ != nullptr) {
            return near_ + offset;
        }
        if (offset < begin_ || offset + size > begin_ + copy_.size()) {
            copy_.resize(std::min(std::max(piece_, size), ggml_nbytes(&tensor_) - offset));
            ggml_backend_tensor_get(&tensor_, copy_.data(), offset, copy_.size());
            begin_ = offset;
        }
        return copy_.data() + (offset - begin_);
    }

  private:
    const ggml_tensor & tensor_;
    const uint8_t * near_;
    size_t piece_;
    size_t begin_ = 0;
    std::vector<uint8_t> copy_;
};

// Where all of a tensor's bytes are fresh, and written once; null else.
const uint8_t * find_fresh(const ggml_tensor & tensor, const std::vector<fresh_bytes> & fresh) {
    const byte_range wanted(tensor);
    const fresh_bytes * only = nullptr;
    for (const fresh_bytes & each : fresh) {
        if (each.place.overlaps(wanted)) {
            if (only != nullptr) {
                return nullptr;
            }
            only = &each;
        }
    }
    const bool whole = only != nullptr && only->place.contains(wanted);
    return whole ? only->bytes->data() + (wanted.begin.address - only->place.begin.address) : nullptr;
}

[[noreturn]] void out_of_bounds(int64_t number, int64_t bound) {
    throw std::invalid_argument(
        "row " + std::to_string(number) + " is asked for where there are " + std::to_string(bound)
    );
}

template <typename Number>
void check_part(const uint8_t * part, size_t count, const index_check & check, std::vector<Number> & seen) {
    for (size_t i = 0; i < count; ++i) {
        Number number = 0;
        std::memcpy(&number, part + i * sizeof number, sizeof number);
        if (number < 0 || number >= check.bound) {
            out_of_bounds(number, check.bound);
        }
        if (check.distinct) {
            seen.push_back(number);
        }
    }
}

template <typename Number>
void check_row(number_rows & rows, size_t offset, const index_check & check, std::vector<Number> & seen) {
    const auto length = static_cast<size_t>(check.tensor->ne[0]);
    constexpr size_t at_once = PIECE_BYTES / sizeof(Number);
    // More numbers than there are different ones: said before they are remembered.
    bool twice = check.distinct && check.tensor->ne[0] > check.bound;
    seen.clear();
    for (size_t first = 0; first < length && !twice; first += at_once) {
        const size_t count = std::min(at_once, length - first);
        check_part<Number>(rows.at(offset + first * sizeof(Number), count * sizeof(Number)), count, check, seen);
    }
    std::sort(seen.begin(), seen.end());
    twice = twice || std::adjacent_find(seen.begin(), seen.end()) != seen.end();
    if (twice) {
        throw std::invalid_argument("one expert is asked for twice by one token");
    }
}

template <typename Number> void check_numbers(const index_check & check, const uint8_t * near) {
    const ggml_tensor & t = *check.tensor;
    number_rows rows(t, near);
    std::vector<Number> seen;
    for (int64_t i3 = 0; i3 < t.ne[3]; ++i3) {
        for (int64_t i2 = 0; i2 < t.ne[2]; ++i2) {
            for (int64_t i1 = 0; i1 < t.ne[1]; ++i1) {
                const size_t offset = static_cast<size_t>(i1) * t.nb[1] + static_cast<size_t>(i2) * t.nb[2] +
                                      static_cast<size_t>(i3) * t.nb[3];
                check_row<Number>(rows, offset, check, seen);
            }
        }
    }
}

}  // namespace

bool is_part_of_rows(const ggml_tensor & ids, const ggml_tensor & sorted) {
    const size_t offset = byte_range(ids).begin.address - byte_range(sorted).begin.address;
    const size_t row = sorted.nb[1];
    if (ids.nb[0] != sizeof(int32_t) || row == 0 || (ids.ne[1] > 1 && ids.nb[1] % row != 0)) {
        return false;
    }
    return offset % row + static_cast<size_t>(ids.ne[0]) * sizeof(int32_t) <=
           static_cast<size_t>(sorted.ne[0]) * sizeof(int32_t);
}

std::vector<index_check> index_checks(const std::vector<placed_node> & nodes) {
    index_finder finder;
    for (const auto & [index, node] : nodes) {
        finder.add(index, *node);
    }
    return finder.take();
}

void run_checks(
    const std::vector<index_check> & checks, const std::vector<fresh_bytes> & fresh,
    const std::function<void()> & settle
) {
    for (const index_check & check : checks) {
        const uint8_t * near = find_fresh(*check.tensor, fresh);
        if (near == nullptr) {
            settle();
            near = is_far(check.tensor->buffer) ? nullptr : static_cast<const uint8_t *>(check.tensor->data);
        }
        if (check.tensor->type == GGML_TYPE_I64) {
            check_numbers<int64_t>(check, near);
        } else {
            check_numbers<int32_t>(check, near);
        }
    }
}

// --- what a run writes ---

namespace {

template <typename Number> std::vector<int64_t> sorted_numbers(const uint8_t * bytes, int64_t count) {
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < count; ++i) {
        Number number = 0;
        std::memcpy(&number, bytes + static_cast<size_t>(i) * sizeof number, sizeof number);
        numbers.push_back(number);
    }
    std::sort(numbers.begin(), numbers.end());
    return numbers;
}

// The numbers that a node is going to find, where none before it writes them; null where they are not known yet.
const uint8_t * known_numbers(
    const ggml_tensor & ids, const std::vector<index_check> & checks, const std::vector<fresh_bytes> & fresh
) {
    const bool stay = std::any_of(checks.begin(), checks.end(), [&](const index_check & each) {
        return each.before == 0 && same_numbers(*each.tensor, ids);
    });
    if (!stay || !ggml_is_contiguous(&ids)) {
        return nullptr;
    }
    const byte_range place(ids);
    const bool change = std::any_of(fresh.begin(), fresh.end(), [&](const fresh_bytes & each) {
        return each.place.overlaps(place);
    });
    return change || is_far(ids.buffer) ? find_fresh(ids, fresh) : static_cast<const uint8_t *>(ids.data);
}

// The rows that a node sets. False where they are not known.
bool add_rows(
    const ggml_tensor & node, const std::vector<index_check> & checks, const std::vector<fresh_bytes> & fresh,
    std::vector<byte_range> & found
) {
    if (node.op != GGML_OP_SET_ROWS || node.ne[2] != 1 || node.ne[3] != 1) {
        return false;
    }
    const ggml_tensor & ids = *node.src[1];
    const uint8_t * bytes = known_numbers(ids, checks, fresh);
    if (bytes == nullptr) {
        return false;
    }
    const int64_t count = ggml_nelements(&ids);
    const std::vector<int64_t> rows =
        ids.type == GGML_TYPE_I64 ? sorted_numbers<int64_t>(bytes, count) : sorted_numbers<int32_t>(bytes, count);
    if (rows.empty() || rows.front() < 0 || rows.back() >= node.ne[1]) {
        return rows.empty();  // wrong ones are refused when it runs
    }
    const auto add = [&](int64_t first, int64_t last) {
        const auto * base = static_cast<const uint8_t *>(node.data) + static_cast<size_t>(first) * node.nb[1];
        found.emplace_back(
            base, static_cast<size_t>(last - first) * node.nb[1] + ggml_row_size(node.type, node.ne[0]),
            node.buffer
        );
    };
    if (count > MAX_ROWS_APART) {
        add(rows.front(), rows.back());
    } else {
        std::for_each(rows.begin(), rows.end(), [&](int64_t row) { add(row, row); });
    }
    return true;
}

}  // namespace

std::vector<byte_range> written_ranges(
    const ggml_cgraph & graph, const std::vector<index_check> & checks, const std::vector<fresh_bytes> & fresh,
    const byte_range & within
) {
    std::vector<byte_range> found;
    for (int i = 0; i < graph.n_nodes; ++i) {
        const ggml_tensor & node = *graph.nodes[i];
        const byte_range all = written(node);
        if (!op_only_renames(node.op) && all.overlaps(within) && !add_rows(node, checks, fresh, found)) {
            found.push_back(all);
        }
    }
    return found;
}

}  // namespace mesh
