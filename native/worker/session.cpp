// One client of a worker.
//
// Each session has two threads: one reads commands, so that the end of a link is
// noticed at once, even in the middle of a computation; one executes them in
// order. Whatever a client sends, the worst that happens is an ERROR to it and
// the end of its session.

#include "worker/session.h"

#include "ggml-mesh.h"
#include "rules/supports.h"
#include "rules/validate.h"
#include "wire/delta.h"
#include "wire/graph.h"
#include "wire/inputs.h"
#include "worker/command_queue.h"
#include "worker/deferred_copies.h"
#include "worker/pinned_memory.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <deque>
#include <functional>
#include <future>
#include <iterator>
#include <optional>
#include <unordered_map>
#include <utility>

namespace mesh {

namespace {

using clock = std::chrono::steady_clock;

uint64_t nanoseconds(clock::duration time) {
    return static_cast<uint64_t>(std::chrono::duration_cast<std::chrono::nanoseconds>(time).count());
}

template <typename T> T read_struct(const frame & message) {
    T value;
    if (message.payload.size() < sizeof value) {
        throw std::invalid_argument("a command is too short");
    }
    std::memcpy(&value, message.payload.data(), sizeof value);
    return value;
}

// Shorter waits than this may be for another stage of the same step, which perhaps shares our cores.
constexpr std::chrono::milliseconds IDLE_TIME(50);

constexpr std::chrono::seconds PARTING_TIME(2);  // for a client to hear why it is sent away

// Kernels of some devices read whole blocks of a row, also behind the last one.
constexpr uint64_t BEHIND_THE_END = 16 << 10;

// What one session may cost besides the memory that is counted.
constexpr std::chrono::seconds HELLO_TIME{10};          // a client greets as soon as it is connected
constexpr uint64_t MAX_HELLO_BYTES = 4096;              // before that nothing larger is taken from it
constexpr uint32_t MAX_ATTACHED = 1U << 17;             // weights; the largest models have some 2,000
constexpr uint64_t MAX_RUN_INPUT_BYTES = 512ULL << 20;  // inputs of one RUN: a few bytes may stand for many
constexpr uint64_t RECEIVED_OVERHEAD = 256;             // what keeping a push costs besides its bytes
constexpr size_t MAX_AWAITED = 256;                     // pushes that a graph reads

class session {
  public:
    session(worker & owner, int fd) : worker_(owner), link_(fd, "client") {}

    ~session() {
        close_mail();
        for (const auto & entry : buffers_) {
            worker_.memory().give_back(entry.second.size);
        }
        for (const auto & entry : rooms_) {
            worker_.memory().end(entry.second);
        }
    }

    session(const session &) = delete;
    session & operator=(const session &) = delete;

    // Says why there is no session, and throws it.
    [[noreturn]] void send_away(const char * reason) {
        tell(reason);
        throw std::runtime_error(reason);
    }

    // Serves until the link closes. Throws what the client did wrong, after telling it.
    void serve() {
        std::promise<void> end_of_reading;
        std::thread reader([&] {
            read_commands();
            end_of_reading.set_value();
        });
        std::string fault;
        try {
            frame message;
            while (next_command(message)) {
                execute(message);
                copy_until([this](std::chrono::milliseconds time) { return queue_->has_come(time); });
            }
        } catch (const std::exception & error) {
            fault = error.what();
            tell(fault);
        }
        queue_->close();
        if (!fault.empty()) {
            // A link that is closed over commands that nobody read would take our last words with it.
            link_.end_sending();
            end_of_reading.get_future().wait_for(PARTING_TIME);
        }
        link_.shut();
        reader.join();
        if (!fault.empty()) {
            throw std::runtime_error(fault);
        }
    }

  private:
    // Either memory of the session's own, or weights of the worker at the client's addresses.
    struct memory {
        ggml_backend_buffer_ptr buffer;
        uint64_t size = 0;
        bool is_scratch = false;  // nothing in it outlives a graph
        std::map<uint64_t, weight *> weights;
        weight_lease lease;
    };

    struct kept_graph {
        std::vector<wire::tensor> table;
        built_graph built;
    };

    // What the next command sends away, copied behind the graph of this one.
    struct copied_ahead {
        wire::span from;
        const uint8_t * data;
    };

    // A push that a graph is going to read.
    struct awaited_push {
        wire::recv request;
        location to;
    };

