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

    // For what is written in long stretches: a page fault for every 2 MB instead of every 4 KB.
    void in_large_pages() {
#ifdef MADV_HUGEPAGE
        if (data_ != nullptr) {
            madvise(data_, size_, MADV_HUGEPAGE);
        }
#endif
    }

    // Null where there were no addresses left.
    void * data() const noexcept {
        return data_;
    }

  private:
    size_t size_;
    void * data_;
};

}  // namespace mesh
