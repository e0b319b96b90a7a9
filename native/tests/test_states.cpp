// Saved states: what a worker copies and refuses to, and what the host keeps, drops and puts back.

#include "ggml-mesh.h"
#include "host/saved_states.h"
#include "tests/check.h"
#include "tests/model.h"
#include "tests/rogue_client.h"
#include "tests/session.h"
#include "worker/deferred_copies.h"
#include "worker/worker.h"

#include <chrono>
#include <cstring>
#include <numeric>
#include <random>
#include <thread>

using namespace session;
using mesh::state_kind;
using mesh::wire::command;
using mesh::wire::copied_range;

namespace {

constexpr uint64_t QUOTA = 8 << 20;
constexpr uint64_t SIZE = 4096;

std::string
complaint_about(worker & to, const mesh::wire::copies & head, const std::vector<copied_range> & ranges) {
    rogue_client other(to);
    other.greet();
    other.alloc(1, SIZE);
    CHECK_EQUAL(other.reserve(2, 0, SIZE / 2), SIZE / 2);
    CHECK_EQUAL(other.reserve(4, 0, SIZE / 2), SIZE / 2);
    other.send(command::copies, {{&head, sizeof head}, {ranges.data(), ranges.size() * sizeof(copied_range)}});
    const mesh::wire::span nothing = {9, 0, 0, 0};
    other.send(command::get, {{&nothing, sizeof nothing}});  // what is not refused before is here
    return other.complaint();
}

std::string complaint_about(worker & to, const copied_range & range) {
    return complaint_about(to, {1, 2}, {range});
}

// A cache on a device, as an engine has it: two tensors of so many rows, each as wide as the other.
class cache {
  public:
    static constexpr size_t ROW = 32 * sizeof(float);
    static constexpr int64_t ROWS = 16;

    explicit cache(const device & on) : context_(ggml_init({8 * ggml_tensor_overhead(), nullptr, true})) {
        for (ggml_tensor *& tensor : tensors_) {
            tensor = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, 32, ROWS);
        }
        buffer_.reset(
            ggml_backend_alloc_ctx_tensors_from_buft(context_.get(), ggml_backend_dev_buffer_type(on.handle))
        );
        CHECK(buffer_ != nullptr);
    }

    void fill(size_t first, size_t count, uint8_t value) {
        const std::vector<uint8_t> bytes(count * ROW, value);
        for (ggml_tensor * tensor : tensors_) {
            ggml_backend_tensor_set(tensor, bytes.data(), first * ROW, bytes.size());
        }
    }

    // The value of all bytes in these rows; -1 where they differ.
    int value(size_t first, size_t count) const {
        std::vector<uint8_t> bytes(count * ROW);
        int found = -2;
        for (const ggml_tensor * tensor : tensors_) {
            ggml_backend_tensor_get(tensor, bytes.data(), first * ROW, bytes.size());
            for (const uint8_t byte : bytes) {
                found = found == -2 || found == byte ? byte : -1;
            }
        }
        return found;
    }

    // As an engine writes a state: a few bytes about each tensor, then its rows, in one piece or row by row.
    mesh::captured_state captured(size_t first, size_t count) const {
        const size_t size = 2 * (sizeof count + count * ROW);
        return mesh::saved_states::capture(size, [&](uint8_t * to, size_t) {
            for (const ggml_tensor * tensor : tensors_) {
                std::memcpy(to, &count, sizeof count);
                ggml_backend_tensor_get(tensor, to + sizeof count, first * ROW, count * ROW);
                to += sizeof count + count * ROW;
            }
            return size;
        });
    }

    size_t read(const uint8_t * from, size_t size, size_t first, bool row_by_row = false) {
        const uint8_t * begin = from;
        for (ggml_tensor * tensor : tensors_) {
            size_t count = 0;
            std::memcpy(&count, from, sizeof count);
            from += sizeof count;
            for (size_t row = 0; row < count; row += row_by_row ? 1 : count) {
                ggml_backend_tensor_set(tensor, from, (first + row) * ROW, (row_by_row ? 1 : count) * ROW);
                from += (row_by_row ? 1 : count) * ROW;
            }
        }
        return static_cast<size_t>(from - begin) == size ? size : 0;
    }

  private:
    ggml_context_ptr context_;
    ggml_tensor * tensors_[2] = {};
    ggml_backend_buffer_ptr buffer_;
};