    worker & worker_;
    const bool has_gpu_ = ggml_backend_dev_type(worker_.device()) != GGML_BACKEND_DEVICE_TYPE_CPU;
    link link_;
    std::mutex reading_;  // held while a command is received
    short_waits waits_;   // from one graph to the next
    std::shared_ptr<command_queue> queue_ = std::make_shared<command_queue>();
    bool greeted_ = false;
    std::mutex mail_mutex_;  // the reader closes what the executor opens
    bool mail_open_ = false;
    bool mail_closed_ = false;
    wire::session_id id_{};
    std::string model_;     // that the client's weights are of
    uint64_t granted_ = 0;  // when it greeted
    std::map<uint32_t, memory> buffers_;
    std::map<uint32_t, std::shared_ptr<state_room>> rooms_;             // for saved states
    deferred_copies deferred_{[this] { return queue_->is_closed(); }};  // to these
    uint32_t attached_ = 0;                                             // weights in all of them
    std::unordered_map<wire::graph_key, kept_graph, key_hash, key_equal> graphs_;
    std::deque<wire::graph_key> order_;
    bool ran_ = false;    // and nothing was written since
    size_t tensors_ = 0;  // of all graphs that are kept
    shadows shadows_;
    clock::time_point idle_since_ = clock::now();
    pinned_memory pinned_{worker_.device()};
    std::optional<copied_ahead> ahead_;  // in there
    std::vector<awaited_push> awaited_;
    std::vector<placed_input> received_;  // and not yet written
    uint64_t received_bytes_ = 0;         // what these cost
    uint64_t pushed_in_ = 0;
    uint64_t pushed_out_ = 0;
    uint64_t counted_in_ = 0;
    uint64_t counted_out_ = 0;

    void read_commands() {
        try {
            for (bool open = queue_->put(receive_greeting()); open; link_.wait_for_more()) {
                const std::lock_guard lock(reading_);
                while (open && link_.readable()) {
                    open = queue_->put(link_.receive_frame());
                }
            }
            close_mail();
            for (;;) {
                link_.receive_frame();  // what was on its way when the session ended
            }
        } catch (const std::exception &) {
            // The link is gone, or carries nonsense: either way the session is over.
        }
        queue_->close();
        close_mail();  // wakes an executor that waits for a push
    }

    bool next_command(frame & message) {
        if (!greeted_) {
            return queue_->take_within(HELLO_TIME, message);
        }
        if (has_gpu_) {
            waits_.over_soon([this] {
                take_commands();
                return queue_->first() != nullptr || queue_->is_closed();
            });
        }
        return queue_->take(message);
    }

    // What has come so far, in the thread that waits for it and would have to be woken. That is the one that makes room
    // in the queue, too: it must not wait for any.
    void take_commands() noexcept {
        const std::unique_lock lock(reading_, std::try_to_lock);
        if (!lock) {
            return;
        }
        try {
            link_.take_arrived();
            while (queue_->has_room() && link_.holds_frame()) {
                queue_->put(link_.receive_frame());
            }
        } catch (const std::exception &) {
            link_.shut();  // the reader sees it
        }
    }

    frame receive_greeting() {
        frame first;
        first.head = link_.receive_header();
        if (first.head.size > MAX_HELLO_BYTES) {
            throw link_error("a greeting is not so long");
        }
        first.payload.resize(first.head.size);
        link_.receive(first.payload.data(), first.payload.size());
        return first;
    }

    void open_mail(const wire::session_id & id) {
        const std::lock_guard lock(mail_mutex_);
        id_ = id;
        if (!mail_closed_) {
            worker_.pushed().open(id);
            mail_open_ = true;
        }
    }

    void close_mail() {
        const std::lock_guard lock(mail_mutex_);
        mail_closed_ = true;
        if (mail_open_) {  // who never greeted has no id, and must not end the session that has this one
            worker_.pushed().close(id_);
            mail_open_ = false;
        }
    }

    void tell(const std::string & fault) noexcept {
        try {
            link_.send(static_cast<uint8_t>(wire::answer::error), 0, {{fault.data(), fault.size()}});
        } catch (const std::exception &) {
            // Nobody is left to be told.
        }
    }

    void answer(wire::answer kind, const frame & to, std::initializer_list<bytes_view> parts) {
        link_.send(static_cast<uint8_t>(kind), to.head.ticket, parts);
    }

