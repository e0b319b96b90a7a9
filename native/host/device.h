#pragma once

// A worker as the host sees it: a stream of commands, and what has become of them.
//
// Commands are written and forgotten; only reading data back waits. Whatever
// goes wrong on a link is remembered as the device's failure: the graph under
// way and every later one fail with it, and no process ends because of it.

#include "ggml-mesh.h"
#include "host/answers.h"
#include "rules/supports.h"
#include "wire/graph.h"
#include "wire/inputs.h"
#include "wire/link.h"

#include "ggml-backend-impl.h"

#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

namespace mesh {

// A stretch of a worker's memory.
struct stretch {
    uint32_t buffer_id;
    uint64_t begin;
    uint64_t end;

    bool touches(const stretch & other) const {
        return buffer_id == other.buffer_id && begin < other.end && other.begin < end;
    }
};

// A graph that the worker keeps: its table, what it reads without computing it, and what it writes.
struct known_graph {
    std::vector<wire::tensor> table;
    std::vector<stretch> reads;
    std::vector<stretch> writes;
};

// Graphs that the worker keeps, in the order in which they were sent. Both sides forget the oldest one at
// the same moment, so the client always knows what has to be sent.
class known_graphs {
  public:
    // Null where the worker does not know the graph.
    const known_graph * find(const wire::graph_key & key) const;
    const known_graph * add(const wire::graph_key & key, std::vector<wire::tensor> && table);

    // The latest of the same length, which a graph of `count` tensors probably resembles.
    const wire::graph_key * resembling(size_t count) const;

    void clear();

  private:
    std::deque<wire::graph_key> order_;
    std::unordered_map<wire::graph_key, known_graph, key_hash, key_equal> graphs_;
};

// A range of addresses that stands for a worker's memory: llama.cpp does
// arithmetic on it, and touching it is an error that shows at once.
class address_range {
  public:
    explicit address_range(size_t size);
    ~address_range();

    address_range(const address_range &) = delete;
    address_range & operator=(const address_range &) = delete;

    // Null where there were no addresses left.
    uint8_t * base() const noexcept {
        return base_;
    }

  private:
    size_t size_;
    uint8_t * base_;
};

class device;

// What stands behind a ggml buffer on a device.
struct remote_buffer {
    device * owner;
    uint32_t id;
    size_t size;
    address_range addresses;
    bool attached;  // holds weights that the worker has read itself

    remote_buffer(device * holder, uint32_t number, size_t bytes, bool is_attached)
        : owner(holder), id(number), size(bytes), addresses(bytes), attached(is_attached) {}

    uint64_t offset_of(const ggml_tensor * tensor) const {
        return static_cast<uint64_t>(static_cast<const uint8_t *>(tensor->data) - addresses.base());
    }
};

using remote_buffer_ptr = std::unique_ptr<remote_buffer>;

// An op of a worker's own layers that it does not compute, so that the host does.
struct declined_op {
    std::string node;  // the first one, or the weight that the loader left on the host
    std::set<int> layers;
};

// One that the worker has not answered yet.
struct open_question {
    uint32_t ticket;
    op_question about;
};

class device {
  public:
    // Sends a greeting to the worker at the other end of `fd`, which names the model that its layers are of.
    device(int fd, std::string name, const std::string & model);

    // Waits for the answer. Throws link_error.
    void be_greeted();

    // Made by ggml's rules: they live as long as the process.
    ggml_backend_device handle{};
    ggml_backend_buffer_type buffer_type{};

    const std::string & name() const {
        return name_;
    }

    const wire::hello_answer & facts() const {
        return facts_;
    }

    // True where the device has failed: graphs fail then, while ggml ends the process over a no that it did not expect.
    bool supports(const ggml_tensor * op) noexcept;

    // Whether the worker has the host's own CPU code and rules, so that the host knows what it would answer.
    bool answers_as_host() const;

    // Remembers that `name`, of this layer, is not computed over there.
    void decline(const ggml_tensor * op, const char * name, int layer);
    std::map<std::string, declined_op> declined();

    // Asks all of these at once, as far as nobody has asked before, and waits for no answer: one way there and back, and
    // not one for each.
    void ask_ahead(const std::vector<op_question> & questions) noexcept;

    // Bytes that a tensor takes over there.
    uint64_t size_of(const ggml_tensor * tensor) noexcept;

    // Memory of the worker's; null where it surely has none left, which is then the device's failure. That it has
    // none after all shows when the memory is used.
    remote_buffer_ptr alloc(size_t size, ggml_backend_buffer_usage usage) noexcept;

    bool has_model() const {
        return facts_.has_model != 0;
    }

    // Weights that the worker reads itself, of the model that it was greeted with and has.
    // `file`: the digest of a LoRA adapter; without one they are the model's.
    remote_buffer_ptr
    attach(const std::vector<wire::attach_entry> & entries, size_t size, const std::string & file = "") noexcept;

