#pragma once

// A model of a few small matrices, as a GGUF file.

#include "ggml.h"

#include <string>
#include <vector>

namespace model {

constexpr const char * FINGERPRINT = "fingerprint";

struct matrix {
    const char * name;
    ggml_type type;
    int64_t ne[3];
};

// Of types and shapes that devices keep in layouts of their own, and of others.
const std::vector<matrix> & matrices();
const matrix & matrix_named(const std::string & name);

ggml_tensor * new_tensor(ggml_context * context, const matrix & shape);
std::vector<uint8_t> bytes_of(const matrix & shape);

void write(const std::string & path);

// A file that is gone when this is.
class temporary_file {
  public:
    temporary_file();
    ~temporary_file();

    temporary_file(const temporary_file &) = delete;
    temporary_file & operator=(const temporary_file &) = delete;

    const std::string & path() const {
        return path_;
    }

  private:
    std::string path_;
};

}  // namespace model