// A worker with a cache, and room for so many states of two rows.
class kept_states {
  public:
    explicit kept_states(size_t room, size_t checkpoints = 4)
        : remote_(QUOTA), between_(remote_.connect(), cut::never, 0, "states"), on_(between_.client_fd()),
          memory(on_) {
        CHECK(states.keep(checkpoints));
        states.reserve({}, room * 4 * cache::ROW);
    }

    std::vector<uint8_t> save(mesh::state_owner whose, size_t first = 0) {
        const mesh::captured_state state = memory.captured(first, 2);
        std::vector<uint8_t> kept(mesh::saved_states::kept_size(state));
        states.save(state, whose, kept.data());
        return kept;
    }

    bool restore(
        const std::vector<uint8_t> & kept, mesh::state_owner whose, size_t first = 0, bool row_by_row = false
    ) {
        CHECK(mesh::saved_states::is_reference(kept.data(), kept.size()));
        return states.restore(kept.data(), kept.size(), whose, [&](const uint8_t * from, size_t size) {
            return memory.read(from, size, first, row_by_row);
        });
    }

    std::string failure() const {
        return on_.failure();
    }

    // Somebody else takes all the memory; the next run tells of it.
    void crowd_out() {
        rogue_client other(remote_);
        CHECK(other.alloc(1, other.greet()));
        other.free(1);
        CHECK(other.alloc(2, 1));  // so that it is free
        exercise(on_, host::example_named("add"));
    }

  private:
    worker remote_;
    relay between_;
    device on_;

  public:
    cache memory;
    mesh::saved_states states;
};

// Memory of a worker's own, filled with numbers, and copies of it that wait.
class waiting_copies {
  public:
    static constexpr uint64_t BYTES = 1 << 20;

    bool is_over = false;
    mesh::deferred_copies copies{[this] { return is_over; }};
    std::shared_ptr<mesh::state_room> room = std::make_shared<mesh::state_room>(mesh::cpu_device(), BYTES);

    waiting_copies() : memory_(ggml_backend_buft_alloc_buffer(ggml_backend_cpu_buffer_type(), BYTES)) {
        fill(1);
    }

    uint8_t * at(uint64_t offset) const {
        return static_cast<uint8_t *>(ggml_backend_buffer_get_base(memory_.get())) + offset;
    }

    void fill(uint8_t value) {
        std::memset(at(0), value, BYTES);
    }

    void add(const copied_range & range) {
        copies.add(room, {memory_.get(), at(range.from), nullptr, false}, range);
    }

    void write(uint64_t offset, uint64_t size, uint8_t value) {
        copies.before_writing({{at(offset), size, memory_.get()}});
        std::memset(at(offset), value, size);
    }

    // How many bytes of the room are there.
    uint64_t copied() {
        uint64_t sum = 0;
        room->use([&](ggml_backend_buffer_t kept) {
            const auto * bytes = static_cast<const uint8_t *>(ggml_backend_buffer_get_base(kept));
            sum = std::accumulate(bytes, bytes + BYTES, uint64_t{0});
        });
        return sum;
    }

    void finish() {
        while (!copies.is_empty()) {
            copies.copy_some();
        }
    }

  private:
    ggml_backend_buffer_ptr memory_;
};

// What a worker's steps and a client's commands write to a cache, one way after the other, and what was saved of it.
class changing_cache {
  public:
    changing_cache()
        : remote_(4 * QUOTA), between_(remote_.connect(), cut::never, 0, "deferred"), on_(between_.client_fd()),
          backend_(ggml_backend_dev_init(on_.handle, nullptr)),
          context_(ggml_init({ggml_tensor_overhead(), nullptr, true})),
          inputs_(ggml_init({8 * ggml_tensor_overhead() + 2 * ggml_graph_overhead(), nullptr, true})) {
        CHECK(states_.keep(4));
        states_.reserve({}, 6 * ROWS / 2 * ROW);
        cache_ = ggml_new_tensor_2d(context_.get(), GGML_TYPE_F32, WIDTH, ROWS);
        buffer_ = memory_for(context_.get());
        rows_ = ggml_new_tensor_2d(inputs_.get(), GGML_TYPE_F32, WIDTH, SET);
        ids_ = ggml_new_tensor_1d(inputs_.get(), GGML_TYPE_I64, SET);
        ggml_tensor * part = ggml_view_2d(inputs_.get(), cache_, WIDTH, SET, ROW, COPIED * ROW);
        set_ = graph_of(ggml_set_rows(inputs_.get(), cache_, rows_, ids_));
        copy_ = graph_of(ggml_cpy(inputs_.get(), rows_, part));
        input_buffer_ = memory_for(inputs_.get());
        // As the engine does: they travel with the graph that reads them.
        ggml_backend_buffer_set_usage(input_buffer_.get(), GGML_BACKEND_BUFFER_USAGE_COMPUTE);
    }

