// The host's side as ggml sees it: one device per worker, with every slot of ggml's interfaces.

#include "ggml-mesh.h"
#include "hooks/file_mapping.h"
#include "host/device.h"
#include "host/layers.h"
#include "host/loader_questions.h"
#include "host/registry.h"
#include "host/saved_states.h"
#include "rules/validate.h"
#include "worker/weights.h"

#include "ggml-impl.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <map>
#include <set>

namespace mesh {

extern const ggml_backend_buffer_i BUFFER_INTERFACE;

namespace {

// The model that is being loaded, by name.
struct used_model {
    std::string fingerprint;
    bool may_be_sent = false;  // to a worker without the files
    std::map<std::string, uint64_t> sizes;
    std::vector<op_question> questions;  // that the loader is likely to ask about it

    bool holds(ggml_tensor ** tensors, int count) const {
        return !sizes.empty() && std::all_of(tensors, tensors + count, [&](const ggml_tensor * tensor) {
            const auto found = sizes.find(ggml_get_name(tensor));
            return tensor->view_src != nullptr || (found != sizes.end() && found->second == ggml_nbytes(tensor));
        });
    }
};

used_model & model() {
    static used_model current;
    return current;
}

// A LoRA adapter that is loaded with it. Adapters may have tensors of the same names and sizes: llama.cpp loads
// them one after the other, and so each device is asked for them in this order.
struct used_adapter {
    used_model file;
    std::set<const device *> attached;
};

std::vector<used_adapter> & adapters() {
    static std::vector<used_adapter> all;
    return all;
}

// Whose tensors these are; null if no adapter's.
used_adapter * adapter_of(const device & owner, ggml_tensor ** tensors, int count) {
    const auto found = std::find_if(adapters().begin(), adapters().end(), [&](const used_adapter & each) {
        return each.attached.count(&owner) == 0 && each.file.holds(tensors, count);
    });
    return found != adapters().end() ? &*found : nullptr;
}

// Set once the model is loaded. Until then nobody catches what a read throws, and nothing that is read
// becomes a token.
std::atomic<bool> & serving() {
    static std::atomic<bool> yes{false};
    return yes;
}

remote_buffer & remote(ggml_backend_buffer_t buffer) {
    return *static_cast<remote_buffer *>(buffer->context);
}

device & device_of(ggml_backend_dev_t dev) {
    return *static_cast<device *>(dev->context);
}

device & device_of(ggml_backend_t backend) {
    return *static_cast<device *>(backend->context);
}

void buffer_free(ggml_backend_buffer_t buffer) {
    const std::unique_ptr<remote_buffer> owned(&remote(buffer));
    states().forget(owned->owner, owned->id);
    owned->owner->free(*owned);
}

void * buffer_get_base(ggml_backend_buffer_t buffer) {
    return remote(buffer).addresses.base();
}

void buffer_memset_tensor(
    ggml_backend_buffer_t buffer, ggml_tensor * tensor, uint8_t value, size_t offset, size_t size
) {
    const remote_buffer & memory = remote(buffer);
    memory.owner->clear({memory.id, 0, memory.offset_of(tensor) + offset, size}, value);
}

void buffer_set_tensor(
    ggml_backend_buffer_t buffer, ggml_tensor * tensor, const void * data, size_t offset, size_t size
) {
    const remote_buffer & memory = remote(buffer);
    if (memory.attached) {
        return;  // the worker has read them itself; `data` is not even looked at, so that no page of it is loaded
    }
    const uint64_t at = memory.offset_of(tensor) + offset;
    if (buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE) {
        memory.owner->hold(memory, at, data, size);
    } else if (!state_capture::note(memory, at, data, size)) {
        memory.owner->set(memory, at, data, size, buffer->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    }
}

void buffer_get_tensor(
    ggml_backend_buffer_t buffer, const ggml_tensor * tensor, void * data, size_t offset, size_t size
) {
    const remote_buffer & memory = remote(buffer);
    const bool is_result = buffer->usage == GGML_BACKEND_BUFFER_USAGE_COMPUTE;
    if (!is_result && state_capture::note(memory, memory.offset_of(tensor) + offset, data, size)) {
        return;
    }
    if (memory.owner->get(memory, memory.offset_of(tensor) + offset, data, size) &&
        (!is_result || memory.owner->vet(*tensor, offset, data, size))) {
        return;
    }
    fill_harmless(*tensor, offset, data, size);
    if (is_result && serving()) {
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
    to.owner->copy({{from.id, 0, from.offset_of(src), ggml_nbytes(src)}, to.id, 0, to.offset_of(dst)});
    return true;
}

void buffer_clear(ggml_backend_buffer_t buffer, uint8_t value) {
    const remote_buffer & memory = remote(buffer);
    memory.owner->clear({memory.id, 0, 0, buffer->size}, value);
}

const char * type_get_name(ggml_backend_buffer_type_t type) {
    return device_of(type->device).name().c_str();
}

// A ggml buffer of `size` over memory on the worker; null where there is none.
ggml_backend_buffer_t wrapped(ggml_backend_buffer_type_t type, remote_buffer_ptr && memory, size_t size) {
    return memory ? ggml_backend_buffer_init(type, BUFFER_INTERFACE, memory.release(), size) : nullptr;
}

ggml_backend_buffer_t type_alloc_buffer(ggml_backend_buffer_type_t type, size_t size) {
    // Without tensors: it is for graphs.
    return wrapped(type, device_of(type->device).alloc(size, GGML_BACKEND_BUFFER_USAGE_COMPUTE), size);
}

// Addresses for a list of tensors, one after the other.
class layout_plan {
  public:
    layout_plan(device & owner, ggml_tensor ** tensors, int count) {
        for (int i = 0; i < count; ++i) {
            offsets_.push_back(size_);
            if (tensors[i]->data == nullptr && tensors[i]->view_src == nullptr) {
                size_ += GGML_PAD(owner.size_of(tensors[i]), owner.facts().alignment);
            }
            if (size_ < offsets_.back()) {
                owner.fail("it sent sizes that no memory has");
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
    const layout_plan plan(owner, tensors, count);
    const bool weights = model().holds(tensors, count);
    if (weights) {
        note_layers(&owner, tensors, count);
    }
    if (weights && !owner.has_model() && !model().may_be_sent) {
        owner.fail("it has no copy of the model " + model().fingerprint);
    }
    used_adapter * adapter = weights ? nullptr : adapter_of(owner, tensors, count);
    remote_buffer_ptr memory;
    if (adapter != nullptr && !model().may_be_sent) {
        adapter->attached.insert(&owner);
        if (!owner.knows_adapters()) {
            owner.fail("its mesh-llm is too old for LoRA adapters");
        }
        memory = owner.attach(attach_entries(tensors, count, plan), plan.size(), adapter->file.fingerprint);
    } else if (weights && owner.has_model()) {
        memory = owner.attach(attach_entries(tensors, count, plan), plan.size());
    } else {
        memory = owner.alloc(plan.size(), GGML_BACKEND_BUFFER_USAGE_ANY);
    }
    ggml_backend_buffer_t buffer = wrapped(type, std::move(memory), plan.size());
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

size_t type_get_alloc_size(ggml_backend_buffer_type_t type, const ggml_tensor * tensor) {
    return device_of(type->device).size_of(tensor);
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
    if (!from.owner->push({from.id, 0, from.offset_of(src), size}, *to.owner, number)) {
        return false;
    }
    to.owner->recv({to.id, 0, to.offset_of(dst), size}, number);
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
    // Without it llama.cpp would read every weight from the file, also those that nobody looks at.
    props->caps.mmap_support = true;
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

// Whether the node's result, or a weight that it uses, lies on the device: it can be computed nowhere else then.
bool is_bound_to(const ggml_tensor * op, const device & owner) {
    const auto lies_here = [&](const ggml_tensor * tensor) {
        ggml_backend_buffer_t place = buffer_of(tensor);
        return place != nullptr && place->buft == &owner.buffer_type;
    };
    if (lies_here(op)) {
        return true;
    }
    return std::any_of(std::begin(op->src), std::end(op->src), [&](const ggml_tensor * source) {
        return source != nullptr && lies_here(source) &&
               buffer_of(source)->usage == GGML_BACKEND_BUFFER_USAGE_WEIGHTS;
    });
}

int layer_asked_for(const ggml_tensor * op) {
    return scheduled_layers() != nullptr ? scheduled_layers()->of(op) : layer_of(op);
}

// Another device's layer: its nodes are left to that one, or to the host.
bool is_elsewhere(const ggml_tensor * op, const device & asked) {
    const int layer = layer_asked_for(op);
    const bool of_host = layer == HOSTS_LAYER && !op_only_renames(op->op);
    return (of_host || (layer >= 0 && owner_of(layer) != &asked)) && !is_bound_to(op, asked);
}

bool computes(device & worker, const ggml_tensor * op) {
    if (!node_is_allowed(op)) {
        return false;
    }
    if (worker.answers_as_host()) {
        return ggml_backend_dev_supports_op(ggml_backend_dev_by_type(GGML_BACKEND_DEVICE_TYPE_CPU), op);
    }
    return op_only_renames(op->op) || worker.supports(op);
}

// Whether it will have to lie on a device that does not compute it: ggml ends the process over a no.
bool cannot_lie_elsewhere(const ggml_tensor * op, const device & worker) {
    ggml_backend_buffer_t place = buffer_of(op);
    return place != nullptr && place->buft == &worker.buffer_type;
}

bool device_supports_op(ggml_backend_dev_t dev, const ggml_tensor * op) {
    device & worker = device_of(dev);
    const loader_question question(op);
    if (question.op() != nullptr) {
        const bool yes = computes(worker, question.op());
        if (!yes) {
            const char * name = ggml_get_name(question.weight());
            worker.decline(op, name, layer_in(name));
        }
        return yes;
    }
    if (is_elsewhere(op, worker)) {
        return false;
    }
    if (computes(worker, op)) {
        return true;
    }
    if (cannot_lie_elsewhere(op, worker)) {
        worker.fail(
            std::string("it does not compute ") + ggml_op_desc(op) + " (" + ggml_get_name(op) +
            "), whose result has to lie in its memory"
        );
        return true;
    }
    const int layer = layer_asked_for(op);
    if (owner_of(layer) == &worker) {
        worker.decline(op, ggml_get_name(op), layer);
    }
    return false;
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
    /* .get_alloc_size   = */ type_get_alloc_size,
    /* .get_alloc_size_n = */ nullptr,
    /* .is_host          = */ type_is_host,
};

}  // namespace

void ask_ahead(const ggml_cgraph * graph, const graph_layers & layers) {
    for (const auto & each : devices()) {
        if (each->answers_as_host()) {
            continue;
        }
        std::vector<op_question> questions;
        for (int i = 0; i < graph->n_nodes; ++i) {
            const ggml_tensor * node = graph->nodes[i];
            if (owner_of(layers.of(node)) == each.get() && !op_only_renames(node->op) && node_is_allowed(node)) {
                questions.push_back(question_about(node));
            }
        }
        each->ask_ahead(questions);
    }
}

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

int ggml_mesh_connect(const int * fds, const char * const * names, size_t count, char * why, size_t why_size) {
    std::vector<std::unique_ptr<mesh::device>> greeted;
    const char * asked = "";
    try {
        // All are greeted before the first one answers: their ways there and back pass at the same time.
        for (size_t i = 0; i < count; ++i) {
            asked = names[i];
            greeted.push_back(std::make_unique<mesh::device>(fds[i], names[i], mesh::model().fingerprint));
        }
        for (size_t i = 0; i < count; ++i) {
            asked = names[i];
            greeted[i]->be_greeted();
        }
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s: %s", asked, error.what());
        return 1;
    }
    for (auto & connected : greeted) {
        connected->handle.iface = mesh::DEVICE_INTERFACE;
        connected->handle.reg = ggml_mesh_registry();
        connected->handle.context = connected.get();
        connected->buffer_type.iface = mesh::TYPE_INTERFACE;
        connected->buffer_type.device = &connected->handle;
        connected->buffer_type.context = connected.get();
        ggml_backend_device_register(&connected->handle);
        mesh::devices().push_back(std::move(connected));
    }
    mesh::ask_all(mesh::model().questions);
    return 0;
}

int ggml_mesh_use_model(
    const char * fingerprint, const char * const * paths, size_t count, int may_be_sent, char * why,
    size_t why_size
) {
    try {
        const std::vector<gguf_context_ptr> files = mesh::open_all({paths, paths + count});
        mesh::model() = {
            fingerprint, may_be_sent != 0, mesh::tensor_sizes(files), mesh::likely_loader_questions(files)};
        mesh::map_files_sparingly();
        return 0;
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s", error.what());
        return 1;
    }
}

int ggml_mesh_use_adapter(const char * digest, const char * path, char * why, size_t why_size) {
    try {
        mesh::adapters().push_back({{digest, false, mesh::tensor_sizes(mesh::open_all({path})), {}}, {}});
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

int ggml_mesh_declined_op(int index, size_t which, struct ggml_mesh_declined * found) {
    const auto & all = mesh::devices();
    if (index < 0 || static_cast<size_t>(index) >= all.size()) {
        return 1;
    }
    const auto declined = all[static_cast<size_t>(index)]->declined();
    if (which >= declined.size()) {
        return 1;
    }
    const auto & [op, where] = *std::next(declined.begin(), static_cast<std::ptrdiff_t>(which));
    std::snprintf(found->op, sizeof found->op, "%s", op.c_str());
    std::snprintf(found->node, sizeof found->node, "%s", where.node.c_str());
    found->layers = static_cast<unsigned int>(where.layers.size());
    return 0;
}

int ggml_mesh_stage_counters(int index, struct ggml_mesh_stage * counters) {
    const auto & all = mesh::devices();
    if (index < 0 || static_cast<size_t>(index) >= all.size()) {
        return 1;
    }
    *counters = all[static_cast<size_t>(index)]->counters();
    return 0;
}