    void execute(const frame & message) {
        const auto command = static_cast<wire::command>(message.head.kind);
        if (!greeted_ && command != wire::command::hello) {
            throw std::invalid_argument("the first command has to be HELLO");
        }
        if (command != wire::command::recv && command != wire::command::run && command != wire::command::graph) {
            receive_awaited();
            write_received();
        }
        switch (command) {
        case wire::command::hello:
            return on_hello(message);
        case wire::command::supports:
            return on_supports(message);
        case wire::command::size:
            return on_size(message);
        case wire::command::alloc:
            return on_alloc(message);
        case wire::command::attach:
            return on_attach(message);
        case wire::command::free:
            return on_free(message);
        case wire::command::clear:
            return on_clear(message);
        case wire::command::set:
            return on_set(message);
        case wire::command::get:
            return on_get(message);
        case wire::command::copy:
            return on_copy(message);
        case wire::command::reserve:
            return on_reserve(message);
        case wire::command::copies:
            return on_copies(message);
        case wire::command::graph:
            return on_graph(message);
        case wire::command::run:
            return on_run(message);
        case wire::command::push:
            return on_push(message);
        case wire::command::recv:
            return on_recv(message);
        case wire::command::deliver:
            break;  // between workers only
        }
        throw std::invalid_argument("command " + std::to_string(message.head.kind) + " does not exist");
    }

    void on_hello(const frame & message) {
        auto theirs = read_struct<wire::hello>(message);
        theirs.engine[sizeof theirs.engine - 1] = 0;
        theirs.model[sizeof theirs.model - 1] = 0;
        if (greeted_) {
            throw std::invalid_argument("HELLO comes once");
        }
        if (theirs.magic != wire::MAGIC || theirs.version != wire::VERSION) {
            throw std::invalid_argument(
                "it speaks protocol " + std::to_string(theirs.version) + ", this worker " +
                std::to_string(wire::VERSION)
            );
        }
        if (std::strcmp(theirs.engine, ggml_mesh_engine_version()) != 0 || theirs.op_count != GGML_OP_COUNT ||
            theirs.type_count != GGML_TYPE_COUNT || theirs.tensor_size != sizeof(ggml_tensor)) {
            throw std::invalid_argument(
                std::string("it runs engine ") + theirs.engine + ", this worker " + ggml_mesh_engine_version() +
                "; links need the same one"
            );
        }
        greeted_ = true;
        model_ = theirs.model;
        open_mail(theirs.session);
        const wire::hello_answer facts = describe(theirs);
        granted_ = facts.grant_bytes;
        answer(wire::answer::hello, message, {{&facts, sizeof facts}});
    }

    wire::hello_answer describe(const wire::hello & self) {
        wire::hello_answer facts{};
        size_t free_bytes = 0;
        size_t total_bytes = 0;
        ggml_backend_dev_memory(worker_.device(), &free_bytes, &total_bytes);
        facts.self = self;
        facts.self.features =
            wire::FEATURE_STATES | wire::FEATURE_ADAPTERS | ops_key(worker_.lacking()) << wire::FEATURE_OPS;
        facts.has_model = worker_.memory().has_model(model_) ? 1 : 0;
        facts.device_type = static_cast<uint32_t>(ggml_backend_dev_type(worker_.device()));
        facts.grant_bytes = worker_.memory().left();
        facts.total_bytes = std::max<uint64_t>(total_bytes, worker_.memory().quota());
        facts.alignment = ggml_backend_buft_get_alignment(ggml_backend_dev_buffer_type(worker_.device()));
        std::snprintf(facts.name, sizeof facts.name, "%s", ggml_backend_dev_name(worker_.device()));
        std::snprintf(
            facts.description, sizeof facts.description, "%s", ggml_backend_dev_description(worker_.device())
        );
        return facts;
    }

    static std::vector<wire::tensor> read_table(const uint8_t * bytes, size_t size) {
        if (size == 0 || size % sizeof(wire::tensor) != 0) {
            throw std::invalid_argument("a graph does not end with a tensor");
        }
        std::vector<wire::tensor> table(size / sizeof(wire::tensor));
        std::memcpy(table.data(), bytes, size);
        return table;
    }

    void on_supports(const frame & message) {
        const std::vector<wire::tensor> question = read_table(message.payload.data(), message.payload.size());
        const uint32_t yes =
            question.back().op != worker_.lacking() && device_computes(worker_.device(), question);
        answer(wire::answer::supports, message, {{&yes, sizeof yes}});
    }

    void on_size(const frame & message) {
        const uint64_t bytes =
            device_size(worker_.device(), read_table(message.payload.data(), message.payload.size()));
        answer(wire::answer::size, message, {{&bytes, sizeof bytes}});
    }