    void change() {
        switch (below(6)) {
        case 0:
            return write(below(ROWS - SET), 1 + below(SET));
        case 1:
            return set_rows();
        case 2:
            return copy_rows();
        case 3:
            return pause();
        case 4:
            return save(below(ROWS / 2), 1 + below(ROWS / 2));
        default:
            return restore();
        }
    }

    void check() const {
        std::vector<float> found(WIDTH * ROWS);
        ggml_backend_tensor_get(cache_, found.data(), 0, found.size() * sizeof(float));
        for (size_t i = 0; i < found.size(); ++i) {
            CHECK_EQUAL(found[i], expected_[i / WIDTH]);
        }
        CHECK_EQUAL(on_.failure(), "");
    }

    size_t restored() const {
        return restored_;
    }

  private:
    static constexpr size_t WIDTH = 1024;
    static constexpr size_t ROW = WIDTH * sizeof(float);
    static constexpr size_t ROWS = 64;
    static constexpr size_t SET = 3;
    static constexpr size_t COPIED = 20;

    struct saved {
        std::vector<uint8_t> kept;
        std::vector<float> rows;
        mesh::state_owner whose;
    };

    worker remote_;
    relay between_;
    device on_;
    std::minstd_rand random_{1};
    ggml_backend_ptr backend_;
    ggml_context_ptr context_;
    ggml_context_ptr inputs_;
    ggml_backend_buffer_ptr buffer_;
    ggml_backend_buffer_ptr input_buffer_;
    ggml_tensor * cache_ = nullptr;
    ggml_tensor * rows_ = nullptr;
    ggml_tensor * ids_ = nullptr;
    ggml_cgraph * set_ = nullptr;
    ggml_cgraph * copy_ = nullptr;
    mesh::saved_states states_;
    std::vector<float> expected_ = std::vector<float>(ROWS);
    std::vector<saved> saved_;
    float last_ = 0;
    int64_t tokens_ = 0;
    size_t restored_ = 0;

    size_t below(size_t bound) {
        return random_() % bound;
    }

    ggml_backend_buffer_ptr memory_for(ggml_context * context) const {
        ggml_backend_buffer_ptr made(
            ggml_backend_alloc_ctx_tensors_from_buft(context, ggml_backend_dev_buffer_type(on_.handle))
        );
        CHECK(made != nullptr);
        return made;
    }

    ggml_cgraph * graph_of(ggml_tensor * node) {
        ggml_cgraph * graph = ggml_new_graph(inputs_.get());
        ggml_build_forward_expand(graph, node);
        return graph;
    }

    void compute(ggml_cgraph * graph) {
        const std::vector<float> values(WIDTH * SET, ++last_);
        ggml_backend_tensor_set(rows_, values.data(), 0, values.size() * sizeof(float));
        CHECK(ggml_backend_graph_compute(backend_.get(), graph) == GGML_STATUS_SUCCESS);
    }

    void write(size_t first, size_t count) {
        const std::vector<float> values(WIDTH * count, ++last_);
        ggml_backend_tensor_set(cache_, values.data(), first * ROW, count * ROW);
        std::fill_n(expected_.begin() + static_cast<ptrdiff_t>(first), count, last_);
    }

    // Now and then for so long that the worker copies what waits.
    void pause() {
        std::this_thread::sleep_for(std::chrono::milliseconds(below(10) == 0 ? 51 : 0));
    }

    void set_rows() {
        int64_t ids[SET];
        for (int64_t & id : ids) {
            id = static_cast<int64_t>(below(ROWS));
        }
        ggml_backend_tensor_set(ids_, ids, 0, sizeof ids);
        compute(set_);
        for (const int64_t id : ids) {
            expected_[static_cast<size_t>(id)] = last_;
        }
    }

