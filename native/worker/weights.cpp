#include "worker/weights.h"

#include "gguf.h"

#include <algorithm>
#include <cerrno>
#include <cstdlib>
#include <cstring>
#include <fcntl.h>
#include <iterator>
#include <stdexcept>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

namespace mesh {

namespace {

gguf_context_ptr open_gguf(const std::string & path) {
    gguf_context_ptr file(gguf_init_from_file(path.c_str(), {/* .no_alloc = */ true, /* .ctx = */ nullptr}));
    if (!file) {
        throw std::runtime_error(path + " is not a readable GGUF file");
    }
    return file;
}

std::vector<ggml_backend_buffer_type_t> special_layouts(ggml_backend_dev_t device) {
    std::vector<ggml_backend_buffer_type_t> found;
    auto get_extra = reinterpret_cast<ggml_backend_dev_get_extra_bufts_t>(
        ggml_backend_reg_get_proc_address(ggml_backend_dev_backend_reg(device), "ggml_backend_dev_get_extra_bufts")
    );
    if (get_extra != nullptr) {
        for (ggml_backend_buffer_type_t * kind = get_extra(device); kind != nullptr && *kind != nullptr; ++kind) {
            found.push_back(*kind);
        }
    }
    return found;
}

}  // namespace

mapped_file::mapped_file(const std::string & path) {
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    struct stat facts {};
    if (fd < 0 || fstat(fd, &facts) != 0) {
        const std::string reason = std::strerror(errno);
        if (fd >= 0) {
            close(fd);
        }
        throw std::runtime_error("cannot read " + path + ": " + reason);
    }
    size_ = static_cast<size_t>(facts.st_size);
    void * address = mmap(nullptr, size_, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (address == MAP_FAILED) {
        throw std::runtime_error("cannot map " + path + ": " + std::strerror(errno));
    }
    data_ = static_cast<uint8_t *>(address);
}

mapped_file::~mapped_file() {
    munmap(data_, size_);
}

// --- one weight ---

weight::weight(
    ggml_backend_dev_t device, ggml_type type, const int64_t * ne, const uint8_t * bytes, bool plain_only
)
    : device_(device), type_(type), ne_{ne[0], ne[1], ne[2], ne[3]}, bytes_(bytes),
      size_(ggml_row_size(type, ne[0]) * static_cast<size_t>(ne[1] * ne[2] * ne[3])), plain_only_(plain_only) {}

bool weight::has_shape(const int64_t * ne) const noexcept {
    return std::equal(ne_, ne_ + 4, ne);
}

ggml_tensor * weight::new_tensor(layout & place) const {
    place.context.reset(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
    place.tensor = ggml_new_tensor(place.context.get(), type_, GGML_MAX_DIMS, ne_);
    return place.tensor;
}

const ggml_tensor * weight::plain() {
    const std::lock_guard lock(mutex_);
    if (plain_.tensor != nullptr) {
        return plain_.tensor;
    }
    layout place;
    ggml_tensor * tensor = new_tensor(place);
    // A device that computes in main memory takes the file's pages as they are.
    auto * mapped = const_cast<uint8_t *>(bytes_);
    ggml_backend_dev_props facts{};
    ggml_backend_dev_get_props(device_, &facts);
    if (facts.caps.buffer_from_host_ptr) {
        place.buffer.reset(ggml_backend_dev_buffer_from_host_ptr(device_, mapped, size_, size_));
    }
    if (place.buffer) {
        tensor->buffer = place.buffer.get();
        tensor->data = mapped;
    } else {
        ggml_backend_buffer_type_t kind = ggml_backend_dev_buffer_type(device_);
        place.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(place.context.get(), kind));
        if (!place.buffer) {
            throw std::runtime_error("no memory for a weight of " + std::to_string(size_) + " bytes");
        }
        ggml_backend_tensor_set(tensor, bytes_, 0, size_);
    }
    ggml_backend_buffer_set_usage(place.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
    plain_ = std::move(place);
    return plain_.tensor;
}

// Asks the device with a buffer of no size, before memory is spent.
bool weight::takes(ggml_backend_buffer_type_t kind, ggml_tensor * node) const {
    const ggml_backend_buffer_ptr empty(ggml_backend_buft_alloc_buffer(kind, 0));
    layout place;
    ggml_tensor * tensor = new_tensor(place);
    tensor->buffer = empty.get();
    return takes(tensor, node);
}

bool weight::takes(ggml_tensor * candidate, ggml_tensor * node) const {
    ggml_tensor * before = node->src[0];
    node->src[0] = candidate;
    const bool yes = ggml_backend_dev_supports_op(device_, node);
    node->src[0] = before;
    return yes;
}

ggml_tensor * weight::best_for(ggml_tensor * node) {
    const std::lock_guard lock(mutex_);
    if (plain_only_) {
        return nullptr;
    }
    for (ggml_backend_buffer_type_t kind : special_layouts(device_)) {
        const auto made = std::find_if(special_.begin(), special_.end(), [&](const auto & entry) {
            return entry.first == kind;
        });
        if (made != special_.end()) {
            // Asked again: a layout that suited one node need not suit the next, whose input may be shaped otherwise.
            if (takes(made->second.tensor, node)) {
                return made->second.tensor;
            }
            continue;
        }
        if (!takes(kind, node)) {
            continue;
        }
        layout place;
        new_tensor(place);
        place.buffer.reset(ggml_backend_alloc_ctx_tensors_from_buft(place.context.get(), kind));
        if (!place.buffer) {
            return nullptr;  // slower, but right
        }
        ggml_backend_buffer_set_usage(place.buffer.get(), GGML_BACKEND_BUFFER_USAGE_WEIGHTS);
        ggml_backend_tensor_set(place.tensor, bytes_, 0, size_);
        advise(MADV_DONTNEED);  // the file's own pages are hardly read again
        special_.emplace_back(kind, std::move(place));
        return special_.back().second.tensor;
    }
    return nullptr;
}

namespace {

// A product with `source`, as models make it. Null for weights that nothing is multiplied with.
ggml_tensor * likely_product(ggml_context * context, ggml_tensor * source) {
    if (source->ne[1] == 1 || source->ne[3] != 1) {
        return nullptr;
    }
    if (source->ne[2] == 1) {
        return ggml_mul_mat(context, source, ggml_new_tensor_2d(context, GGML_TYPE_F32, source->ne[0], 1));
    }
    return ggml_mul_mat_id(
        context, source, ggml_new_tensor_3d(context, GGML_TYPE_F32, source->ne[0], 1, 1),
        ggml_new_tensor_2d(context, GGML_TYPE_I32, 1, 1)
    );
}

}  // namespace

void weight::settle() {
    const ggml_context_ptr context(ggml_init({8 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * node = likely_product(context.get(), ggml_new_tensor(context.get(), type_, GGML_MAX_DIMS, ne_));
    if (node != nullptr && best_for(node) != nullptr) {
        return;
    }
    if (plain()->data == bytes_) {
        advise(MADV_WILLNEED);
        // Read once, so that the first token does not wait for the disk.
        constexpr size_t page = 4096;
        for (size_t i = 0; i < size_; i += page) {
            static_cast<void>(*const_cast<const volatile uint8_t *>(bytes_ + i));
        }
    }
}

void weight::move(ggml_backend_dev_t device, bool in_main_memory) {
    drop();
    device_ = device;
    residence.in_main_memory = in_main_memory;
}

void weight::drop() {
    const std::lock_guard lock(mutex_);
    special_.clear();
    plain_ = {};
    advise(MADV_DONTNEED);
}

// On the pages that hold nothing else.
void weight::advise(int advice) const noexcept {
    const auto page = static_cast<size_t>(sysconf(_SC_PAGESIZE));
    const size_t into_page = reinterpret_cast<uintptr_t>(bytes_) % page;
    const size_t skipped = into_page == 0 ? 0 : page - into_page;
    if (size_ >= skipped + page) {
        madvise(const_cast<uint8_t *>(bytes_) + skipped, (size_ - skipped) / page * page, advice);
    }
}

// --- a model ---

int layer_of_weight(const std::string & name) {
    static const std::string PREFIX = "blk.";
    const bool has_one = name.compare(0, PREFIX.size(), PREFIX) == 0;
    return has_one ? static_cast<int>(std::strtol(name.c_str() + PREFIX.size(), nullptr, 10)) : -1;
}

model_weights::model_weights(ggml_backend_dev_t device, const std::vector<std::string> & paths) : paths_(paths) {
    for (const std::string & path : paths) {
        const gguf_context_ptr index = open_gguf(path);
        files_.push_back(std::make_unique<mapped_file>(path));
        const mapped_file & file = *files_.back();
        const size_t data = gguf_get_data_offset(index.get());
        for (int64_t i = 0; i < gguf_get_n_tensors(index.get()); ++i) {
            const size_t offset = data + gguf_get_tensor_offset(index.get(), i);
            const size_t size = gguf_get_tensor_size(index.get(), i);
            if (offset > file.size() || size > file.size() - offset) {
                throw std::runtime_error(path + " is cut short");
            }
            const std::string name = gguf_get_tensor_name(index.get(), i);
            // llama.cpp keeps LoRA adapters as they are: another layout would round otherwise than alone.
            const bool of_adapter = name.find(".lora_") != std::string::npos;
            weights_[name] = std::make_unique<weight>(
                device, gguf_get_tensor_type(index.get(), i), gguf_get_tensor_ne(index.get(), i),
                file.data() + offset, of_adapter
            );
        }
    }
}

weight * model_weights::find(const std::string & name) {
    const auto found = weights_.find(name);
    return found != weights_.end() ? found->second.get() : nullptr;
}

std::vector<weight *> model_weights::layers(int first, int last) {
    std::vector<weight *> found;
    for (const auto & [name, entry] : weights_) {
        const int layer = layer_of_weight(name);
        if (layer >= first && layer < last) {
            found.push_back(entry.get());
        }
    }
    return found;
}

std::vector<weight *> model_weights::all() {
    std::vector<weight *> found;
    for (const auto & entry : weights_) {
        found.push_back(entry.second.get());
    }
    return found;
}

void model_weights::allow(const std::vector<std::string> * names) {
    for (const auto & [name, entry] : weights_) {
        entry->residence.there = names == nullptr || std::find(names->begin(), names->end(), name) != names->end();
    }
}

std::vector<gguf_context_ptr> open_all(const std::vector<std::string> & paths) {
    std::vector<gguf_context_ptr> files;
    std::transform(paths.begin(), paths.end(), std::back_inserter(files), open_gguf);
    return files;
}

std::map<std::string, uint64_t> tensor_sizes(const std::vector<gguf_context_ptr> & files) {
    std::map<std::string, uint64_t> sizes;
    for (const gguf_context_ptr & file : files) {
        for (int64_t i = 0; i < gguf_get_n_tensors(file.get()); ++i) {
            sizes[gguf_get_tensor_name(file.get(), i)] = gguf_get_tensor_size(file.get(), i);
        }
    }
    return sizes;
}

}  // namespace mesh