    void check_new(uint32_t buffer_id) const {
        if (buffer_id == 0 || buffers_.count(buffer_id) != 0 || rooms_.count(buffer_id) != 0 ||
            buffers_.size() + rooms_.size() >= wire::MAX_BUFFERS) {
            throw std::invalid_argument("buffer " + std::to_string(buffer_id) + " cannot be made");
        }
    }

    void on_alloc(const frame & message) {
        const auto request = read_struct<wire::alloc>(message);
        check_new(request.buffer_id);
        const bool granted = worker_.memory().take(request.size);
        ggml_backend_buffer_ptr buffer(
            granted ? ggml_backend_buft_alloc_buffer(
                          ggml_backend_dev_buffer_type(worker_.device()), request.size + BEHIND_THE_END
                      )
                    : nullptr
        );
        if (!buffer) {
            worker_.memory().give_back(granted ? request.size : 0);
            throw std::runtime_error(
                "it has no room for " + in_megabytes(request.size) + " (" + in_megabytes(granted_) +
                " were free for this engine)"
            );
        }
        ggml_backend_buffer_clear(buffer.get(), 0);
        memory made;
        made.buffer = std::move(buffer);
        made.size = request.size;
        made.is_scratch = request.usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE;
        buffers_.emplace(request.buffer_id, std::move(made));
    }

    // Memory that the client can do without: what there is no room for is not its fault.
    void on_reserve(const frame & message) {
        const auto request = read_struct<wire::reserve>(message);
        check_new(request.buffer_id);
        const std::shared_ptr<state_room> made = worker_.memory().set_aside(request.least, request.most);
        const uint64_t granted = made ? made->size() : 0;
        if (made) {
            rooms_.emplace(request.buffer_id, made);
        }
        answer(wire::answer::reserve, message, {{&granted, sizeof granted}});
    }

    void on_attach(const frame & message) {
        const auto request = read_struct<wire::attach>(message);
        check_new(request.buffer_id);
        const size_t named = sizeof request + request.count * sizeof(wire::attach_entry);
        const bool of_adapter = message.payload.size() == named + sizeof(wire::file_name);
        if (request.count > MAX_ATTACHED - attached_ || (message.payload.size() != named && !of_adapter)) {
            throw std::invalid_argument(
                "weights cannot be attached as buffer " + std::to_string(request.buffer_id)
            );
        }
        std::vector<wire::attach_entry> entries(request.count);
        if (!entries.empty()) {
            std::memcpy(
                entries.data(), message.payload.data() + sizeof request, entries.size() * sizeof entries[0]
            );
        }
        memory attached;
        std::string file = model_;
        if (of_adapter) {
            const auto * digest = reinterpret_cast<const char *>(message.payload.data() + named);
            file.assign(digest, std::find(digest, digest + sizeof(wire::file_name), '\0'));
        }
        attached.lease = worker_.memory().attach(file, entries, attached.weights);
        attached_ += static_cast<uint32_t>(attached.weights.size());
        buffers_.emplace(request.buffer_id, std::move(attached));
    }

    void on_free(const frame & message) {
        const auto id = read_struct<uint32_t>(message);
        if (const auto room = rooms_.find(id); room != rooms_.end()) {
            deferred_.drop(*room->second);
            worker_.memory().end(room->second);
            rooms_.erase(room);
            return;
        }
        const auto found = buffers_.find(id);
        if (found == buffers_.end()) {
            throw std::invalid_argument("buffer " + std::to_string(id) + " does not exist");
        }
        graphs_.clear();
        order_.clear();
        tensors_ = 0;
        shadows_.clear();
        before_writing_all(found->second);
        worker_.memory().give_back(found->second.size);
        attached_ -= static_cast<uint32_t>(found->second.weights.size());
        buffers_.erase(found);
    }

    // The memory behind a client's address; throws where it is not the client's.
    location find(uint32_t id, uint64_t offset, uint64_t size) {
        const auto found = buffers_.find(id);
        if (found == buffers_.end()) {
            throw std::invalid_argument("buffer " + std::to_string(id) + " does not exist");
        }
        memory & place = found->second;
        if (!place.buffer) {
            return find_weight(place, offset, size);
        }
        if (offset > place.size || size > place.size - offset) {
            throw std::invalid_argument("a range lies outside of its buffer");
        }
        auto * base = static_cast<uint8_t *>(ggml_backend_buffer_get_base(place.buffer.get()));
        return {place.buffer.get(), base + offset, nullptr, false};
    }