    void copy_rows() {
        compute(copy_);
        std::fill_n(expected_.begin() + COPIED, SET, last_);
    }

    void save(size_t first, size_t count) {
        const auto sequence = static_cast<int32_t>(below(2));
        const mesh::state_owner whose = {state_kind::checkpoint, sequence, ++tokens_, 1};
        const mesh::captured_state state =
            mesh::saved_states::capture(count * ROW, [&](uint8_t * to, size_t size) {
                ggml_backend_tensor_get(cache_, to, first * ROW, size);
                return size;
            });
        std::vector<uint8_t> kept(mesh::saved_states::kept_size(state));
        states_.save(state, whose, kept.data());
        const auto begin = expected_.begin() + static_cast<ptrdiff_t>(first);
        saved_.push_back({kept, {begin, begin + static_cast<ptrdiff_t>(count)}, whose});
    }

    void restore() {
        if (saved_.empty()) {
            return;
        }
        const saved & from = saved_[saved_.size() - 1 - below(std::min<size_t>(saved_.size(), 6))];
        const size_t first = below(ROWS - from.rows.size() + 1);
        const auto read = [&](const uint8_t * bytes, size_t size) {
            ggml_backend_tensor_set(cache_, bytes, first * ROW, size);
            return size;
        };
        if (states_.restore(from.kept.data(), from.kept.size(), from.whose, read)) {
            std::copy(from.rows.begin(), from.rows.end(), expected_.begin() + static_cast<ptrdiff_t>(first));
            ++restored_;
            check();
        }
    }
};

mesh::state_owner checkpoint(int64_t tokens, int task = 1, int32_t sequence = 0) {
    return {state_kind::checkpoint, sequence, tokens, task};
}

mesh::state_owner whole(int32_t sequence) {
    return {state_kind::whole, sequence, 0, 0};
}

}  // namespace

// --- the worker ---

TEST("states: a worker copies within its buffers, and no further") {
    worker remote(QUOTA);
    const char * outside = "a range lies outside of its buffer";
    const char * fine = "buffer 9 does not exist";
    CHECK_CONTAINS(complaint_about(remote, {0, 0, 2048, 1, 0, 0}), fine);
    CHECK_CONTAINS(complaint_about(remote, {4095, 2047, 1, 1, 0, 0}), fine);
    CHECK_CONTAINS(complaint_about(remote, {0, 0, 16, 64, 64, 32}), fine);
    CHECK_CONTAINS(complaint_about(remote, {0, 0, 2049, 1, 0, 0}), "COPIES copy more than there is");
    CHECK_CONTAINS(complaint_about(remote, {2049, 0, 2048, 1, 0, 0}), outside);
    CHECK_CONTAINS(complaint_about(remote, {0, 1, 16, 64, 64, 32}), fine);
    CHECK_CONTAINS(complaint_about(remote, {0, 17, 16, 64, 64, 32}), outside);
    CHECK_CONTAINS(complaint_about(remote, {49, 0, 16, 64, 64, 32}), outside);
    CHECK_CONTAINS(complaint_about(remote, {UINT64_MAX, 0, 2, 1, 0, 0}), outside);
    CHECK_CONTAINS(complaint_about(remote, {0, UINT64_MAX, 2, 1, 0, 0}), outside);
    const uint32_t most = UINT32_MAX;
    CHECK_CONTAINS(complaint_about(remote, {0, 0, most, most, most, most}), "COPIES copy more than there is");
    CHECK_CONTAINS(complaint_about(remote, {0, 0, 1, 2, most, most}), outside);
    for (const copied_range & range :
         {copied_range{0, 0, 0, 1, 0, 0}, {0, 0, 1, 0, 0, 0}, {0, 0, 8, 2, 7, 8}, {0, 0, 8, 2, 8, 7}}) {
        CHECK_CONTAINS(complaint_about(remote, range), "pieces to be copied overlap, or there are none");
    }
    const copied_range all = {0, 0, 2048, 1, 0, 0};
    CHECK_CONTAINS(complaint_about(remote, {1, 2}, {all, all}), "COPIES copy more than there is");
    CHECK_CONTAINS(complaint_about(remote, {2, 1}, {all, all}), "COPIES copy more than there is");
    CHECK_CONTAINS(complaint_about(remote, {2, 1}, {{1, 0, 2048, 1, 0, 0}}), outside);
    CHECK_CONTAINS(complaint_about(remote, {2, 1}, {{0, 2049, 2048, 1, 0, 0}}), outside);
    for (const mesh::wire::copies & head : {mesh::wire::copies{1, 1}, {1, 3}, {2, 4}, {2, 2}}) {
        CHECK_CONTAINS(complaint_about(remote, head, {all}), "to saved states or back");
    }
    CHECK_CONTAINS(complaint_about(remote, {3, 2}, {all}), "buffer 3 does not exist");
    CHECK_CONTAINS(complaint_about(remote, {2, 3}, {all}), "buffer 3 does not exist");
    remote.join();
    CHECK_EQUAL(rogue_client(remote).greet(), QUOTA);
}

