#include "worker/worker.h"

#include "ggml-mesh.h"
#include "worker/session.h"

#include "ggml-impl.h"

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <iterator>
#include <new>
#include <stdexcept>

namespace mesh {

namespace {

constexpr uint32_t MAX_SESSIONS = 16;  // hosts of a mesh, and those that are about to greet

}  // namespace

worker::~worker() {
    for (auto & [peer, thread] : receivers_) {
        peer->wire.shut();
        thread.join();
    }
}

void worker::add_peer(uint32_t number, int fd) {
    drop_peer(number);
    auto peer = std::make_shared<peer_link>(number, fd, buffers_);
    const std::lock_guard lock(peers_mutex_);
    peers_[number] = peer;
    receivers_.emplace_back(peer, std::thread([this, peer, number] {
                                receive_pushes(*peer);
                                const std::lock_guard again(peers_mutex_);
                                const auto found = peers_.find(number);
                                if (found != peers_.end() && found->second == peer) {
                                    peers_.erase(found);
                                }
                                peer->ended = true;
                            }));
}

void worker::drop_peer(uint32_t number) {
    decltype(receivers_) over;
    {
        const std::lock_guard lock(peers_mutex_);
        const auto found = peers_.find(number);
        const std::shared_ptr<peer_link> dropped = found == peers_.end() ? nullptr : found->second;
        // Those that ended by themselves, too: nobody else joins their threads.
        const auto kept = std::partition(receivers_.begin(), receivers_.end(), [&](const auto & receiver) {
            return receiver.first != dropped && !receiver.first->ended;
        });
        std::move(kept, receivers_.end(), std::back_inserter(over));
        receivers_.erase(kept, receivers_.end());
        if (dropped != nullptr) {
            peers_.erase(found);
        }
    }
    for (auto & [peer, thread] : over) {
        peer->wire.shut();
        thread.join();
    }
}

std::shared_ptr<peer_link> worker::find_peer(uint32_t number) {
    const std::lock_guard lock(peers_mutex_);
    const auto found = peers_.find(number);
    if (found == peers_.end()) {
        throw std::runtime_error("the link to worker " + std::to_string(number) + " is lost");
    }
    return found->second;
}

void worker::receive_pushes(peer_link & peer) noexcept {
    try {
        for (;; peer.wire.wait_for_more()) {
            const std::lock_guard lock(peer.reading);
            while (peer.wire.readable()) {
                receive_push(peer.wire);
            }
        }
    } catch (const std::exception &) {
        peer.wire.shut();
    }
}

void worker::take_pushes() {
    std::vector<std::shared_ptr<peer_link>> peers;
    {
        const std::lock_guard lock(peers_mutex_);
        for (const auto & entry : peers_) {
            peers.push_back(entry.second);
        }
    }
    for (const std::shared_ptr<peer_link> & peer : peers) {
        const std::unique_lock lock(peer->reading, std::try_to_lock);
        if (!lock) {
            continue;
        }
        try {
            // Once: a peer may send without end, and all that is read has to be taken before its thread sleeps.
            peer->wire.take_arrived();
            while (peer->wire.holds_frame()) {
                receive_push(peer->wire);
            }
        } catch (const std::exception &) {
            peer->wire.shut();
        }
    }
}

void worker::receive_push(link & peer) {
    wire::deliver address{};
    const wire::header head = peer.receive_header();
    if (head.kind != static_cast<uint8_t>(wire::command::deliver) || head.size < sizeof address) {
        throw link_error("it speaks out of turn");
    }
    peer.receive(&address, sizeof address);
    std::vector<uint8_t> data = buffers_.take(head.size - sizeof address);
    peer.receive(data.data(), data.size());
    // A session that is gone, or hoards, loses its pushes; its own link tells its client.
    pushed_.deliver(address.session, address.number, std::move(data));
}

ggml_backend_ptr open_device(ggml_backend_dev_t device, int threads) {
    ggml_backend_ptr backend(ggml_backend_dev_init(device, nullptr));
    if (!backend) {
        throw std::runtime_error("the device cannot be opened");
    }
    auto set_threads = reinterpret_cast<ggml_backend_set_n_threads_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_set_n_threads")
    );
    if (set_threads != nullptr && threads > 0) {
        set_threads(backend.get(), threads);
    }
    return backend;
}

