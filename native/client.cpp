// The host's side: one ggml device per worker, all of whose work is sent over a link.
//
// Commands are written and forgotten; only reading data back waits. Whatever
// goes wrong on a link is remembered as the device's failure: the graph under
// way and every later one fail with it, and no process ends because of it.

#include "ggml-mesh.h"
#include "graph.h"
#include "inputs.h"
#include "link.h"
#include "registry.h"
#include "validate.h"
#include "weights.h"

#include "ggml-backend-impl.h"
#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <random>
#include <sys/mman.h>
#include <unordered_map>

namespace mesh {

namespace {

struct key_hash {
    size_t operator()(const wire::graph_key & key) const noexcept {
        return static_cast<size_t>(key.words[0]);
    }
};

struct key_equal {
    bool operator()(const wire::graph_key & a, const wire::graph_key & b) const noexcept {
        return a.words[0] == b.words[0] && a.words[1] == b.words[1];
    }
};

// A stretch of a worker's memory.
struct stretch {
    uint32_t buffer_id;
    uint64_t begin;
    uint64_t end;

    bool touches(const stretch & other) const {
        return buffer_id == other.buffer_id && begin < other.end && other.begin < end;
    }
};

bool touches_any(const stretch & one, const std::vector<stretch> & many) {
    return std::any_of(many.begin(), many.end(), [&](const stretch & other) { return one.touches(other); });
}

// What a graph reads without computing it, and what it writes.
struct graph_use {
    std::vector<stretch> reads;
    std::vector<stretch> writes;
};

// Graphs that the worker holds, in the order in which they were sent. Both sides forget the oldest one at
// the same moment, so the client always knows what has to be sent.
class known_graphs {
  public:
    // Null where the worker does not know the graph.
    const graph_use * find(const wire::graph_key & key) const {
        const auto found = uses_.find(key);
        return found != uses_.end() ? &found->second : nullptr;
    }

    const graph_use * add(const wire::graph_key & key, graph_use && use) {
        if (order_.size() == wire::MAX_CACHED_GRAPHS) {
            uses_.erase(order_.front());
            order_.pop_front();
        }
        order_.push_back(key);
        return &uses_.insert_or_assign(key, std::move(use)).first->second;
    }

    void clear() {
        order_.clear();
        uses_.clear();
    }

  private:
    std::deque<wire::graph_key> order_;
    std::unordered_map<wire::graph_key, graph_use, key_hash, key_equal> uses_;
};

stretch stretch_of(const wire::tensor & entry) {
    // Generous where strides overlap or run backwards is impossible: strides are unsigned.
    uint64_t size = ggml_type_size(static_cast<ggml_type>(entry.type));
    for (size_t i = 0; i < GGML_MAX_DIMS; ++i) {
        const int64_t steps =
            i == 0 ? entry.ne[0] / ggml_blck_size(static_cast<ggml_type>(entry.type)) - 1 : entry.ne[i] - 1;
        size += static_cast<uint64_t>(std::max<int64_t>(steps, 0)) * entry.nb[i];
    }
    return {entry.buffer_id, entry.offset, entry.offset + size};
}

// llama.cpp leaves branches in its graphs that are not taken, and copies their inputs, too. Only what a
// computed node reads has to travel.
graph_use use_of(const std::vector<wire::tensor> & table) {
    const auto is_input = [&](const wire::tensor * entry) {
        while (entry->view_of != 0) {
            entry = &table[entry->view_of - 1];
        }
        return entry->is_node == 0;
    };
    graph_use use;
    for (const wire::tensor & entry : table) {
        if (entry.is_node == 0 || (entry.flags & GGML_TENSOR_FLAG_COMPUTE) == 0) {
            continue;
        }
        use.writes.push_back(stretch_of(entry));
        for (const uint32_t source : entry.sources) {
            if (source != 0 && is_input(&table[source - 1])) {
                use.reads.push_back(stretch_of(table[source - 1]));
            }
        }
    }
    return use;
}

// A range of addresses that stands for a worker's memory: llama.cpp does
// arithmetic on it, and touching it is an error that shows at once.
class address_range {
  public:
    explicit address_range(size_t size) : size_(std::max<size_t>(size, 1)) {
        base_ = mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    }

    ~address_range() {
        if (base_ != MAP_FAILED) {
            munmap(base_, size_);
        }
    }

    address_range(const address_range &) = delete;
    address_range & operator=(const address_range &) = delete;

    uint8_t * base() const noexcept {
        return base_ == MAP_FAILED ? nullptr : static_cast<uint8_t *>(base_);
    }