TEST("states: weights are neither copied nor overwritten") {
    worker remote(QUOTA);
    const model::temporary_file file;
    model::write(file.path());
    const char * paths[] = {file.path().c_str()};
    char why[256] = "";
    CHECK_EQUAL(ggml_mesh_worker_add_model(remote.handle(), model::FINGERPRINT, paths, 1, why, sizeof why), 0);
    const model::matrix & shape = model::matrices().front();
    const copied_range range = {0, 0, 16, 1, 0, 0};
    for (const mesh::wire::copies & head : {mesh::wire::copies{1, 2}, {2, 1}}) {
        rogue_client other(remote);
        mesh::wire::hello self = rogue_client::hello();
        std::strncpy(self.model, model::FINGERPRINT, sizeof self.model - 1);
        other.send(command::hello, {{&self, sizeof self}});
        const mesh::wire::attach request = {1, 1};
        mesh::wire::attach_entry entry{};
        std::strncpy(entry.name, shape.name, sizeof entry.name - 1);
        entry.size = model::bytes_of(shape).size();
        entry.elements = shape.ne[0] * shape.ne[1] * shape.ne[2];
        entry.type = static_cast<uint32_t>(shape.type);
        other.send(command::attach, {{&request, sizeof request}, {&entry, sizeof entry}});
        const mesh::wire::reserve memory = {2, 0, 0, SIZE};
        other.send(command::reserve, {{&memory, sizeof memory}});
        other.send(command::copies, {{&head, sizeof head}, {&range, sizeof range}});
        CHECK_CONTAINS(other.complaint(), "weight");
    }
}

TEST("states: a worker sets aside half of what is free, or what was planned, and nothing where it is full") {
    worker remote(QUOTA);
    rogue_client other(remote);
    CHECK_EQUAL(other.greet(), QUOTA);
    CHECK_EQUAL(other.reserve(1, 0, UINT64_MAX), QUOTA / 2);
    CHECK_EQUAL(other.reserve(2, 0, 1000), 1000U);
    CHECK_EQUAL(other.reserve(3, QUOTA / 4 + 8, QUOTA), QUOTA / 4 + 8);
    CHECK_EQUAL(rogue_client(remote).greet(), QUOTA);  // it is there for whoever needs it
    other.free(3);
    CHECK(other.alloc(3, QUOTA));
    CHECK_EQUAL(other.reserve(4, QUOTA, QUOTA), 0U);
    const mesh::wire::reserve again = {3, 0, 0, 1};
    other.send(command::reserve, {{&again, sizeof again}});
    CHECK_CONTAINS(other.complaint(), "buffer 3 cannot be made");
    remote.join();
    CHECK_EQUAL(rogue_client(remote).greet(), QUOTA);
}

TEST("states: nothing but COPIES reaches them") {
    worker remote(QUOTA);
    const mesh::wire::span where = {1, 0, 0, 16};
    const mesh::wire::clear zeros = {where, 0, {}};
    const std::vector<std::pair<command, mesh::bytes_view>> tried = {
        {command::get, {&where, sizeof where}}, {command::clear, {&zeros, sizeof zeros}}};
    for (const auto & [kind, payload] : tried) {
        rogue_client other(remote);
        other.greet();
        CHECK_EQUAL(other.reserve(1, 0, 64), 64U);
        other.send(kind, {payload});
        CHECK_CONTAINS(other.complaint(), "buffer 1 does not exist");
    }
}