ggml_backend_dev_t cpu_device() {
    return ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU);
}

bool worker::take_seat() {
    if (++sessions_ <= MAX_SESSIONS) {
        return true;
    }
    --sessions_;
    return false;
}

void worker::leave_seat() {
    --sessions_;
}

std::vector<fresh_bytes> fresh_from(const std::vector<placed_input> & inputs) {
    std::vector<fresh_bytes> fresh;
    fresh.reserve(inputs.size());
    for (const placed_input & input : inputs) {
        fresh.push_back({{input.to.data, input.bytes.size(), input.to.buffer}, &input.bytes});
    }
    return fresh;
}

// In the order of the graphs: a device that computes by itself need not be waited for.
void worker::write(const std::vector<placed_input> & inputs) {
    for (const placed_input & input : inputs) {
        if (!input.bytes.empty()) {
            byte_tensor target(input.to, input.bytes.size());
            ggml_backend_tensor_set_async(
                backend_.get(), &target.tensor, input.bytes.data(), 0, input.bytes.size()
            );
        }
    }
}

void worker::compute_nodes(ggml_cgraph * nodes) {
    if (ggml_backend_graph_compute_async(backend_.get(), nodes) != GGML_STATUS_SUCCESS) {
        throw std::runtime_error("the device could not compute a graph");
    }
}

void worker::compute_on_cpu(const cpu_run & run) {
    if (!cpu_memory_ || ggml_backend_buffer_get_size(cpu_memory_.get()) < run.size) {
        cpu_memory_.reset();
        cpu_memory_.reset(ggml_backend_buft_alloc_buffer(ggml_backend_dev_buffer_type(cpu_device()), run.size));
        if (!cpu_memory_) {
            throw std::runtime_error("there is no main memory to compute a graph");
        }
    }
    compute_run(run, cpu_.get(), static_cast<uint8_t *>(ggml_backend_buffer_get_base(cpu_memory_.get())));
}

// A stretch of the graph's nodes: each is the device's, or of a run of the CPU's that lies in it whole.
void worker::compute_piece(const built_graph & graph, ggml_cgraph * piece) {
    if (graph.cpu_runs.empty()) {
        compute_nodes(piece);
        return;
    }
    auto next = static_cast<int>(piece->nodes - graph.graph->nodes);
    const int end = next + piece->n_nodes;
    const auto compute_until = [&](int last) {
        if (next < last) {
            ggml_cgraph between = ggml_graph_view(graph.graph, next, last);
            compute_nodes(&between);
        }
    };
    for (const cpu_run & run : graph.cpu_runs) {
        if (run.first >= next && run.last <= end) {
            compute_until(run.first);
            ggml_backend_synchronize(backend_.get());
            compute_on_cpu(run);
            next = run.last;
        }
    }
    compute_until(end);
}

namespace {

// Nothing that a device still reads or writes is let go before, whatever ends the graph.
struct until_done {
    ggml_backend_t backend;

    ~until_done() {
        ggml_backend_synchronize(backend);
    }
};

// Where the device can be told.
void end_early(ggml_backend_t backend, const std::function<bool()> & is_over) {
    auto set_abort = reinterpret_cast<ggml_backend_set_abort_callback_t>(ggml_backend_reg_get_proc_address(
        ggml_backend_dev_backend_reg(ggml_backend_get_device(backend)), "ggml_backend_set_abort_callback"
    ));
    if (set_abort != nullptr) {
        const auto ask = [](void * question) { return (*static_cast<const std::function<bool()> *>(question))(); };
        set_abort(backend, ask, const_cast<std::function<bool()> *>(&is_over));
    }
}

}  // namespace