  private:
    size_t size_;
    void * base_;
};

}  // namespace

class device;

extern const ggml_backend_buffer_i BUFFER_INTERFACE;

struct remote_buffer {
    device * owner;
    uint32_t id;
    address_range addresses;
    bool attached = false;  // holds weights that the worker has read itself

    remote_buffer(device * holder, uint32_t number, size_t size) : owner(holder), id(number), addresses(size) {}
};

// The model that is being loaded, by name.
struct used_model {
    std::string fingerprint;
    std::map<std::string, uint64_t> sizes;

    bool holds(ggml_tensor ** tensors, int count) const {
        return !sizes.empty() && std::all_of(tensors, tensors + count, [&](const ggml_tensor * tensor) {
            const auto found = sizes.find(ggml_get_name(tensor));
            return tensor->view_src != nullptr || (found != sizes.end() && found->second == ggml_nbytes(tensor));
        });
    }
};

class device {
  public:
    device(int fd, std::string name);

    // Made by ggml's rules: they live as long as the process.
    ggml_backend_device handle{};
    ggml_backend_buffer_type buffer_type{};

    const std::string & name() const {
        return name_;
    }

    const wire::hello_answer & facts() const {
        return facts_;
    }

    ggml_backend_buffer_t alloc(size_t size, ggml_backend_buffer_usage usage);
    ggml_backend_buffer_t
    attach(const std::string & fingerprint, const std::vector<wire::attach_entry> & entries, size_t size);
    void free(const remote_buffer & buffer) noexcept;
    void clear(const wire::span & where, uint8_t value) noexcept;
    void set(const remote_buffer & buffer, uint64_t offset, const void * data, size_t size) noexcept;
    void hold(const remote_buffer & buffer, uint64_t offset, const void * data, size_t size) noexcept;
    bool get(const remote_buffer & buffer, uint64_t offset, void * data, size_t size) noexcept;
    void copy(const wire::copy & what) noexcept;
    bool push(const wire::span & from, device & to, uint64_t number) noexcept;
    void recv(const wire::span & to, uint64_t number) noexcept;
    ggml_status compute(const ggml_cgraph * graph) noexcept;

    void add_peer(const device * other, uint32_t number) {
        const std::lock_guard lock(mutex_);
        peers_[other] = number;
    }

    // Why nothing works any more; empty while all is well. What the worker has said unasked is read first.
    std::string failure() noexcept;

  private:
    std::mutex mutex_;
    link link_;
    std::string name_;
    std::string failure_;
    wire::hello_answer facts_{};
    uint32_t last_ticket_ = 0;
    uint32_t last_buffer_id_ = 0;
    uint32_t runs_in_flight_ = 0;
    uint64_t last_uid_ = 0;
    wire::graph_key last_key_{};
    known_graphs known_;
    const graph_use * last_use_ = nullptr;
    std::vector<input> held_;  // set, and not sent before a graph reads it
    shadows shadows_;
    std::map<const device *, uint32_t> peers_;

    void greet();
    void send(wire::command kind, std::initializer_list<bytes_view> parts);
    wire::header await(wire::answer kind, uint32_t ticket);
    wire::header next_header();
    void take_notice(const wire::header & head);
    const graph_use * announce(const ggml_cgraph * graph);
    void send_piecewise(uint32_t buffer_id, uint64_t offset, const uint8_t * data, size_t size);
    void let_go(const stretch & wanted);
    void replace(const stretch & fresh);