    static location find_weight(memory & place, uint64_t offset, uint64_t size) {
        auto after = place.weights.upper_bound(offset);
        if (after == place.weights.begin()) {
            throw std::invalid_argument("a range begins before the first weight");
        }
        const auto [start, source] = *std::prev(after);
        const uint64_t inside = offset - start;
        if (inside > source->size() || size > source->size() - inside) {
            throw std::invalid_argument("a range lies outside of its weight");
        }
        const ggml_tensor * plain = source->plain();
        return {
            plain->buffer, static_cast<uint8_t *>(plain->data) + inside, inside == 0 ? source : nullptr, true,
            source->residence.in_main_memory};
    }

    // What a run left in scratch memory has been read by now. With poison in it, a graph that reads more than its
    // inputs shows at once: 0xff is not a number in every float type, and no row.
    void poison_scratch() {
        ran_ = false;
        for (const auto & entry : buffers_) {
            if (entry.second.is_scratch) {
                before_writing_all(entry.second);
                ggml_backend_buffer_clear(entry.second.buffer.get(), 0xff);
            }
        }
    }

    // A state is what it was when it was saved.
    void before_writing_all(const memory & place) {
        if (place.buffer) {
            ggml_backend_buffer * buffer = place.buffer.get();
            deferred_.before_writing({{ggml_backend_buffer_get_base(buffer), place.size, buffer}});
        }
    }

    location writable(const wire::span & where) {
        if (ran_ && worker_.poisons()) {
            poison_scratch();
        }
        const location found = find(where.buffer_id, where.offset, where.size);
        if (found.is_weight) {
            throw std::invalid_argument("a command would overwrite a weight");
        }
        deferred_.before_writing({{found.data, where.size, found.buffer}});
        return found;
    }

    void on_clear(const frame & message) {
        const auto request = read_struct<wire::clear>(message);
        const location at = writable(request.where);
        if (request.where.size > 0) {
            byte_tensor bytes(at, request.where.size);
            ggml_backend_tensor_memset(&bytes.tensor, request.value, 0, request.where.size);
        }
    }

    void on_set(const frame & message) {
        const auto where = read_struct<wire::span>(message);
        const location at = writable(where);
        if (message.payload.size() != sizeof where + where.size) {
            throw std::invalid_argument("a SET carries another size than it says");
        }
        if (where.size > 0) {
            byte_tensor bytes(at, where.size);
            ggml_backend_tensor_set(&bytes.tensor, message.payload.data() + sizeof where, 0, where.size);
        }
    }

    void on_get(const frame & message) {
        const auto where = read_struct<wire::span>(message);
        if (where.size > wire::MAX_FRAME_BYTES) {
            throw std::invalid_argument("a GET asks for more than a frame holds");
        }
        if (const uint8_t * copied = take_copied(where)) {
            return answer(wire::answer::data, message, {{copied, where.size}});
        }
        const location at = find(where.buffer_id, where.offset, where.size);
        std::vector<uint8_t> data(where.size);
        if (where.size > 0) {
            byte_tensor bytes(at, where.size);
            ggml_backend_tensor_get(&bytes.tensor, data.data(), 0, where.size);
        }
        answer(wire::answer::data, message, {{data.data(), data.size()}});
    }

    void on_copy(const frame & message) {
        const auto request = read_struct<wire::copy>(message);
        const location from = find(request.from.buffer_id, request.from.offset, request.from.size);
        const location to = writable({request.to_buffer_id, 0, request.to_offset, request.from.size});
        const byte_range read(from.data, request.from.size, from.buffer);
        if (read.overlaps({to.data, request.from.size, to.buffer})) {
            throw std::invalid_argument("a COPY overlaps itself");
        }
        if (request.from.size > 0) {
            byte_tensor source(from, request.from.size);
            byte_tensor target(to, request.from.size);
            ggml_backend_tensor_copy(&source.tensor, &target.tensor);
        }
    }

    void on_copies(const frame & message) {
        const auto request = read_struct<wire::copies>(message);
        const auto from = rooms_.find(request.from_buffer_id);
        const auto to = rooms_.find(request.to_buffer_id);
        const bool puts_back = from != rooms_.end();
        if (puts_back == (to != rooms_.end()) ||
            (message.payload.size() - sizeof request) % sizeof(wire::copied_range) != 0) {
            throw std::invalid_argument("COPIES are whole ranges, to saved states or back");
        }
        const std::shared_ptr<state_room> & kept = puts_back ? from->second : to->second;
        for (const wire::copied_range & range : read_ranges(message, *kept)) {
            if (puts_back) {
                put_back(range, *kept, request.to_buffer_id);
            } else {
                save(range, kept, request.from_buffer_id);
            }
        }
    }

