#include "host/device.h"

#include "rules/validate.h"
#include "wire/delta.h"
#include "worker/store.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <random>
#include <sys/mman.h>
#include <thread>

namespace mesh {

namespace {

bool touches_any(const stretch & one, const std::vector<stretch> & many) {
    return std::any_of(many.begin(), many.end(), [&](const stretch & other) { return one.touches(other); });
}

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
known_graph use_of(std::vector<wire::tensor> && table) {
    const auto is_input = [&](const wire::tensor * entry) {
        while (entry->view_of != 0) {
            entry = &table[entry->view_of - 1];
        }
        return entry->is_node == 0;
    };
    known_graph use;
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
    use.table = std::move(table);
    return use;
}

// Sums of what a worker tells stop at the largest number there is.
void add_up(unsigned long long & sum, uint64_t more) {
    sum = more > UINT64_MAX - sum ? UINT64_MAX : sum + more;
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

wire::hello our_hello(const std::string & model) {
    wire::hello self{};
    self.session = our_session();
    std::snprintf(self.model, sizeof self.model, "%s", model.c_str());
    self.magic = wire::MAGIC;
    self.version = wire::VERSION;
    std::snprintf(self.engine, sizeof self.engine, "%s", ggml_mesh_engine_version());
    self.op_count = GGML_OP_COUNT;
    self.type_count = GGML_TYPE_COUNT;
    self.tensor_size = sizeof(ggml_tensor);
    return self;
}

}  // namespace

// --- what a worker knows ---

const known_graph * known_graphs::find(const wire::graph_key & key) const {
    const auto found = graphs_.find(key);
    return found != graphs_.end() ? &found->second : nullptr;
}

const known_graph * known_graphs::add(const wire::graph_key & key, std::vector<wire::tensor> && table) {
    if (order_.size() == wire::MAX_CACHED_GRAPHS) {
        graphs_.erase(order_.front());
        order_.pop_front();
    }
    order_.push_back(key);
    return &graphs_.insert_or_assign(key, use_of(std::move(table))).first->second;
}

const wire::graph_key * known_graphs::resembling(size_t count) const {
    const auto found = std::find_if(order_.rbegin(), order_.rend(), [&](const wire::graph_key & key) {
        return graphs_.at(key).table.size() == count;
    });
    return found != order_.rend() ? &*found : nullptr;
}

void known_graphs::clear() {
    order_.clear();
    graphs_.clear();
}

address_range::address_range(size_t size) : size_(std::max<size_t>(size, 1)) {
    void * base = mmap(nullptr, size_, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    base_ = base == MAP_FAILED ? nullptr : static_cast<uint8_t *>(base);
}

address_range::~address_range() {
    if (base_ != nullptr) {
        munmap(base_, size_);
    }
}

std::vector<std::unique_ptr<device>> & devices() {
    static std::vector<std::unique_ptr<device>> all;
    return all;
}

void ask_all(const std::vector<op_question> & questions) {
    for (const auto & each : devices()) {
        if (!each->answers_as_host()) {
            each->ask_ahead(questions);
        }
    }
}

// --- the device ---

device::device(int fd, std::string name, const std::string & model) : name_(std::move(name)), link_(fd, name_) {
    link_.bound_waits(host_patience().rest, host_patience().answer);
    const wire::hello self = our_hello(model);
    send(wire::command::hello, {{&self, sizeof self}});
}

void device::be_greeted() {
    const wire::header head = await(wire::answer::hello, last_ticket_);
    if (head.size != sizeof facts_) {
        throw link_error("it does not speak ggml-mesh");
    }
    link_.receive(&facts_, sizeof facts_);
    check_facts(facts_);
    greeted_ = true;
}

void device::send(wire::command kind, std::initializer_list<bytes_view> parts) {
    link_.send(static_cast<uint8_t>(kind), ++last_ticket_, parts);
}

// Reads until the answer to `ticket` comes; its payload is left to the caller. Commands are carried out in order, so
// nothing that was sent before is left to be done then.
wire::header device::await(wire::answer kind, uint32_t ticket) {
    for (;;) {
        const wire::header head = next_header();
        if (head.kind == static_cast<uint8_t>(kind) && head.ticket == ticket) {
            if (!runs_.empty()) {
                throw bad_answer("it sent an answer before it was done with a run");
            }
            if (!asked_.empty()) {
                throw bad_answer("it left out an answer");
            }
            return head;
        }
        take_notice(head);
    }
}

// Waits for the worker as long as all others are there: this one may itself be waiting for a push from one
// that is gone, and would say so much later. Their notices are read meanwhile: one that cannot get rid of them
// would not push what this one waits for.
wire::header device::next_header() {
    std::vector<const link *> links;
    std::vector<device *> others;
    for (const auto & other : devices()) {
        if (other.get() != this) {
            links.push_back(&other->link_);
            others.push_back(other.get());
        }
    }
    const auto time = greeted_ ? host_patience().answer : host_patience().greeting;
    const bool has_gpu = facts_.device_type == GGML_BACKEND_DEVICE_TYPE_GPU;
    waits_.begin();
    while (const size_t ready = link_.wait_readable(links, time, has_gpu ? &waits_ : nullptr)) {
        device & other = *others[ready - 1];
        if (!other.read_notices()) {
            throw link_error("it was given up, since " + other.name() + " is gone");
        }
    }
    waits_.end();
    return link_.receive_header();
}

// False where the device has failed.
bool device::read_notices() noexcept {
    const std::unique_lock lock(mutex_, std::try_to_lock);
    if (!lock) {
        std::this_thread::yield();  // somebody is reading them
        return true;
    }
    return failure_.empty() && carry_out([&] { drain(); });
}

// A DONE that nobody waited for, what it says of an op, or an error.
void device::take_notice(const wire::header & head) {
    if (head.kind == static_cast<uint8_t>(wire::answer::error)) {
        std::string text(std::min<uint64_t>(head.size, MAX_ERROR_BYTES), 0);
        link_.receive(text.data(), text.size());
        throw bad_answer(printable(text.data(), text.size()));
    }
    const bool of_op = head.kind == static_cast<uint8_t>(wire::answer::supports);
    const bool of_run = head.kind == static_cast<uint8_t>(wire::answer::done);
    if (of_op && owes_an_answer() && head.ticket == asked_.front().ticket) {
        take_answer(head);
        return;
    }
    if (!of_run || owes_an_answer() || runs_.empty() || head.ticket != runs_.front()) {
        throw bad_answer("it answered what was not asked");
    }
    const auto cost = receive_as<wire::telemetry>(head);
    check_cost(cost);
    runs_.pop_front();
    ++counters_.runs;
    add_up(counters_.compute_ns, cost.compute_ns);
    add_up(counters_.wait_ns, cost.wait_ns);
    add_up(counters_.worker_in_bytes, cost.bytes_in);
    add_up(counters_.worker_out_bytes, cost.bytes_out);
    counters_.queued = cost.queued;
    states_gone_ = states_gone_ || cost.states_gone != 0;
}

template <typename T> T device::receive_as(const wire::header & head) {
    T value;
    if (head.size != sizeof value) {
        throw bad_answer("its answer has the wrong size");
    }
    link_.receive(&value, sizeof value);
    return value;
}

void device::drain() {
    while (link_.readable()) {
        take_notice(link_.receive_header());
    }
}

// What the worker said before its link ended, which a failed write did not let us see.
std::string device::last_words(const std::string & otherwise) noexcept {
    try {
        while (link_.ended()) {  // so that reading cannot wait
            const frame message = link_.receive_frame();
            if (message.head.kind == static_cast<uint8_t>(wire::answer::error)) {
                const std::string text(message.payload.begin(), message.payload.end());
                return printable(text.data(), text.size());
            }
        }
    } catch (const std::exception &) {
        // It said nothing.
    }
    return otherwise;
}

std::string device::failure() noexcept {
    attempt([&] { drain(); });
    const std::lock_guard lock(mutex_);
    return failure_;
}

ggml_mesh_stage device::counters() noexcept {
    attempt([&] { drain(); });
    const std::lock_guard lock(mutex_);
    counters_.sent_bytes = link_.sent_bytes();
    counters_.received_bytes = link_.received_bytes();
    counters_.in_flight = static_cast<unsigned int>(runs_.size());
    return counters_;
}

void device::add_peer(const device * other, uint32_t number) {
    const std::lock_guard lock(mutex_);
    peers_[other] = number;
}

bool device::supports(const ggml_tensor * op) noexcept {
    const op_question question = question_about(op);
    bool is_new = false;
    std::optional<bool> answer;
    attempt([&] {
        is_new = ask(question);
        answer = *supported_.find(question);
    });
    if (is_new) {
        ask_all({question});  // the others will have to be asked, too
    }
    const bool answered = answer.has_value() || attempt([&] {
                              const std::optional<bool> * known = supported_.find(question);
                              while (!known->has_value()) {
                                  take_notice(next_header());
                              }
                              answer = *known;
                          });
    return !answered || *answer;
}

void device::ask_ahead(const std::vector<op_question> & questions) noexcept {
    attempt([&] {
        for (const op_question & question : questions) {
            ask(question);
        }
    });
}

// False where somebody has.
bool device::ask(const op_question & question) {
    if (supported_.find(question) != nullptr) {
        return false;
    }
    send(wire::command::supports, {{question.data(), question.size() * sizeof question[0]}});
    supported_.add(question, {});
    asked_.push_back({last_ticket_, question});
    return true;
}

// Whether the next thing that it has to say is the answer to a question, and not that it is done with a run.
bool device::owes_an_answer() const {
    return !asked_.empty() && (runs_.empty() || static_cast<int32_t>(runs_.front() - asked_.front().ticket) > 0);
}

void device::take_answer(const wire::header & head) {
    const auto said = receive_as<uint32_t>(head);
    if (said > 1) {
        throw bad_answer("it sent " + std::to_string(said) + " for whether it computes an op");
    }
    supported_.add(asked_.front().about, said != 0);
    asked_.pop_front();
}

bool device::answers_as_host() const {
    return facts_.device_type == GGML_BACKEND_DEVICE_TYPE_CPU &&
           facts_.self.features >> wire::FEATURE_OPS == ops_key();
}

void device::decline(const ggml_tensor * op, const char * name, int layer) {
    const std::lock_guard lock(mutex_);
    declined_op & found = declined_[ggml_op_desc(op)];
    found.node = found.layers.empty() ? name : found.node;
    found.layers.insert(layer);
}

std::map<std::string, declined_op> device::declined() {
    const std::lock_guard lock(mutex_);
    return declined_;
}

uint64_t device::size_of(const ggml_tensor * tensor) noexcept {
    uint64_t bytes = ggml_nbytes(tensor);
    if (facts_.device_type == GGML_BACKEND_DEVICE_TYPE_CPU || !size_is_uncertain(tensor)) {
        return bytes;
    }
    attempt([&] {
        const op_question question = question_about(tensor);
        if (const uint64_t * known = sizes_.find(question)) {
            bytes = *known;
            return;
        }
        send(wire::command::size, {{question.data(), question.size() * sizeof question[0]}});
        const auto said = receive_as<uint64_t>(await(wire::answer::size, last_ticket_));
        check_size(said, bytes, facts_);
        bytes = said;
        sizes_.add(question, bytes);
    });
    return bytes;
}

remote_buffer_ptr device::alloc(size_t size, ggml_backend_buffer_usage usage) noexcept {
    remote_buffer_ptr buffer;
    attempt([&] {
        if (size > facts_.grant_bytes - allocated_) {
            throw link_error(
                "it has no room for " + in_megabytes(size) + " (" + in_megabytes(facts_.grant_bytes) +
                " were free for this engine)"
            );
        }
        buffer = new_buffer(size, false);
        const wire::alloc request = {buffer->id, static_cast<uint32_t>(usage), size};
        send(wire::command::alloc, {{&request, sizeof request}});
        allocated_ += size;
    });
    return buffer;
}

remote_buffer_ptr
device::attach(const std::vector<wire::attach_entry> & entries, size_t size, const std::string & file) noexcept {
    remote_buffer_ptr buffer;
    attempt([&] {
        buffer = new_buffer(size, true);
        const wire::attach request = {buffer->id, static_cast<uint32_t>(entries.size())};
        wire::file_name name{};
        std::memcpy(name.digest, file.data(), std::min(file.size(), sizeof name.digest));
        send(
            wire::command::attach, {{&request, sizeof request},
                                    {entries.data(), entries.size() * sizeof entries[0]},
                                    {&name, file.empty() ? 0 : sizeof name}}
        );
    });
    return buffer;
}

remote_buffer_ptr device::new_buffer(size_t size, bool attached) {
    auto buffer = std::make_unique<remote_buffer>(this, ++last_buffer_id_, size, attached);
    if (buffer->addresses.base() == nullptr) {
        throw link_error("there are no addresses left for " + in_megabytes(size));
    }
    return buffer;
}

void device::fail(const std::string & reason) noexcept {
    attempt([&] { throw link_error(reason); });
}

void device::free(const remote_buffer & buffer) noexcept {
    attempt([&] {
        const uint32_t id = buffer.id;
        send(wire::command::free, {{&id, sizeof id}});
        allocated_ -= buffer.attached ? 0 : buffer.size;
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

void device::set(
    const remote_buffer & buffer, uint64_t offset, const void * data, size_t size, bool is_weight
) noexcept {
    attempt([&] {
        counters_.weight_bytes += is_weight ? size : 0;
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
                throw bad_answer("its answer has the wrong size");
            }
            link_.receive(static_cast<uint8_t *>(data) + done, count);
        }
    });
}

bool device::vet(const ggml_tensor & tensor, size_t offset, const void * data, size_t size) noexcept {
    return attempt([&] { check_result(tensor, offset, data, size); });
}

void device::copy(const wire::copy & what) noexcept {
    attempt([&] {
        let_go({what.from.buffer_id, what.from.offset, what.from.offset + what.from.size});
        replace({what.to_buffer_id, what.to_offset, what.to_offset + what.from.size});
        send(wire::command::copy, {{&what, sizeof what}});
    });
}

wire::span device::reserve(uint64_t least, uint64_t most) noexcept {
    wire::span granted{};
    attempt([&] {
        const wire::reserve request = {++last_buffer_id_, 0, least, most};
        send(wire::command::reserve, {{&request, sizeof request}});
        const auto said = receive_as<uint64_t>(await(wire::answer::reserve, last_ticket_));
        if (said > most) {
            throw bad_answer("it set aside more than it was asked for");
        }
        granted = {request.buffer_id, 0, 0, said};
    });
    return granted;
}

bool device::lost_states() noexcept {
    attempt([&] { drain(); });
    const std::lock_guard lock(mutex_);
    return states_gone_;
}

void device::copies(
    uint32_t from_buffer, uint32_t to_buffer, const std::vector<wire::copied_range> & ranges
) noexcept {
    attempt([&] {
        constexpr size_t in_a_frame = wire::MAX_FRAME_BYTES / 2 / sizeof(wire::copied_range);
        const wire::copies request = {from_buffer, to_buffer};
        for (size_t done = 0; done < ranges.size(); done += in_a_frame) {
            const size_t count = std::min(in_a_frame, ranges.size() - done);
            send(
                wire::command::copies,
                {{&request, sizeof request}, {ranges.data() + done, count * sizeof ranges[0]}}
            );
        }
    });
}

bool device::push(const wire::span & from, const device & to, uint64_t number) noexcept {
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
        // Means nothing without the graph that follows.
        link_.send_later(static_cast<uint8_t>(wire::command::recv), ++last_ticket_, {{&request, sizeof request}});
    });
}

ggml_status device::compute(const ggml_cgraph * graph) noexcept {
    const bool sent = attempt([&] {
        // Depth is bounded by runs, not by blocking writes: a host that is stuck in a write to one worker
        // while that one waits for another would be a circle.
        while (runs_.size() >= wire::MAX_RUNS_IN_FLIGHT) {
            take_notice(next_header());
        }
        const known_graph * use = announce(graph);
        if (use == nullptr) {
            return;
        }
        std::vector<uint8_t> inputs;
        for (auto entry = held_.begin(); entry != held_.end();) {
            const stretch place = {entry->buffer_id, entry->offset, entry->offset + entry->data.size()};
            const bool read = touches_any(place, use->reads);
            if (read && shadows::is_better_raw(entry->data)) {
                send_piecewise(entry->buffer_id, entry->offset, entry->data.data(), entry->data.size());
            } else if (read) {
                shadows_.encode(*entry, inputs);
            }
            // What the graph writes over is gone; what it neither reads nor writes may be read by the next one.
            entry = read || touches_any(place, use->writes) ? held_.erase(entry) : entry + 1;
        }
        send(wire::command::run, {{&last_key_, sizeof last_key_}, {inputs.data(), inputs.size()}});
        runs_.push_back(last_ticket_);
    });
    return sent ? GGML_STATUS_SUCCESS : GGML_STATUS_FAILED;
}

// Sends the graph unless the worker knows it; its key is `last_key_` then. Null where it has nothing to compute.
const known_graph * device::announce(const ggml_cgraph * graph) {
    if (graph->uid != 0 && graph->uid == last_uid_) {
        return last_graph_;
    }
    std::vector<wire::tensor> table = encode(graph, [this](const ggml_tensor * tensor) {
        ggml_backend_buffer_t buffer = tensor->view_src != nullptr ? tensor->view_src->buffer : tensor->buffer;
        if (buffer == nullptr || tensor->data == nullptr || buffer->buft != &buffer_type) {
            return placed{};
        }
        const auto & memory = *static_cast<remote_buffer *>(buffer->context);
        return placed{memory.id, memory.offset_of(tensor)};
    });
    last_uid_ = graph->uid;
    last_graph_ = nullptr;
    if (table.empty()) {
        return nullptr;
    }
    last_key_ = key_of(table);
    last_graph_ = known_.find(last_key_);
    if (last_graph_ == nullptr) {
        send_graph(table);
        last_graph_ = known_.add(last_key_, std::move(table));
    }
    return last_graph_;
}

// As what differs from the latest graph of its length, where that is shorter.
void device::send_graph(const std::vector<wire::tensor> & table) {
    wire::graph_head head{};
    head.key = last_key_;
    head.count = static_cast<uint32_t>(table.size());
    const size_t size = table.size() * sizeof table[0];
    std::vector<uint8_t> changes;
    if (const wire::graph_key * base = known_.resembling(table.size())) {
        const auto * before = reinterpret_cast<const uint8_t *>(known_.find(*base)->table.data());
        if (encode_delta(before, reinterpret_cast<const uint8_t *>(table.data()), size, changes)) {
            head.base = *base;
            head.has_base = 1;
        }
    }
    if (head.has_base != 0) {
        send(wire::command::graph, {{&head, sizeof head}, {changes.data(), changes.size()}});
    } else {
        send(wire::command::graph, {{&head, sizeof head}, {table.data(), size}});
    }
}

}  // namespace mesh
