#pragma once

// Weights that a worker holds: read from its own files, kept between sessions,
// shared by them, and laid out as its device likes them best.

#include "ggml-backend.h"
#include "ggml-cpp.h"

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace mesh {

// A file mapped for reading. The kernel keeps its pages for as long as there is room.
class mapped_file {
  public:
    explicit mapped_file(const std::string & path);
    ~mapped_file();

    mapped_file(const mapped_file &) = delete;
    mapped_file & operator=(const mapped_file &) = delete;

    uint8_t * data() const noexcept {
        return data_;
    }

    size_t size() const noexcept {
        return size_;
    }

  private:
    uint8_t * data_ = nullptr;
    size_t size_ = 0;
};

// One tensor of a model on this machine.
class weight {
  public:
    // `plain_only`: never in a special layout.
    weight(
        ggml_backend_dev_t device, ggml_type type, const int64_t * ne, const uint8_t * bytes,
        bool plain_only = false
    );

    size_t size() const noexcept {
        return size_;
    }

    ggml_type type() const noexcept {
        return type_;
    }

    int64_t elements() const noexcept {
        return ne_[0] * ne_[1] * ne_[2] * ne_[3];
    }

    bool has_shape(const int64_t * ne) const noexcept;

    // Makes it ready to be used, in the layout that products with it will most likely want.
    void settle();

    // To main memory, or to `device`. Nobody may hold it.
    void move(ggml_backend_dev_t device, bool in_main_memory);

    // Gives back what it holds of the device's memory; it is made anew when it is needed.
    void drop();

    // Kept by the store, under its lock: whether its bytes are in the file at all, whether it lies in main memory and not
    // in the device's (move), how many hold it, whether its
    // size is counted, and since when it is idle.
    struct {
        bool there = true;
        bool in_main_memory = false;
        uint32_t holders = 0;
        bool counted = false;
        uint64_t idle_since = 0;
    } residence;

    // The bytes as the file has them, in the device's plain layout.
    const ggml_tensor * plain();

    // The tensor that `node` should multiply with instead of the plain one: in the first of the device's
    // special layouts that takes it, repacked on first use. Null where the plain one is best.
    ggml_tensor * best_for(ggml_tensor * node);

  private:
    struct layout {
        ggml_context_ptr context;
        ggml_backend_buffer_ptr buffer;
        ggml_tensor * tensor = nullptr;
    };

    ggml_backend_dev_t device_;
    ggml_type type_;
    int64_t ne_[4];
    const uint8_t * bytes_;
    size_t size_;
    bool plain_only_;
    std::mutex mutex_;
    layout plain_;
    std::vector<std::pair<ggml_backend_buffer_type_t, layout>> special_;

    ggml_tensor * new_tensor(layout & place) const;
    void advise(int advice) const noexcept;
    bool takes(ggml_backend_buffer_type_t kind, ggml_tensor * node) const;
    bool takes(ggml_tensor * candidate, ggml_tensor * node) const;
};

// The layer that a weight's name begins with; -1 where it is of none.
int layer_of_weight(const std::string & name);

// All tensors of one model, by name.
class model_weights {
  public:
    model_weights(ggml_backend_dev_t device, const std::vector<std::string> & paths);

    // Null where the model has no such tensor.
    weight * find(const std::string & name);

    // Those of layers `first` to `last`, the last one not included.
    std::vector<weight *> layers(int first, int last);

    std::vector<weight *> all();

    const std::map<std::string, std::unique_ptr<weight>> & by_name() const noexcept {
        return weights_;
    }

    // Only those of these names may be used; all of them where there are none.
    void allow(const std::vector<std::string> * names);

    const std::vector<std::string> & paths() const noexcept {
        return paths_;
    }

  private:
    std::vector<std::string> paths_;
    std::vector<std::unique_ptr<mapped_file>> files_;
    std::map<std::string, std::unique_ptr<weight>> weights_;
};

// The headers of files. Throws std::runtime_error where one cannot be read.
std::vector<gguf_context_ptr> open_all(const std::vector<std::string> & paths);

// Names and sizes of tensors: what the host needs to ask for them.
std::map<std::string, uint64_t> tensor_sizes(const std::vector<gguf_context_ptr> & files);

}  // namespace mesh