    static std::vector<wire::copied_range> read_ranges(const frame & message, const state_room & room) {
        std::vector<wire::copied_range> ranges(
            (message.payload.size() - sizeof(wire::copies)) / sizeof(wire::copied_range)
        );
        if (!ranges.empty()) {
            std::memcpy(
                ranges.data(), message.payload.data() + sizeof(wire::copies), ranges.size() * sizeof ranges[0]
            );
        }
        uint64_t total = 0;
        for (const wire::copied_range & range : ranges) {
            total += static_cast<uint64_t>(range.size) * range.count;
            // Not for ever: as much as there can be of saved states is enough.
            if (total > room.size()) {
                throw std::invalid_argument("COPIES copy more than there is");
            }
        }
        return ranges;
    }

    void save(const wire::copied_range & range, const std::shared_ptr<state_room> & kept, uint32_t other) {
        const location from = own_memory(other, range.from, extent(range, range.from_stride));
        check_kept(*kept, range.to, extent(range, range.to_stride));
        deferred_.before_overwriting(*kept, range);
        deferred_.add(kept, from, range);
    }

    void put_back(const wire::copied_range & range, state_room & kept, uint32_t other) {
        const uint64_t size = extent(range, range.from_stride);
        check_kept(kept, range.from, size);
        deferred_.before_reading(kept, range.from, size);
        const location to = writable({other, 0, range.to, extent(range, range.to_stride)});
        if (!copy_pieces(range, kept, to, true, [this] { return queue_->is_closed(); })) {
            throw std::runtime_error("its saved states had to make room for something else");
        }
    }

    static void check_kept(const state_room & room, uint64_t offset, uint64_t size) {
        if (offset > room.size() || size > room.size() - offset) {
            throw std::invalid_argument("a range lies outside of its buffer");
        }
    }

    location own_memory(uint32_t id, uint64_t offset, uint64_t size) {
        const location found = find(id, offset, size);
        if (found.is_weight) {
            throw std::invalid_argument("a weight is no state");
        }
        return found;
    }

    // Makes deferred copies while nothing comes.
    void copy_until(const std::function<bool(std::chrono::milliseconds)> & has_come) {
        for (auto time = IDLE_TIME; !deferred_.is_empty() && !has_come(time); time = {}) {
            deferred_.copy_some();
        }
    }

    void on_push(const frame & message) {
        const auto request = read_struct<wire::push>(message);
        if (request.from.size > wire::MAX_FRAME_BYTES / 2) {
            throw std::invalid_argument("a PUSH is larger than a frame holds");
        }
        const location from = find(request.from.buffer_id, request.from.offset, request.from.size);
        const std::shared_ptr<peer_link> peer = worker_.find_peer(request.peer);
        std::vector<uint8_t> data = worker_.buffers().take(request.from.size);
        if (const uint8_t * copied = take_copied(request.from)) {
            std::memcpy(data.data(), copied, data.size());
        } else if (!data.empty()) {
            byte_tensor bytes(from, data.size());
            ggml_backend_tensor_get(&bytes.tensor, data.data(), 0, data.size());
        }
        pushed_out_ += data.size();
        peer->push({id_, request.number}, std::move(data), queue_);
        link_.flush();
    }

    // The graph that reads it is made ready first.
    void on_recv(const frame & message) {
        const auto request = read_struct<wire::recv>(message);
        awaited_.push_back({request, writable(request.to)});
        if (awaited_.size() == MAX_AWAITED) {
            receive_awaited();
        }
    }

    void receive_awaited() {
        for (const awaited_push & each : std::exchange(awaited_, {})) {
            receive(each);
        }
    }

    void receive(const awaited_push & awaited) {
        const uint64_t size = awaited.request.to.size;
        std::vector<uint8_t> data = receive(awaited.request.number);
        pushed_in_ += data.size();
        if (data.size() != size) {
            throw std::runtime_error(
                "the stage before it sent " + std::to_string(data.size()) + " bytes instead of " +
                std::to_string(size)
            );
        }
        received_bytes_ += data.size() + RECEIVED_OVERHEAD;
        received_.push_back({awaited.to, std::move(data)});
        if (received_bytes_ > wire::MAX_QUEUE_BYTES) {
            write_received();  // a client that runs nothing must not fill our memory
        }
    }