    // Whether the worker can set memory aside for saved states, and copy them there.
    bool keeps_states() const {
        return (facts_.self.features & wire::FEATURE_STATES) != 0;
    }

    bool knows_adapters() const noexcept {
        return (facts_.self.features & wire::FEATURE_ADAPTERS) != 0;
    }

    // Such memory: a buffer of as many bytes as there were; none where the worker has failed.
    wire::span reserve(uint64_t least, uint64_t most) noexcept;
    void copies(uint32_t from_buffer, uint32_t to_buffer, const std::vector<wire::copied_range> & ranges) noexcept;

    // Whether the worker needed that memory for something else. What it has said unasked is read first.
    bool lost_states() noexcept;

    // From outside: why this device is of no use.
    void fail(const std::string & reason) noexcept;

    void free(const remote_buffer & buffer) noexcept;
    void clear(const wire::span & where, uint8_t value) noexcept;
    void
    set(const remote_buffer & buffer, uint64_t offset, const void * data, size_t size, bool is_weight) noexcept;
    void hold(const remote_buffer & buffer, uint64_t offset, const void * data, size_t size) noexcept;
    bool get(const remote_buffer & buffer, uint64_t offset, void * data, size_t size) noexcept;

    // Whether what was read of a graph's result may be used here; the device fails where not.
    bool vet(const ggml_tensor & tensor, size_t offset, const void * data, size_t size) noexcept;

    void copy(const wire::copy & what) noexcept;
    // False where there is no link between the two.
    bool push(const wire::span & from, const device & to, uint64_t number) noexcept;
    void recv(const wire::span & to, uint64_t number) noexcept;
    ggml_status compute(const ggml_cgraph * graph) noexcept;

    void add_peer(const device * other, uint32_t number);

    // Why nothing works any more; empty while all is well. What the worker has said unasked is read first.
    std::string failure() noexcept;

    ggml_mesh_stage counters() noexcept;

  private:
    std::mutex mutex_;
    std::string name_;
    link link_;
    short_waits waits_;  // for answers
    std::string failure_;
    wire::hello_answer facts_{};
    bool greeted_ = false;
    ggml_mesh_stage counters_{};
    bool states_gone_ = false;
    uint32_t last_ticket_ = 0;
    uint32_t last_buffer_id_ = 0;
    uint64_t allocated_ = 0;     // of the grant
    std::deque<uint32_t> runs_;  // tickets of those that are not done, in their order
    uint64_t last_uid_ = 0;
    wire::graph_key last_key_{};
    const known_graph * last_graph_ = nullptr;
    known_graphs known_;
    std::vector<input> held_;  // set, and not sent before a graph reads it
    shadows shadows_;
    support_cache supported_;
    std::deque<open_question> asked_;  // in their order
    std::map<std::string, declined_op> declined_;
    size_cache sizes_;
    std::map<const device *, uint32_t> peers_;

    void send(wire::command kind, std::initializer_list<bytes_view> parts);
    bool ask(const op_question & question);
    bool owes_an_answer() const;
    void take_answer(const wire::header & head);
    wire::header await(wire::answer kind, uint32_t ticket);
    wire::header next_header();
    void take_notice(const wire::header & head);
    void drain();
    bool read_notices() noexcept;
    remote_buffer_ptr new_buffer(size_t size, bool attached);
    std::string last_words(const std::string & otherwise) noexcept;
    template <typename T> T receive_as(const wire::header & head);

    const known_graph * announce(const ggml_cgraph * graph);
    void send_graph(const std::vector<wire::tensor> & table);
    void send_piecewise(uint32_t buffer_id, uint64_t offset, const uint8_t * data, size_t size);
    void let_go(const stretch & wanted);
    void replace(const stretch & fresh);

    // Runs `work` unless the device has failed; turns what it throws into the failure.
    template <typename Work> bool attempt(Work && work) noexcept {
        const std::lock_guard lock(mutex_);
        return failure_.empty() && carry_out(std::forward<Work>(work));
    }

    // The same with the lock held, and no failure so far.
    template <typename Work> bool carry_out(Work && work) noexcept {
        try {
            work();
            return true;
        } catch (const bad_answer & error) {
            failure_ = name_ + ": " + error.what();
        } catch (const std::exception & error) {
            failure_ = name_ + ": " + last_words(error.what());
        }
        link_.shut();
        return false;
    }
};

class graph_layers;

// Asks each worker that is not a CPU about the nodes of its layers, before the scheduler does so one by one.
void ask_ahead(const ggml_cgraph * graph, const graph_layers & layers);

// All of this process; together they are one session.
std::vector<std::unique_ptr<device>> & devices();

// Asks all workers that do not answer as the host does, at the same time, and waits for no answer.
void ask_all(const std::vector<op_question> & questions);

}  // namespace mesh