    // Runs `work` unless the device has failed; turns what it throws into the failure.
    template <typename Work> bool attempt(Work && work) noexcept {
        const std::lock_guard lock(mutex_);
        if (!failure_.empty()) {
            return false;
        }
        try {
            work();
            return true;
        } catch (const std::exception & error) {
            failure_ = name_ + ": " + error.what();
            link_.shut();
            return false;
        }
    }
};

namespace {

std::vector<std::unique_ptr<device>> & devices() {
    static std::vector<std::unique_ptr<device>> all;
    return all;
}

// Set once the model is loaded. Until then nobody catches what a read throws, and nothing that is read
// becomes a token.
std::atomic<bool> & serving() {
    static std::atomic<bool> yes{false};
    return yes;
}

std::string in_megabytes(uint64_t bytes) {
    char text[32];
    std::snprintf(text, sizeof text, "%.1f MB", static_cast<double>(bytes) / 1e6);
    return text;
}

remote_buffer & remote(ggml_backend_buffer_t buffer) {
    return *static_cast<remote_buffer *>(buffer->context);
}

uint64_t offset_in(const remote_buffer & buffer, const ggml_tensor * tensor) {
    return static_cast<uint64_t>(static_cast<const uint8_t *>(tensor->data) - buffer.addresses.base());
}

// One for all devices of this process: together they are one session.
wire::session_id our_session() {
    static const wire::session_id id = [] {
        std::random_device random;
        const auto word = [&] { return (static_cast<uint64_t>(random()) << 32) | random(); };
        return wire::session_id{{word(), word()}};
    }();
    return id;
}

wire::hello our_hello() {
    wire::hello self{};
    self.session = our_session();
    self.magic = wire::MAGIC;
    self.version = wire::VERSION;
    std::snprintf(self.engine, sizeof self.engine, "%s", ggml_mesh_engine_version());
    self.op_count = GGML_OP_COUNT;
    self.type_count = GGML_TYPE_COUNT;
    self.tensor_size = sizeof(ggml_tensor);
    return self;
}

}  // namespace

// --- the device ---

device::device(int fd, std::string name) : link_(fd), name_(std::move(name)) {
    greet();
}

void device::greet() {
    const wire::hello self = our_hello();
    send(wire::command::hello, {{&self, sizeof self}});
    const wire::header head = await(wire::answer::hello, last_ticket_);
    if (head.size != sizeof facts_) {
        throw link_error("it does not speak ggml-mesh");
    }
    link_.receive(&facts_, sizeof facts_);
    facts_.name[sizeof facts_.name - 1] = 0;
    facts_.description[sizeof facts_.description - 1] = 0;
    facts_.self.engine[sizeof facts_.self.engine - 1] = 0;
    if (facts_.self.magic != self.magic || facts_.self.version != self.version ||
        std::strcmp(facts_.self.engine, self.engine) != 0) {
        throw link_error(
            "it runs engine " + std::string(facts_.self.engine) + ", this machine " + std::string(self.engine) +
            "; links need the same one"
        );
    }
}

void device::send(wire::command kind, std::initializer_list<bytes_view> parts) {
    link_.send(static_cast<uint8_t>(kind), ++last_ticket_, parts);
}

// Reads until the answer to `ticket` comes; its payload is left to the caller.
wire::header device::await(wire::answer kind, uint32_t ticket) {
    for (;;) {
        const wire::header head = next_header();
        if (head.kind == static_cast<uint8_t>(kind) && head.ticket == ticket) {
            return head;
        }
        take_notice(head);
    }
}

// Waits for the worker as long as all others are there: this one may itself be waiting for a push from one
// that is gone, and would say so much later.
wire::header device::next_header() {
    std::vector<const link *> links;
    for (const auto & other : devices()) {
        links.push_back(&other->link_);
    }
    const int ended = link_.wait_readable(links);
    if (ended >= 0) {
        throw link_error("it was given up, since " + devices()[static_cast<size_t>(ended)]->name() + " is gone");
    }
    return link_.receive_header();
}

std::string device::failure() noexcept {
    attempt([&] {
        while (link_.readable()) {
            take_notice(link_.receive_header());
        }
    });
    const std::lock_guard lock(mutex_);
    return failure_;
}

// A DONE that nobody waited for, or an error.
void device::take_notice(const wire::header & head) {
    std::vector<uint8_t> payload(head.size);
    link_.receive(payload.data(), payload.size());
    if (head.kind == static_cast<uint8_t>(wire::answer::error)) {
        throw link_error(std::string(payload.begin(), payload.end()));
    }
    if (head.kind != static_cast<uint8_t>(wire::answer::done) || runs_in_flight_ == 0) {
        throw link_error("it answered what was not asked");
    }
    --runs_in_flight_;
}

ggml_backend_buffer_t device::alloc(size_t size, ggml_backend_buffer_usage usage) {
    std::unique_ptr<remote_buffer> buffer;
    uint32_t refused = 1;
    attempt([&] {
        buffer = std::make_unique<remote_buffer>(this, ++last_buffer_id_, size);
        if (buffer->addresses.base() == nullptr) {
            return;
        }
        const wire::alloc request = {buffer->id, static_cast<uint32_t>(usage), size};
        send(wire::command::alloc, {{&request, sizeof request}});
        const wire::header head = await(wire::answer::alloc, last_ticket_);
        if (head.size != sizeof refused) {
            throw link_error("its answer has the wrong size");
        }
        link_.receive(&refused, sizeof refused);
        if (refused != 0) {
            throw link_error(
                "it has no room for " + in_megabytes(size) + " (" + in_megabytes(facts_.grant_bytes) +
                " were free for this engine)"
            );
        }
    });
    if (refused != 0) {
        return nullptr;
    }
    return ggml_backend_buffer_init(&buffer_type, BUFFER_INTERFACE, buffer.release(), size);
}

ggml_backend_buffer_t
device::attach(const std::string & fingerprint, const std::vector<wire::attach_entry> & entries, size_t size) {
    std::unique_ptr<remote_buffer> buffer;
    const bool done = attempt([&] {
        buffer = std::make_unique<remote_buffer>(this, ++last_buffer_id_, size);
        buffer->attached = true;
        wire::attach request{};
        std::snprintf(request.fingerprint, sizeof request.fingerprint, "%s", fingerprint.c_str());
        request.buffer_id = buffer->id;
        request.count = static_cast<uint32_t>(entries.size());
        send(
            wire::command::attach,
            {{&request, sizeof request}, {entries.data(), entries.size() * sizeof entries[0]}}
        );
        const wire::header head = await(wire::answer::attach, last_ticket_);
        std::string refusal(head.size, 0);
        link_.receive(refusal.data(), refusal.size());
        if (!refusal.empty()) {
            throw link_error(refusal);
        }
    });
    if (!done || buffer->addresses.base() == nullptr) {
        return nullptr;
    }
    return ggml_backend_buffer_init(&buffer_type, BUFFER_INTERFACE, buffer.release(), size);
}

void device::free(const remote_buffer & buffer) noexcept {
    attempt([&] {
        const uint32_t id = buffer.id;
        send(wire::command::free, {{&id, sizeof id}});
        // The worker drops the graphs that used it; sending all again is simpler than knowing which.
        known_.clear();
        shadows_.clear();
        last_uid_ = 0;
        held_.erase(
            std::remove_if(
                held_.begin(), held_.end(), [&](const input & old) { return old.buffer_id == buffer.id; }
            ),
            held_.end()
        );
    });
}

void device::clear(const wire::span & where, uint8_t value) noexcept {
    attempt([&] {
        replace({where.buffer_id, where.offset, where.offset + where.size});
        const wire::clear request = {where, value, {}};
        send(wire::command::clear, {{&request, sizeof request}});
    });
}

void device::set(const remote_buffer & buffer, uint64_t offset, const void * data, size_t size) noexcept {
    attempt([&] {
        replace({buffer.id, offset, offset + size});
        send_piecewise(buffer.id, offset, static_cast<const uint8_t *>(data), size);
    });
}

void device::send_piecewise(uint32_t buffer_id, uint64_t offset, const uint8_t * data, size_t size) {
    constexpr size_t piece = wire::MAX_FRAME_BYTES / 2;
    for (size_t done = 0; done < size; done += piece) {
        const size_t count = std::min(piece, size - done);
        const wire::span where = {buffer_id, 0, offset + done, count};
        send(wire::command::set, {{&where, sizeof where}, {data + done, count}});
    }
}

// Inputs of graphs wait here: many are never read, and the rest travels with the graph that reads it.
void device::hold(const remote_buffer & buffer, uint64_t offset, const void * data, size_t size) noexcept {
    attempt([&] {
        if (size > wire::MAX_FRAME_BYTES / 4) {
            replace({buffer.id, offset, offset + size});
            send_piecewise(buffer.id, offset, static_cast<const uint8_t *>(data), size);
            return;
        }
        replace({buffer.id, offset, offset + size});
        const auto * bytes = static_cast<const uint8_t *>(data);
        held_.push_back({buffer.id, offset, {bytes, bytes + size}});
    });
}

// Something newer goes where data is held: sent later, that would overwrite it.
void device::replace(const stretch & fresh) {
    held_.erase(
        std::remove_if(
            held_.begin(), held_.end(),
            [&](const input & old) {
                return old.buffer_id == fresh.buffer_id && old.offset >= fresh.begin &&
                       old.offset + old.data.size() <= fresh.end;
            }
        ),
        held_.end()
    );
    let_go(fresh);  // what is only covered in part
}

// Somebody else than a graph wants to see what is held.
void device::let_go(const stretch & wanted) {
    for (auto entry = held_.begin(); entry != held_.end();) {
        if (wanted.touches({entry->buffer_id, entry->offset, entry->offset + entry->data.size()})) {
            send_piecewise(entry->buffer_id, entry->offset, entry->data.data(), entry->data.size());
            entry = held_.erase(entry);
        } else {
            ++entry;
        }
    }
}

bool device::get(const remote_buffer & buffer, uint64_t offset, void * data, size_t size) noexcept {
    return attempt([&] {
        let_go({buffer.id, offset, offset + size});
        constexpr size_t piece = wire::MAX_FRAME_BYTES / 2;
        for (size_t done = 0; done < size; done += piece) {
            const size_t count = std::min(piece, size - done);
            const wire::span where = {buffer.id, 0, offset + done, count};
            send(wire::command::get, {{&where, sizeof where}});
            const wire::header head = await(wire::answer::data, last_ticket_);
            if (head.size != count) {
                throw link_error("its answer has the wrong size");
            }
            link_.receive(static_cast<uint8_t *>(data) + done, count);
        }
    });
}

void device::copy(const wire::copy & what) noexcept {
    attempt([&] {
        let_go({what.from.buffer_id, what.from.offset, what.from.offset + what.from.size});
        replace({what.to_buffer_id, what.to_offset, what.to_offset + what.from.size});
        send(wire::command::copy, {{&what, sizeof what}});
    });
}

// False where there is no link between the two.
bool device::push(const wire::span & from, device & to, uint64_t number) noexcept {
    bool linked = false;
    attempt([&] {
        const auto found = peers_.find(&to);
        if (found != peers_.end()) {
            linked = true;
            let_go({from.buffer_id, from.offset, from.offset + from.size});
            const wire::push request = {from, number, found->second, 0};
            send(wire::command::push, {{&request, sizeof request}});
        }
    });
    return linked;
}

void device::recv(const wire::span & to, uint64_t number) noexcept {
    attempt([&] {
        replace({to.buffer_id, to.offset, to.offset + to.size});
        const wire::recv request = {to, number};
        send(wire::command::recv, {{&request, sizeof request}});
    });
}

ggml_status device::compute(const ggml_cgraph * graph) noexcept {
    const bool sent = attempt([&] {
        // Depth is bounded by runs, not by blocking writes: a host that is stuck in a write to one worker
        // while that one waits for another would be a circle.
        while (runs_in_flight_ >= wire::MAX_RUNS_IN_FLIGHT) {
            take_notice(next_header());
        }
        const graph_use * use = announce(graph);
        if (use == nullptr) {
            return;
        }
        std::vector<uint8_t> inputs;
        for (auto entry = held_.begin(); entry != held_.end();) {
            const stretch place = {entry->buffer_id, entry->offset, entry->offset + entry->data.size()};
            const bool read = touches_any(place, use->reads);
            if (read) {
                shadows_.encode(*entry, inputs);
            }
            // What the graph writes over is gone; what it neither reads nor writes may be read by the next one.
            entry = read || touches_any(place, use->writes) ? held_.erase(entry) : entry + 1;
        }
        send(wire::command::run, {{&last_key_, sizeof last_key_}, {inputs.data(), inputs.size()}});
        ++runs_in_flight_;
    });
    return sent ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

// Sends the graph unless the worker knows it; its key is `last_key_` then. Null where it has nothing to compute.
const graph_use * device::announce(const ggml_cgraph * graph) {
    if (graph->uid != 0 && graph->uid == last_uid_) {
        return last_use_;
    }
    const std::vector<wire::tensor> table = encode(graph, [this](const ggml_tensor * tensor) {
        ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
        if (buffer == nullptr || tensor->data == nullptr || buffer->buft != &buffer_type) {
            return placed{};
        }
        return placed{remote(buffer).id, offset_in(remote(buffer), tensor)};
    });
    last_uid_ = graph->uid;
    last_use_ = nullptr;
    if (table.empty()) {
        return nullptr;
    }
    last_key_ = key_of(table);
    last_use_ = known_.find(last_key_);
    if (last_use_ == nullptr) {
        send(
            wire::command::graph,
            {{&last_key_, sizeof last_key_}, {table.data(), table.size() * sizeof(wire::tensor)}}
        );
        last_use_ = known_.add(last_key_, use_of(table));
    }
    return last_use_;
}

// --- ggml's interfaces: every slot, in order ---

namespace {

device & device_of(ggml_backend_dev_t dev) {
    return *static_cast<device *>(dev->context);
}

device & device_of(ggml_backend_t backend) {
    return *static_cast<device *>(backend->context);
}

void buffer_free(ggml_backend_buffer_t buffer) {
    const std::unique_ptr<remote_buffer> owned(&remote(buffer));
    owned->owner->free(*owned);
}

void * buffer_get_base(ggml_backend_buffer_t buffer) {
    return remote(buffer).addresses.base();
}

void buffer_memset_tensor(
    ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size
) {
    const remote_buffer & memory = remote(buffer);
    memory.owner->clear({memory.id, 0, offset_in(memory, tensor) + offset, size}, value);
}

void buffer_set_tensor(
    ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size
) {
    const remote_buffer & memory = remote(buffer);
    if (memory.attached) {
        return;  // the worker has read them itself; `data` is not even looked at, so that no page of it is loaded
    }
    const uint64_t at = offset_in(memory, tensor) + offset;
    if (buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        memory.owner->hold(memory, at, data, size);
    } else {
        memory.owner->set(memory, at, data, size);
    }
}

void buffer_get_tensor(
    ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size
) {
    const remote_buffer & memory = remote(buffer);
    if (memory.owner->get(memory, offset_in(memory, tensor) + offset, data, size)) {
        return;
    }
    std::memset(data, 0, size);
    if (buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE && serving()) {
        // What is read from a compute buffer becomes a token. llama-server catches this and fails the request.
        // The cache and saved states are also read in destructors, where nothing may be thrown.
        throw std::runtime_error(memory.owner->failure());
    }
}

bool buffer_cpy_tensor(ggml_backend_buffer_t buffer, const ggml_tensor * src, ggml_tensor * dst) {
    const remote_buffer & to = remote(buffer);
    ggml_backend_buffer_t source = src->view_src != nullptr ? src->view_src->buffer : src->buffer;
    if (source == nullptr || source->iface.get_base != buffer_get_base) {
        return false;
    }
    const remote_buffer & from = remote(source);
    if (from.owner != to.owner) {
        return false;
    }
    to.owner->copy({{from.id, 0, offset_in(from, src), ggml_nbytes(src)}, to.id, 0, offset_in(to, dst)});
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const remote_buffer & memory = remote(buffer);
    memory.owner->clear({memory.id, 0, 0, buffer->size}, value);
}

const char * type_get_name(ggml_backend_buffer_type_t type) {
    return device_of(type->device).name().c_str();
}

ggml_backend_buffer_t type_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    return device_of(type->device).alloc(size, GGML_BACKEND_BUFFER_USAGE_ANY);
}

used_model & model() {
    static used_model current;
    return current;
}

// Addresses for a list of tensors, one after the other.
class layout_plan {
  public:
    layout_plan(ggml_tensor ** tensors, int count, size_t alignment) {
        for (int i = 0; i < count; ++i) {
            offsets_.push_back(size_);
            if (tensors[i]->data == nullptr && tensors[i]->view_src == nullptr) {
                size_ += GGML_PAD(ggml_nbytes(tensors[i]), alignment);
            }
        }
    }

    size_t size() const {
        return size_;
    }

    size_t offset(int index) const {
        return offsets_[static_cast<size_t>(index)];
    }

  private:
    size_t size_ = 0;
    std::vector<size_t> offsets_;
};

std::vector<wire::attach_entry> attach_entries(ggml_tensor ** tensors, int count, const layout_plan & plan) {
    std::vector<wire::attach_entry> entries;
    for (int i = 0; i < count; ++i) {
        if (tensors[i]->view_src == nullptr) {
            wire::attach_entry entry{};
            std::snprintf(entry.name, sizeof entry.name, "%s", ggml_get_name(tensors[i]));
            entry.offset = plan.offset(i);
            entry.size = ggml_nbytes(tensors[i]);
            entry.elements = ggml_nelements(tensors[i]);
            entry.type = static_cast<uint32_t>(tensors[i]->type);
            entries.push_back(entry);
        }
    }
    return entries;
}

// llama.cpp's weights come here all at once, with their names; so do its caches.
ggml_backend_buffer_t type_alloc_buffer_n(ggml_backend_buffer_type_t type, ggml_tensor ** tensors, int count) {
    device & owner = device_of(type->device);
    const layout_plan plan(tensors, count, owner.facts().alignment);
    ggml_backend_buffer_t buffer =
        model().holds(tensors, count)
            ? owner.attach(model().fingerprint, attach_entries(tensors, count, plan), plan.size())
            : owner.alloc(plan.size(), GGML_BACKEND_BUFFER_USAGE_ANY);
    if (buffer == nullptr) {
        return nullptr;
    }
    for (int i = 0; i < count; ++i) {
        if (tensors[i]->view_src != nullptr) {
            ggml_backend_view_init(tensors[i]);
        } else if (tensors[i]->data == nullptr) {
            ggml_backend_tensor_alloc(buffer, tensors[i], remote(buffer).addresses.base() + plan.offset(i));
        }
    }
    return buffer;
}

size_t type_get_alignment(ggml_backend_buffer_type_t type) {
    return device_of(type->device).facts().alignment;
}

size_t type_get_max_size(ggml_backend_buffer_type_t) {
    return SIZE_MAX;
}

bool type_is_host(ggml_backend_buffer_type_t) {
    return false;
}

const char * backend_get_name(ggml_backend_t backend) {
    return device_of(backend).name().c_str();
}

void backend_free(ggml_backend_t backend) {
    delete backend;
}

ggml_backend_buffer_t buffer_of(const ggml_tensor * tensor) {
    return tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
}

bool is_remote(ggml_backend_buffer_t buffer) {
    return buffer != nullptr && buffer->iface.get_base == buffer_get_base;
}

// From one worker straight to the next: two queued commands, and nobody waits here.
bool push_between(const ggml_tensor * src, const ggml_tensor * dst) {
    static std::atomic<uint64_t> last_number{0};

    const remote_buffer & from = remote(buffer_of(src));
    const remote_buffer & to = remote(buffer_of(dst));
    const size_t size = ggml_nbytes(src);
    if (from.owner == to.owner || size > wire::MAX_FRAME_BYTES / 2) {
        return false;
    }
    const uint64_t number = ++last_number;
    if (!from.owner->push({from.id, 0, offset_in(from, src), size}, *to.owner, number)) {
        return false;
    }
    to.owner->recv({to.id, 0, offset_in(to, dst), size}, number);
    return true;
}

// Activations on their way to a stage. From host memory they are sent at once, so that the host may go on.
bool backend_cpy_tensor_async(ggml_backend_t, ggml_backend_t, const ggml_tensor * src, ggml_tensor * dst) {
    ggml_backend_buffer_t from = buffer_of(src);
    if (from == nullptr || !ggml_is_contiguous(src) || !ggml_is_contiguous(dst) || !is_remote(buffer_of(dst))) {
        return false;
    }
    if (is_remote(from)) {
        return push_between(src, dst);
    }
    if (!ggml_backend_buffer_is_host(from)) {
        return false;
    }
    buffer_set_tensor(buffer_of(dst), dst, src->data, 0, ggml_nbytes(src));
    return true;
}

void backend_synchronize(ggml_backend_t) {
    // Reads have landed when they return, and data that was set has been copied: nothing to wait for.
}

ggml_status backend_graph_compute(ggml_backend_t backend, ggml_cgraph * graph) {
    return device_of(backend).compute(graph);
}

const char * device_get_name(ggml_backend_dev_t dev) {
    return device_of(dev).name().c_str();
}

const char * device_get_description(ggml_backend_dev_t dev) {
    return device_of(dev).facts().description;
}

void device_get_memory(ggml_backend_dev_t dev, size_t * free, size_t * total) {
    *free = device_of(dev).facts().grant_bytes;
    *total = device_of(dev).facts().total_bytes;
}

enum ggml_backend_dev_type device_get_type(ggml_backend_dev_t) {
    return GGML_BACKEND_DEVICE_TYPE_GPU;  // what llama.cpp offloads layers to
}

void device_get_props(ggml_backend_dev_t dev, ggml_backend_dev_props * props) {
    props->name = device_get_name(dev);
    props->description = device_get_description(dev);
    props->type = device_get_type(dev);
    device_get_memory(dev, &props->memory_free, &props->memory_total);
    // Neither asynchronous copies nor events: an ordered stream overlaps without them, and with them
    // llama.cpp waits for everything each time it reuses a graph.
    props->caps = {};
}

ggml_backend_t device_init_backend(ggml_backend_dev_t dev, const char *) {
    static ggml_guid guid = {0x6d, 0x65, 0x73, 0x68, 0x2d, 0x6c, 0x6c, 0x6d, 1, 0, 0, 0, 0, 0, 0, 0};
    static const ggml_backend_i interface = {
        /* .get_name            = */ backend_get_name,
        /* .free                = */ backend_free,
        /* .set_tensor_async    = */ nullptr,
        /* .get_tensor_async    = */ nullptr,
        /* .set_tensor_2d_async = */ nullptr,
        /* .get_tensor_2d_async = */ nullptr,
        /* .cpy_tensor_async    = */ backend_cpy_tensor_async,
        /* .synchronize         = */ backend_synchronize,
        /* .graph_plan_create   = */ nullptr,
        /* .graph_plan_free     = */ nullptr,
        /* .graph_plan_update   = */ nullptr,
        /* .graph_plan_compute  = */ nullptr,
        /* .graph_compute       = */ backend_graph_compute,
        /* .event_record        = */ nullptr,
        /* .event_wait          = */ nullptr,
        /* .graph_optimize      = */ nullptr,
    };
    return new ggml_backend{&guid, interface, dev, dev->context};
}

ggml_backend_buffer_type_t device_get_buffer_type(ggml_backend_dev_t dev) {
    return &device_of(dev).buffer_type;
}

bool device_supports_op(ggml_backend_dev_t, const ggml_tensor * op) {
    // A CPU worker runs the same code as this machine's CPU device. Others are asked over the link (to come).
    ggml_backend_dev_t cpu = ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
    return node_is_allowed(op) && ggml_backend_dev_supports_op(cpu, op);
}

bool device_supports_buft(ggml_backend_dev_t dev, ggml_backend_buffer_type_t type) {
    return type == &device_of(dev).buffer_type;
}

const ggml_backend_device_i DEVICE_INTERFACE = {
    /* .get_name             = */ device_get_name,
    /* .get_description      = */ device_get_description,
    /* .get_memory           = */ device_get_memory,
    /* .get_type             = */ device_get_type,
    /* .get_props            = */ device_get_props,
    /* .init_backend         = */ device_init_backend,
    /* .get_buffer_type      = */ device_get_buffer_type,
    /* .get_host_buffer_type = */ nullptr,
    /* .buffer_from_host_ptr = */ nullptr,
    /* .supports_op          = */ device_supports_op,
    /* .supports_buft        = */ device_supports_buft,
    /* .offload_op           = */ nullptr,
    /* .event_new            = */ nullptr,
    /* .event_free           = */ nullptr,
    /* .event_synchronize    = */ nullptr,
};

const ggml_backend_buffer_type_i TYPE_INTERFACE = {
    /* .get_name         = */ type_get_name,
    /* .alloc_buffer     = */ type_alloc_buffer,
    /* .alloc_buffer_n   = */ type_alloc_buffer_n,
    /* .get_alignment    = */ type_get_alignment,
    /* .get_max_size     = */ type_get_max_size,
    /* .get_alloc_size   = */ nullptr,
    /* .get_alloc_size_n = */ nullptr,
    /* .is_host          = */ type_is_host,
};

}  // namespace

const ggml_backend_buffer_i BUFFER_INTERFACE = {
    /* .free_buffer   = */ buffer_free,
    /* .get_base      = */ buffer_get_base,
    /* .init_tensor   = */ nullptr,
    /* .memset_tensor = */ buffer_memset_tensor,
    /* .set_tensor    = */ buffer_set_tensor,
    /* .get_tensor    = */ buffer_get_tensor,
    /* .set_tensor_2d = */ nullptr,
    /* .get_tensor_2d = */ nullptr,
    /* .cpy_tensor    = */ buffer_cpy_tensor,
    /* .clear         = */ buffer_clear,
    /* .reset         = */ nullptr,
};

}  // namespace mesh