    std::vector<uint8_t> receive(uint64_t number) {
        std::vector<uint8_t> data;
        bool has_come = false;
        const auto receive_within = [&](std::chrono::milliseconds time) {
            has_come = worker_.pushed().receive(id_, number, time, data);
            return has_come || queue_->is_closed();
        };
        if (has_gpu_) {
            waits_.over_soon([&] {
                worker_.take_pushes();
                return worker_.pushed().has_come(id_, number);
            });
        }
        copy_until(receive_within);
        if (!has_come) {
            receive_within(std::chrono::milliseconds(wire::RECV_TIMEOUT_MS));
        }
        if (!has_come) {
            throw std::runtime_error("the stage before it sent nothing");
        }
        return data;
    }

    // What was received is written with the inputs of the graph that follows; somebody else wants to see it now.
    void write_received() {
        for (const placed_input & each : received_) {
            if (!each.bytes.empty()) {
                byte_tensor bytes(each.to, each.bytes.size());
                ggml_backend_tensor_set(&bytes.tensor, each.bytes.data(), 0, each.bytes.size());
            }
        }
        received_.clear();
        received_bytes_ = 0;
    }

    void on_graph(const frame & message) {
        const auto head = read_struct<wire::graph_head>(message);
        kept_graph graph;
        graph.table = read_graph(head, message);
        graph.built = decode(graph.table, [this](uint32_t id, uint64_t offset, uint64_t size) {
            return find(id, offset, size);
        });
        check_supported(graph.built);
        if (graphs_.count(head.key) != 0) {
            throw std::invalid_argument("a graph is sent twice");
        }
        if (order_.size() == wire::MAX_CACHED_GRAPHS) {
            forget(order_.front());
            order_.pop_front();
        }
        tensors_ += graph.table.size();
        if (tensors_ > wire::MAX_CACHED_TENSORS) {
            throw std::invalid_argument("its graphs are too large to be kept");
        }
        order_.push_back(head.key);
        graphs_.emplace(head.key, std::move(graph));
    }

    std::vector<wire::tensor> read_graph(const wire::graph_head & head, const frame & message) {
        const uint8_t * bytes = message.payload.data() + sizeof head;
        const size_t size = message.payload.size() - sizeof head;
        if (head.has_base == 0) {
            std::vector<wire::tensor> table = read_table(bytes, size);
            if (table.size() != head.count) {
                throw std::invalid_argument("a graph has another length than it says");
            }
            return table;
        }
        const auto base = graphs_.find(head.base);
        if (base == graphs_.end() || base->second.table.size() != head.count) {
            throw std::invalid_argument("a graph is built on one that is not here");
        }
        std::vector<wire::tensor> table = base->second.table;
        decode_delta(bytes, size, reinterpret_cast<uint8_t *>(table.data()), table.size() * sizeof table[0]);
        return table;
    }

    // A device may end the process over an op that it does not know.
    void check_supported(const built_graph & built) const {
        for (const cpu_run & run : built.cpu_runs) {
            check_supported(run.graph, cpu_device(), {});
        }
        check_supported(built.graph, worker_.device(), built.cpu_runs);
    }

    void
    check_supported(ggml_cgraph * graph, ggml_backend_dev_t device, const std::vector<cpu_run> & others) const {
        for (int i = 0; i < ggml_graph_n_nodes(graph); ++i) {
            const ggml_tensor * node = ggml_graph_node(graph, i);
            if (op_only_renames(node->op) || ggml_is_empty(node) ||
                std::any_of(others.begin(), others.end(), [&](const cpu_run & run) { return run.has(node); })) {
                continue;
            }
            if (node->op == worker_.lacking() || !ggml_backend_dev_supports_op(device, node)) {
                throw std::invalid_argument(
                    std::string("this device does not compute ") + ggml_op_desc(node) + " as it is asked to"
                );
            }
        }
    }

    void forget(const wire::graph_key & key) {
        const auto found = graphs_.find(key);
        tensors_ -= found->second.table.size();
        graphs_.erase(found);
    }

