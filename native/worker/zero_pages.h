#pragma once

#include <cstddef>
#include <sys/mman.h>

namespace mesh {

// Memory that is all zeros, and takes room only where something has been written to it.
class zero_pages {
  public:
    explicit zero_pages(size_t size) : size_(size) {
        void * base =
            mmap(nullptr, size_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        data_ = base == MAP_FAILED ? nullptr : base;
    }

    ~zero_pages() {
        if (data_ != nullptr) {
            munmap(data_, size_);
        }
    }

    zero_pages(const zero_pages &) = delete;
    zero_pages & operator=(const zero_pages &) = delete;

    // Null where there were no addresses left.
    void * data() const noexcept {
        return data_;
    }

  private:
    size_t size_;
    void * data_;
};

}  // namespace mesh