int ggml_mesh_connect(int fd, const char * name, char * why, size_t why_size) {
    try {
        auto connected = std::make_unique<mesh::device>(fd, name);
        connected->handle.iface = mesh::DEVICE_INTERFACE;
        connected->handle.reg = ggml_mesh_registry();
        connected->handle.context = connected.get();
        connected->buffer_type.iface = mesh::TYPE_INTERFACE;
        connected->buffer_type.device = &connected->handle;
        connected->buffer_type.context = connected.get();
        ggml_backend_device_register(&connected->handle);
        mesh::devices().push_back(std::move(connected));
        return static_cast<int>(mesh::devices().size()) - 1;
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s: %s", name, error.what());
        return -1;
    }
}

int ggml_mesh_use_model(
    const char * fingerprint, const char * const * paths, size_t count, char * why, size_t why_size
) {
    try {
        mesh::model() = {fingerprint, mesh::tensor_sizes({paths, paths + count})};
        return 0;
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s", error.what());
        return 1;
    }
}

void ggml_mesh_link(int from, int to, unsigned int peer) {
    const auto & all = mesh::devices();
    const auto count = static_cast<int>(all.size());
    if (from >= 0 && from < count && to >= 0 && to < count) {
        all[static_cast<size_t>(from)]->add_peer(all[static_cast<size_t>(to)].get(), peer);
    }
}

void ggml_mesh_loaded(void) {
    mesh::serving() = true;
}

size_t ggml_mesh_failure(int index, char * why, size_t why_size) {
    const auto & all = mesh::devices();
    if (index < 0 || static_cast<size_t>(index) >= all.size()) {
        return 0;
    }
    const std::string failure = all[static_cast<size_t>(index)]->failure();
    std::snprintf(why, why_size, "%s", failure.c_str());
    return failure.size();
}