    void read_inputs(const frame & message, size_t position, std::vector<placed_input> & inputs) {
        uint64_t total = 0;
        while (position < message.payload.size()) {
            input value = shadows_.decode(message.payload, position);
            total += value.data.size();
            if (total > MAX_RUN_INPUT_BYTES) {
                throw std::invalid_argument("the inputs of a RUN are too large");
            }
            inputs.push_back(
                {writable({value.buffer_id, 0, value.offset, value.data.size()}), std::move(value.data)}
            );
        }
    }

    // Both this copy and the graph are waited for at once.
    void copy_ahead(ggml_backend_t backend) {
        const frame * next = has_gpu_ ? queue_->first() : nullptr;
        if (next == nullptr) {
            return;
        }
        // Both begin with what they send.
        const auto command = static_cast<wire::command>(next->head.kind);
        if (command != wire::command::push && command != wire::command::get) {
            return;
        }
        const auto from = read_struct<wire::span>(*next);
        const auto found = buffers_.find(from.buffer_id);
        const bool is_own = found != buffers_.end() && found->second.buffer && from.size > 0;
        if (uint8_t * data = is_own ? pinned_.take(from.size) : nullptr) {
            byte_tensor bytes(find(from.buffer_id, from.offset, from.size), from.size);
            ggml_backend_tensor_get_async(backend, &bytes.tensor, data, 0, from.size);
            ahead_ = {from, data};
        }
    }

    // Null where it was not copied.
    const uint8_t * take_copied(const wire::span & from) {
        const std::optional<copied_ahead> copied = std::exchange(ahead_, std::nullopt);
        const bool is_same = copied && std::memcmp(&copied->from, &from, sizeof from) == 0;
        return is_same ? copied->data : nullptr;
    }

    void before_running(const built_graph & graph, const std::vector<placed_input> & inputs) {
        if (!deferred_.is_empty()) {
            deferred_.before_writing(
                written_ranges(*graph.graph, graph.checks, fresh_from(inputs), deferred_.sources())
            );
        }
    }

    void on_run(const frame & message) {
        const auto found = graphs_.find(read_struct<wire::graph_key>(message));
        if (found == graphs_.end()) {
            throw std::invalid_argument("a graph is run that was never sent");
        }
        std::vector<placed_input> sent;
        read_inputs(message, sizeof(wire::graph_key), sent);
        receive_awaited();
        std::vector<placed_input> inputs = std::exchange(received_, {});
        received_bytes_ = 0;
        std::move(sent.begin(), sent.end(), std::back_inserter(inputs));
        waits_.end();
        wire::telemetry cost{};
        const auto start = clock::now();
        cost.wait_ns = nanoseconds(start - idle_since_);
        cost.queued = queue_->waiting();
        before_running(found->second.built, inputs);
        worker_.compute(
            found->second.built, inputs, [this] { return queue_->is_closed(); },
            [this](ggml_backend_t backend) { copy_ahead(backend); }
        );
        for (placed_input & input : inputs) {
            worker_.buffers().give_back(std::move(input.bytes));
        }
        ran_ = true;
        idle_since_ = clock::now();
        waits_.begin();
        cost.compute_ns = nanoseconds(idle_since_ - start);
        cost.bytes_in = link_.received_bytes() + pushed_in_ - counted_in_;
        cost.bytes_out = link_.sent_bytes() + pushed_out_ - counted_out_;
        counted_in_ += cost.bytes_in;
        counted_out_ += cost.bytes_out;
        cost.states_gone =
            std::any_of(rooms_.begin(), rooms_.end(), [](const auto & entry) { return entry.second->is_gone(); });
        if (ahead_) {
            // The next stage waits for what is sent now, and nobody for this.
            link_.send_later(
                static_cast<uint8_t>(wire::answer::done), message.head.ticket, {{&cost, sizeof cost}}
            );
        } else {
            answer(wire::answer::done, message, {{&cost, sizeof cost}});
        }
    }
};

}  // namespace

namespace {

// A place among the sessions of a worker, while there is one.
class seat {
  public:
    explicit seat(worker & owner) : owner_(owner), taken_(owner.take_seat()) {}

    ~seat() {
        if (taken_) {
            owner_.leave_seat();
        }
    }

    seat(const seat &) = delete;
    seat & operator=(const seat &) = delete;

    bool is_taken() const {
        return taken_;
    }

  private:
    worker & owner_;
    bool taken_;
};

}  // namespace

void serve_session(worker & owner, int fd) {
    const seat place(owner);
    session here(owner, fd);
    if (!place.is_taken()) {
        here.send_away("it has as many sessions as it takes");
    }
    here.serve();
}

}  // namespace mesh