TEST("states: they make room for another session, and are an error only where they are asked back") {
    worker remote(QUOTA);
    const copied_range all = {0, 0, 64, 1, 0, 0};
    rogue_client keeping(remote);
    keeping.greet();
    keeping.alloc(1, SIZE);
    CHECK_EQUAL(keeping.reserve(2, 0, SIZE), SIZE);
    rogue_client needing(remote);
    CHECK_EQUAL(needing.greet(), QUOTA - SIZE);
    CHECK(needing.alloc(1, QUOTA - SIZE));
    const mesh::wire::copies save = {1, 2};
    keeping.send(command::copies, {{&save, sizeof save}, {&all, sizeof all}});
    CHECK_EQUAL(keeping.reserve(3, 0, SIZE), 0U);  // all is well
    const mesh::wire::copies back = {2, 1};
    keeping.send(command::copies, {{&back, sizeof back}, {&all, sizeof all}});
    CHECK_CONTAINS(keeping.complaint(), "its saved states had to make room for something else");
}

TEST("states: copies wait, and only what is written is copied before") {
    waiting_copies here;
    here.add({0, 0, 512 << 10, 1, 0, 0});
    CHECK_EQUAL(here.copied(), 0U);
    here.write(700 << 10, 100, 2);  // elsewhere
    CHECK_EQUAL(here.copied(), 0U);
    here.write(100 << 10, 1, 2);
    CHECK_EQUAL(here.copied(), 16U << 10);
    here.write((100 << 10) + 1, 100, 2);  // nothing is left there
    CHECK_EQUAL(here.copied(), 16U << 10);
    here.write((128 << 10) - 1, 2, 2);
    CHECK_EQUAL(here.copied(), 48U << 10);
    here.copies.copy_some();
    CHECK_EQUAL(here.copied(), (48U + 256U) << 10);
    here.finish();
    CHECK_EQUAL(here.copied(), 512U << 10);
    here.fill(2);
    CHECK_EQUAL(here.copied(), 512U << 10);
}

TEST("states: of rows with gaps each is copied once, and none of the gaps") {
    for (const bool written : {false, true}) {
        waiting_copies here;
        here.add({1000, 0, 2000, 300, 3000, 2000});
        std::memset(here.at(0), 9, 1000);
        std::memset(here.at(1000 + 2000), 9, 1000);
        if (written) {
            here.write(1000 + 299 * 3000, 1, 9);
        }
        here.finish();
        CHECK_EQUAL(here.copied(), 600000U);
    }
}

TEST("states: of large pieces with gaps only those that are written are copied before") {
    waiting_copies here;
    here.add({0, 0, 64 << 10, 8, 100 << 10, 64 << 10});
    here.write(150 << 10, 1, 2);
    CHECK_EQUAL(here.copied(), 16U << 10);
    here.write(0, waiting_copies::BYTES, 2);
    CHECK_EQUAL(here.copied(), 512U << 10);
    CHECK(here.copies.is_empty());
}

TEST("states: what waits for memory that is used anew is dropped, and copied where the rest of it stays") {
    waiting_copies here;
    here.add({0, 0, 1000, 1, 0, 0});
    here.add({0, 2000, 1000, 1, 0, 0});
    here.copies.before_overwriting(*here.room, {0, 0, 1000, 1, 0, 0});
    CHECK_EQUAL(here.copied(), 0U);
    here.copies.before_overwriting(*here.room, {0, 2999, 1, 1, 0, 0});
    CHECK_EQUAL(here.copied(), 1000U);
    CHECK(here.copies.is_empty());
    here.add({0, 4000, 1000, 1, 0, 0});
    here.copies.before_reading(*here.room, 3000, 1000);
    CHECK(!here.copies.is_empty());
    here.copies.before_reading(*here.room, 4999, 1);
    CHECK_EQUAL(here.copied(), 2000U);
    here.add({0, 4000, 1000, 1, 0, 0});
    here.room->give_up();
    here.write(0, 1, 2);
    here.finish();
}

TEST("states: what waits for memory between the pieces of a later state is copied") {
    waiting_copies here;
    here.add({0, 2000, 1000, 1, 0, 0});
    here.copies.before_overwriting(*here.room, {0, 0, 1000, 3, 1000, 4000});
    CHECK_EQUAL(here.copied(), 1000U);
    here.add({0, 2000, 1000, 1, 0, 0});
    here.copies.before_overwriting(*here.room, {0, 0, 1000, 3, 1000, 1000});
    CHECK_EQUAL(here.copied(), 1000U);
    CHECK(here.copies.is_empty());
}