void worker::compute(
    built_graph & graph, const std::vector<placed_input> & inputs, const std::function<bool()> & is_over,
    const std::function<void(ggml_backend_t)> & behind
) {
    const std::lock_guard lock(computing_);
    if (!backend_) {
        backend_ = open_device(device_, threads_);
    }
    const std::vector<fresh_bytes> fresh = fresh_from(inputs);
    end_early(backend_.get(), is_over);
    if (!graph.cpu_runs.empty() && !cpu_) {
        cpu_ = open_device(cpu_device(), threads_);
    }
    if (cpu_) {
        end_early(cpu_.get(), is_over);
    }
    try {
        const until_done wait{backend_.get()};
        write(inputs);
        graph.run(
            [&](ggml_cgraph * piece) { compute_piece(graph, piece); }, fresh,
            [this] { ggml_backend_synchronize(backend_.get()); }
        );
        behind(backend_.get());
    } catch (const std::bad_alloc &) {
        // ggml's CPU device has freed its scratch memory and would free it again: these are left alone for good.
        static_cast<void>(backend_.release());
        static_cast<void>(cpu_.release());
        throw std::runtime_error("the device has no memory to compute a graph");
    }
}

}  // namespace mesh

void * ggml_mesh_worker_new(
    const char * device_name, int threads, unsigned long long quota, char * why, size_t why_size
) {
    ggml_backend_dev_t device = ggml_backend_dev_by_name(device_name);
    if (device == nullptr) {
        std::snprintf(why, why_size, "there is no device %s", device_name);
        return nullptr;
    }
    return new mesh::worker(device, threads, quota);
}

void ggml_mesh_worker_use_main_memory(
    void * worker, int (*chosen)(const char * name), int layers, unsigned long long quota
) {
    static_cast<mesh::worker *>(worker)->memory().use_main_memory(chosen, layers, quota);
}

void ggml_mesh_worker_free(void * worker) {
    delete static_cast<mesh::worker *>(worker);
}

int ggml_mesh_worker_add_model(
    void * worker, const char * fingerprint, const char * const * paths, size_t count, char * why, size_t why_size
) {
    try {
        static_cast<mesh::worker *>(worker)->memory().add_model(fingerprint, {paths, paths + count});
        return 0;
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s", error.what());
        return 1;
    }
}

int ggml_mesh_worker_add_part(
    void * worker, const char * fingerprint, const char * const * paths, size_t count, const char * const * names,
    size_t name_count, char * why, size_t why_size
) {
    try {
        const std::vector<std::string> there(names, names + name_count);
        static_cast<mesh::worker *>(worker)->memory().add_model(fingerprint, {paths, paths + count}, &there);
        return 0;
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s", error.what());
        return 1;
    }
}

int ggml_mesh_worker_add_peer(void * worker, unsigned int number, int fd) {
    try {
        static_cast<mesh::worker *>(worker)->add_peer(number, fd);
        return 0;
    } catch (const std::exception &) {
        return 1;
    }
}

void ggml_mesh_worker_drop_peer(void * worker, unsigned int number) {
    static_cast<mesh::worker *>(worker)->drop_peer(number);
}

int ggml_mesh_worker_serve(void * worker, int fd, char * why, size_t why_size) {
    try {
        mesh::serve_session(*static_cast<mesh::worker *>(worker), fd);
        return 0;
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s", error.what());
        return 1;
    }
}

int ggml_mesh_worker_prepare(
    void * worker, const char * fingerprint, int first_layer, int last_layer,
    void (*progress)(unsigned long long done, unsigned long long total), char * why, size_t why_size
) {
    try {
        static_cast<mesh::worker *>(worker)->memory().prepare(
            fingerprint, first_layer, last_layer, [&](uint64_t done, uint64_t total) { progress(done, total); }
        );
        return 0;
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s", error.what());
        return 1;
    }
}

unsigned long long ggml_mesh_worker_unload(void * worker, const char * fingerprint) {
    try {
        return static_cast<mesh::worker *>(worker)->memory().unload(fingerprint);
    } catch (const std::exception &) {
        return 0;  // a model that nobody named holds nothing
    }
}

unsigned long long ggml_mesh_worker_resident(void * worker) {
    return static_cast<mesh::worker *>(worker)->memory().resident();
}

void ggml_mesh_worker_poison(void * worker) {
    static_cast<mesh::worker *>(worker)->poison();
}

int ggml_mesh_worker_lack(void * worker, const char * op) {
    for (uint32_t i = 0; i < GGML_OP_COUNT; ++i) {
        if (std::strcmp(ggml_op_name(static_cast<ggml_op>(i)), op) == 0) {
            static_cast<mesh::worker *>(worker)->lack(i);
            return 0;
        }
    }
    return 1;
}