TEST("states: many pieces are all copied, and no more of them once the session is over") {
    for (const bool is_over : {false, true}) {
        waiting_copies here;
        here.is_over = is_over;
        here.add({0, 0, 1, 10000, 2, 3});
        here.write(0, 20000, 2);
        CHECK_EQUAL(here.copied(), is_over ? 4096U : 10000U);
        const mesh::location to = {nullptr, here.at(0), nullptr, false};
        CHECK(mesh::copy_pieces({0, 0, 1, 10000, 3, 2}, *here.room, to, true, [=] { return is_over; }));
        const uint64_t back = std::accumulate(here.at(0), here.at(20000), uint64_t{0});
        CHECK_EQUAL(back, 2 * 20000U - (is_over ? 4096U : 10000U));
    }
}

TEST("states: no more wait than a step can look at") {
    waiting_copies here;
    for (uint64_t i = 0; i < 5000; ++i) {
        here.add({i, i, 1, 1, 0, 0});
    }
    CHECK(here.copied() > 0);
    here.write(0, 5000, 2);
    here.finish();
    CHECK_EQUAL(here.copied(), 5000U);
}

TEST("states: a state is what it was when it was saved, whatever is written since") {
    changing_cache here;
    for (int i = 0; i < 800; ++i) {
        here.change();
    }
    here.check();
    CHECK(here.restored() > 40);
}

// --- the host ---

TEST("states: blocks lie where there is room, one after the other") {
    mesh::block_pool pool(100);
    CHECK_EQUAL(pool.take(40).value(), 0U);
    CHECK_EQUAL(pool.take(30).value(), 40U);
    CHECK_EQUAL(pool.take(30).value(), 70U);
    CHECK(!pool.take(1));
    pool.give_back(40);
    CHECK(!pool.take(31));
    CHECK_EQUAL(pool.take(10).value(), 40U);
    CHECK_EQUAL(pool.take(20).value(), 50U);
    pool.give_back(70);
    CHECK_EQUAL(pool.take(30).value(), 70U);
    CHECK(!pool.take(0));
    CHECK(!mesh::block_pool(0).take(1));
}

TEST("states: what was saved is put back, elsewhere and in other pieces") {
    kept_states here(4);
    here.memory.fill(0, cache::ROWS, 1);
    here.memory.fill(3, 2, 7);
    const std::vector<uint8_t> kept = here.save(checkpoint(10), 3);
    CHECK_EQUAL(kept.size(), sizeof(mesh::state_reference) + 2 * sizeof(size_t));
    here.memory.fill(0, cache::ROWS, 2);
    for (const bool row_by_row : {false, true}) {
        here.memory.fill(0, cache::ROWS, 2);
        CHECK(here.restore(kept, checkpoint(10), 9, row_by_row));
        CHECK_EQUAL(here.memory.value(9, 2), 7);
        CHECK_EQUAL(here.memory.value(0, 9), 2);
        CHECK_EQUAL(here.memory.value(11, 5), 2);
    }
    CHECK_EQUAL(here.failure(), "");
}

TEST("states: a reference that is not this process's, or not whole, is a state that is gone") {
    kept_states here(4);
    const std::vector<uint8_t> kept = here.save(checkpoint(10));
    std::vector<uint8_t> other = kept;
    other[8] ^= 1;
    CHECK(!here.restore(other, checkpoint(10)));
    other = kept;
    other[24] ^= 64;
    CHECK(!here.restore(other, checkpoint(10)));
    other = kept;
    other.pop_back();
    CHECK(!here.restore(other, checkpoint(10)));
    CHECK(here.restore(kept, checkpoint(10)));
    CHECK(!mesh::saved_states::is_reference(kept.data(), sizeof(mesh::state_reference) - 1));
}

TEST("states: where there is no room the longest unused text goes, before any checkpoint") {
    kept_states here(3);
    const auto text = here.save(whole(0));
    const auto first = here.save(checkpoint(10));
    const auto other_text = here.save(whole(1));
    const auto second = here.save(checkpoint(20));  // takes the room of `text`
    CHECK(!here.restore(text, whole(0)));
    const auto third = here.save(checkpoint(30));  // and that of `other_text`
    CHECK(!here.restore(other_text, whole(1)));
    CHECK(here.restore(first, checkpoint(10)));
    const auto late = here.save(whole(1));
    CHECK(!here.restore(late, whole(1)));  // no checkpoint goes for it
    const auto fourth = here.save(checkpoint(40));
    CHECK(!here.restore(second, checkpoint(20)));
    for (const auto & kept : {first, third, fourth}) {
        CHECK(here.restore(kept, checkpoint(0)));
    }
}

TEST("states: a text that is put back takes its checkpoints along, and is kept no longer") {
    kept_states here(4);
    const auto early = here.save(checkpoint(10));
    const auto text = here.save(whole(0));
    const auto other = here.save(checkpoint(5, 2));  // of the text that took its place
    CHECK(here.restore(early, checkpoint(10)));
    CHECK(here.restore(text, whole(3)));
    CHECK(!here.restore(text, whole(3)));
    CHECK(here.restore(early, checkpoint(10, 1, 3)));
    CHECK(here.restore(other, checkpoint(5, 2)));
    here.save(checkpoint(9, 3, 3));  // the text has changed before that place
    CHECK(!here.restore(early, checkpoint(10, 1, 3)));
}

TEST("states: checkpoints go as the engine drops them") {
    kept_states here(16, 3);
    const auto first = here.save(checkpoint(100, 1));
    const auto second = here.save(checkpoint(200, 1));
    const auto third = here.save(checkpoint(300, 2));  // full: of the earlier request one stays
    CHECK(here.restore(first, checkpoint(0)));
    CHECK(!here.restore(second, checkpoint(0)));
    CHECK(here.restore(third, checkpoint(0)));
    const auto changed = here.save(checkpoint(150, 3));
    CHECK(!here.restore(third, checkpoint(0)));
    CHECK(here.restore(first, checkpoint(0)));
    here.states.cloned(0, 1);
    here.save(checkpoint(50, 4));
    CHECK(here.restore(changed, checkpoint(0, 0, 1)));
    here.save(checkpoint(50, 5, 1));
    CHECK(!here.restore(changed, checkpoint(0, 0, 1)));
}

TEST("states: before a draft there is room, and one for each sequence") {
    kept_states here(2);
    const mesh::state_owner draft = {state_kind::draft, 0, 10, -1};
    here.save(checkpoint(10));
    here.save(checkpoint(20));
    std::vector<uint8_t> kept;
    for (uint8_t i = 1; i < 5; ++i) {
        here.memory.fill(0, 2, i);
        kept = here.save(draft);
    }
    here.save(checkpoint(30));
    here.save(checkpoint(40));
    here.memory.fill(0, 2, 9);
    CHECK(mesh::saved_states::is_draft(kept.data(), kept.size()));
    CHECK(here.restore(kept, draft));
    CHECK_EQUAL(here.memory.value(0, 2), 4);
}

TEST("states: rows that lie equally far apart travel as one range") {
    kept_states here(4);
    mesh::captured_state state = here.memory.captured(0, 8);
    std::vector<mesh::state_piece> rows;
    for (const mesh::state_piece & piece : state.pieces) {
        // Half of every row, as a transposed tensor is cut.
        for (uint64_t at = 0; at < piece.size; at += cache::ROW) {
            rows.push_back(
                {piece.owner, piece.buffer_id, piece.offset + at, cache::ROW / 2, piece.position + at / 2}
            );
        }
    }
    CHECK_EQUAL(rows.size(), 16U);
    state.pieces = rows;
    ggml_mesh_stage before{};
    ggml_mesh_stage after{};
    ggml_mesh_stage_counters(0, &before);
    std::vector<uint8_t> kept(mesh::saved_states::kept_size(state));
    here.states.save(state, checkpoint(10), kept.data());
    ggml_mesh_stage_counters(0, &after);
    const size_t head = sizeof(mesh::wire::header) + sizeof(mesh::wire::copies);
    CHECK(after.sent_bytes - before.sent_bytes <= head + 2 * sizeof(copied_range));
    CHECK_EQUAL(here.failure(), "");
}

TEST("states: those that made room for something else are gone, and the session goes on") {
    kept_states here(4);
    const auto kept = here.save(checkpoint(10));
    const auto text = here.save(whole(0));
    here.crowd_out();
    CHECK(!here.restore(kept, checkpoint(10)));
    CHECK(!here.restore(text, whole(0)));
    CHECK(!here.restore(here.save(checkpoint(20)), checkpoint(20)));
    CHECK_EQUAL(here.failure(), "");
}
