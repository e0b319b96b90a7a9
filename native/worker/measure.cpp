// How fast is a device? Multiplies matrices as models have them, laid out as the store lays them out, with one
// column, which is what decoding does to them, and with many, which is what a prompt does. A long prompt also attends
// to all of itself, by other kernels: on a CPU they can be ten times slower. Takes two seconds or so: a first run
// tells how much work the rest of that time has room for.
//
// The same for what one model is made of: matrices of its types and sizes, its attention, its small operations.
// A type without a kernel made for the processor can be five times slower than another one.

#include "ggml-mesh.h"
#include "worker/weights.h"
#include "worker/worker.h"

#include "ggml-alloc.h"
#include "ggml-backend.h"
#include "ggml-cpp.h"
#include "ggml.h"

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <ctime>
#include <exception>
#include <memory>
#include <numeric>
#include <optional>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

namespace {

using std::chrono::steady_clock;
using seconds = std::chrono::duration<double>;

// A weight: mixtures have one for each expert, of which every token uses some.
struct form {
    ggml_type type;
    int64_t width;  // of a row
    int64_t rows;
    int64_t experts = 1;
    int64_t used = 1;

    size_t size() const {
        return ggml_row_size(type, width) * static_cast<size_t>(rows) * static_cast<size_t>(experts);
    }

    // That a token reads.
    double active_bytes() const {
        return static_cast<double>(size()) * static_cast<double>(used) / static_cast<double>(experts);
    }

    double operations() const {
        return 2.0 * static_cast<double>(width) * static_cast<double>(rows) * static_cast<double>(used);
    }
};

// Most files that people run are made of Q4_K, and kernels of small models are mostly overhead.
constexpr form USUAL{GGML_TYPE_Q4_K, 4096, 4096};
constexpr size_t MAX_MATRICES = 28;  // 264 MB, more than the caches of all but a few machines
constexpr size_t MIN_MATRICES = 7;   // 66 MB, more than the caches of a machine that is slow
constexpr int64_t MANY = 512;        // columns of a prompt that llama.cpp computes at once
constexpr int64_t FEW = 64;          // enough for the kernels of prompts
constexpr size_t MAX_PRODUCTS = 8;   // with many columns; their results take memory, too

// Attention as 8B models have it, with a quarter of their heads: each takes its own time.
constexpr int64_t HEAD_WIDTH = 128;
constexpr int64_t HEADS = 8;
constexpr int64_t CACHED_HEADS = 2;
constexpr int64_t DEPTH = 1024;  // tokens that came before

constexpr seconds PREPARING{0.5};  // for all matrices to be laid out
constexpr seconds READING{0.4};
constexpr seconds COMPUTING{0.3};
// Runs are short, and of each the best one counts: on a machine that is busy with other things, too, some of them
// are left alone. Shorter ones would measure how a run starts.
constexpr seconds SHORT_RUN{0.002};
constexpr seconds LONG_RUN{0.025};  // a product that takes longer gets fewer columns
constexpr int MIN_ROUNDS = 2;
constexpr int PATIENCE = 4;     // times as long as usual, if none was left alone so far
constexpr double ALONE = 0.85;  // of the time that threads would have had, had nobody else wanted their cores

constexpr size_t PAGE = 4096;
constexpr const char * CANNOT = "the device cannot multiply such matrices";

// Of what a model is made of there are ten or so: each gets little time.
constexpr size_t SOME_BYTES = 48 << 20;
constexpr size_t MAX_WEIGHTS = 512;
constexpr seconds BRIEFLY{0.04};
constexpr int LITTLE_PATIENCE = 2;
constexpr int64_t MANY_ELEMENTS = 1 << 22;  // of a matrix; a larger one is no faster and no slower
constexpr int64_t MOST_WIDTH = 1 << 20;
constexpr int64_t MOST_EXPERTS = 1024;
constexpr size_t SMALL_OPERATIONS = 48;  // so few that some runs are left alone
constexpr int64_t SMALL_COLUMNS = 64;

struct free_memory {
    void operator()(uint8_t * bytes) const {
        std::free(bytes);
    }
};

using pages = std::unique_ptr<uint8_t, free_memory>;

std::vector<uint8_t> quantised_row(const form & of) {
    std::vector<float> values(static_cast<size_t>(of.width));
    for (size_t i = 0; i < values.size(); ++i) {
        values[i] = std::sin(static_cast<float>(i) * 0.11F);
    }
    const std::vector<float> importance(values.size(), 1.0F);  // some types cannot do without
    std::vector<uint8_t> bytes(ggml_row_size(of.type, of.width));
    ggml_quantize_chunk(of.type, values.data(), bytes.data(), 0, 1, of.width, importance.data());
    return bytes;
}

// A weight in memory of its own instead of a file's: no cache holds it along with the others.
class matrix {
  public:
    matrix(ggml_backend_dev_t device, const form & of, const std::vector<uint8_t> & row)
        : bytes_(new_pages(of.size())), weight_(device, of.type, shape(of).data(), bytes_.get()) {
        for (size_t i = 0; i < of.size(); i += row.size()) {
            std::memcpy(bytes_.get() + i, row.data(), row.size());
        }
        weight_.settle();
    }

    // The tensor that `product` is best computed with.
    ggml_tensor * source_for(ggml_tensor * product) {
        ggml_tensor * better = weight_.best_for(product);
        return better != nullptr ? better : const_cast<ggml_tensor *>(weight_.plain());
    }

    static std::vector<int64_t> shape(const form & of) {
        return {of.width, of.rows, of.experts, 1};
    }

  private:
    pages bytes_;
    mesh::weight weight_;

    static pages new_pages(size_t size) {
        auto * bytes = static_cast<uint8_t *>(std::aligned_alloc(PAGE, (size + PAGE - 1) / PAGE * PAGE));
        if (bytes == nullptr) {
            throw std::runtime_error("no memory for a matrix");
        }
        return pages(bytes);
    }
};

// A run: how long it took, and how many cores it had.
struct timed {
    seconds wall;
    double cores;
};

seconds cpu_time() {
    timespec now{};
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &now);
    return seconds(static_cast<double>(now.tv_sec) + static_cast<double>(now.tv_nsec) * 1e-9);
}

using matrices = std::vector<std::unique_ptr<matrix>>;

// A graph that is computed again and again.
class work {
  public:
    work(ggml_backend_t backend, size_t tensors)
        : backend_(backend),
          context_(ggml_init({tensors * ggml_tensor_overhead() + ggml_graph_overhead(), nullptr, true})),
          graph_(ggml_new_graph(context_.get())) {}

    ggml_context * context() {
        return context_.get();
    }

    // False where the device has no kernel for it; the work is useless then.
    bool add(ggml_tensor * result) {
        ggml_build_forward_expand(graph_, result);
        return ggml_backend_supports_op(backend_, result);
    }

    // Gives all tensors memory. The contents do not matter, as long as they are numbers.
    void settle() {
        buffer_.reset(ggml_backend_alloc_ctx_tensors(context_.get(), backend_));
        if (!buffer_) {
            throw std::runtime_error("no memory for what its speed is measured with");
        }
        ggml_backend_buffer_clear(buffer_.get(), 0);
        for (const auto & [tensor, numbers] : chosen_) {
            ggml_backend_tensor_set(tensor, numbers.data(), 0, ggml_nbytes(tensor));
        }
    }

    // Which experts each column uses: all of them in turn.
    ggml_tensor * choice(const form & of, int64_t columns) {
        ggml_tensor * tensor = ggml_new_tensor_2d(context(), GGML_TYPE_I32, of.used, columns);
        std::vector<int32_t> numbers(static_cast<size_t>(of.used * columns));
        for (size_t i = 0; i < numbers.size(); ++i) {
            numbers[i] = static_cast<int32_t>(i % static_cast<size_t>(of.experts));
        }
        chosen_.emplace_back(tensor, std::move(numbers));
        return tensor;
    }

    timed run() {
        const seconds cpu_before = cpu_time();
        const auto start = steady_clock::now();
        if (ggml_backend_graph_compute(backend_, graph_) != GGML_STATUS_SUCCESS) {
            throw std::runtime_error(CANNOT);
        }
        const seconds wall = steady_clock::now() - start;
        return {wall, (cpu_time() - cpu_before) / wall};
    }

  private:
    ggml_backend_t backend_;
    ggml_context_ptr context_;
    ggml_cgraph * graph_;
    ggml_backend_buffer_ptr buffer_;
    std::vector<std::pair<ggml_tensor *, std::vector<int32_t>>> chosen_;
};

// Products of `count` matrices from the one at `first` on with the same columns.
work products(
    ggml_backend_t backend, const form & of, const matrices & from, size_t first, size_t count, int64_t columns
) {
    work made(backend, count + 2);
    const ggml_context_ptr shapes(ggml_init({2 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * shape = ggml_new_tensor(shapes.get(), of.type, GGML_MAX_DIMS, matrix::shape(of).data());
    const bool mixture = of.experts > 1;
    ggml_tensor * input = mixture ? ggml_new_tensor_3d(made.context(), GGML_TYPE_F32, of.width, of.used, columns)
                                  : ggml_new_tensor_2d(made.context(), GGML_TYPE_F32, of.width, columns);
    ggml_tensor * choice = mixture ? made.choice(of, columns) : nullptr;
    for (size_t i = 0; i < count; ++i) {
        ggml_tensor * product = mixture ? ggml_mul_mat_id(made.context(), shape, input, choice)
                                        : ggml_mul_mat(made.context(), shape, input);
        product->src[0] = from[first + i]->source_for(product);
        if (!made.add(product)) {
            throw std::runtime_error(CANNOT);
        }
    }
    made.settle();
    return made;
}

struct heads {
    int64_t width = HEAD_WIDTH;
    int64_t queries = HEADS;
    int64_t cached = CACHED_HEADS;

    // With each element of a key a product and a sum, and the same for its value.
    double operations() const {
        return 4.0 * static_cast<double>(DEPTH * width * queries);
    }

    double cached_bytes() const {
        return 2.0 * sizeof(ggml_fp16_t) * static_cast<double>(DEPTH * width * cached);
    }
};

// So many tokens attend to all that came before, `count` times; none where the device has no kernel for it. Each time
// has keys and values of its own, as layers do: a processor's cache would hold those of one.
std::optional<work> attention(ggml_backend_t backend, const heads & of, size_t count, int64_t tokens) {
    const auto bytes = static_cast<size_t>(of.cached_bytes());
    const size_t caches = std::clamp<size_t>(SOME_BYTES / bytes, 1, count);
    work made(backend, count + 2 + 2 * caches);
    ggml_context * context = made.context();
    ggml_tensor * queries = ggml_new_tensor_3d(context, GGML_TYPE_F32, of.width, tokens, of.queries);
    ggml_tensor * mask = ggml_new_tensor_2d(context, GGML_TYPE_F16, DEPTH, tokens);
    std::vector<ggml_tensor *> cached;
    for (size_t i = 0; i < 2 * caches; ++i) {
        cached.push_back(ggml_new_tensor_3d(context, GGML_TYPE_F16, of.width, DEPTH, of.cached));
    }
    const float scale = 1.0F / std::sqrt(static_cast<float>(of.width));
    for (size_t i = 0; i < count; ++i) {
        ggml_tensor * keys = cached[2 * (i % caches)];
        ggml_tensor * values = cached[2 * (i % caches) + 1];
        if (!made.add(ggml_flash_attn_ext(context, queries, keys, values, mask, scale, 0.0F, 0.0F))) {
            return std::nullopt;
        }
    }
    made.settle();
    return made;
}

// A layer's small operations, one after the other: norms, factors, sums.
work small_operations(ggml_backend_t backend, int64_t width, int64_t columns) {
    work made(backend, SMALL_OPERATIONS + 2);
    ggml_context * context = made.context();
    ggml_tensor * weight = ggml_new_tensor_1d(context, GGML_TYPE_F32, width);
    ggml_tensor * input = ggml_new_tensor_2d(context, GGML_TYPE_F32, width, columns);
    ggml_tensor * last = input;
    for (size_t i = 0; i < SMALL_OPERATIONS; i += 3) {
        last = ggml_mul(context, ggml_rms_norm(context, last, 1e-5F), weight);
        last = ggml_add(context, last, input);
    }
    if (!made.add(last)) {
        throw std::runtime_error("the device cannot add");
    }
    made.settle();
    return made;
}

struct best_time {
    seconds wall;
    bool left_alone;
};

// The least time that all of them take, one after the other, and whether most of them were left alone then: that is,
// had `cores` for themselves. First runs do not count: they bring in code, pages and clock rates.
best_time best_of(std::vector<work> & all, seconds usually, double cores) {
    const int patience = usually > BRIEFLY ? PATIENCE : LITTLE_PATIENCE;
    std::vector<timed> best(all.size(), {seconds(INFINITY), 0});
    const auto is_left_alone = [&] {
        const auto count = std::count_if(best.begin(), best.end(), [&](const timed & each) {
            return each.cores >= ALONE * cores;
        });
        return 2 * static_cast<size_t>(count) > best.size();
    };
    for (work & each : all) {
        each.run();
    }
    const auto start = steady_clock::now();
    for (int round = 0;; ++round) {
        const seconds spent = steady_clock::now() - start;
        if (round >= MIN_ROUNDS && spent >= usually && (is_left_alone() || spent >= usually * patience)) {
            break;
        }
        for (size_t i = 0; i < all.size(); ++i) {
            const timed found = all[i].run();
            best[i] = found.wall < best[i].wall ? found : best[i];
        }
    }
    const seconds sum =
        std::accumulate(best.begin(), best.end(), seconds(0), [](seconds total, const timed & each) {
            return total + each.wall;
        });
    return {sum, is_left_alone()};
}

best_time best_of(work && one, seconds usually, double cores) {
    std::vector<work> all;
    all.push_back(std::move(one));
    return best_of(all, usually, cores);
}

// How many, each of which takes so long, make one run.
size_t as_many(seconds time, seconds each, size_t most) {
    const double fitting = std::ceil(time / std::max(each, seconds(1e-9)));
    return fitting < static_cast<double>(most) ? static_cast<size_t>(fitting) : most;
}

// How many there is memory for, with as much again left for those who have it now.
size_t affordable(ggml_backend_dev_t device, unsigned long long max_bytes, size_t each, size_t most) {
    size_t free = 0;
    size_t total = 0;
    ggml_backend_dev_memory(device, &free, &total);
    unsigned long long room = max_bytes;
    if (total > 0) {
        room = std::min<unsigned long long>(room, free / 2);
    }
    if (room < each) {
        throw std::runtime_error("there is no memory to measure its speed with");
    }
    return static_cast<size_t>(std::min<unsigned long long>(room / each, most));
}

// A device as it is measured: what it computes with, and how many cores that should keep busy.
struct subject {
    ggml_backend_dev_t device;
    ggml_backend_ptr backend;
    double cores;

    subject(ggml_backend_dev_t which, int threads)
        : device(which), backend(mesh::open_device(which, threads)),
          cores(ggml_backend_dev_type(which) == GGML_BACKEND_DEVICE_TYPE_CPU ? threads : 0) {}
};

void prepare(const subject & on, const form & of, size_t least, size_t most, seconds time, matrices & made) {
    const auto start = steady_clock::now();
    const std::vector<uint8_t> row = quantised_row(of);
    while (made.size() < most && (made.size() < least || steady_clock::now() - start < time)) {
        made.push_back(std::make_unique<matrix>(on.device, of, row));
    }
}

best_time read_all(const subject & on, const form & of, const matrices & made, seconds usually) {
    ggml_backend_t backend = on.backend.get();
    const seconds one = best_of(products(backend, of, made, 0, 1, 1), seconds(0), 0).wall;
    const size_t together = as_many(SHORT_RUN, one, made.size());
    std::vector<work> all;
    for (size_t i = 0; i < made.size(); i += together) {
        all.push_back(products(backend, of, made, i, std::min(together, made.size() - i), 1));
    }
    return best_of(all, usually, on.cores);
}

struct rate {
    double per_s;
    bool left_alone;
};

// Operations a second, in work that `make(count, columns)` makes and of which each column takes so many.
template <typename Make>
rate prompt_rate(const subject & on, Make make, size_t most, double operations, seconds usually) {
    const best_time few = best_of(make(1, FEW), seconds(0), on.cores);
    const seconds column = few.wall / FEW;
    int64_t columns = MANY;
    while (columns > FEW && column * columns > LONG_RUN) {
        columns /= 2;
    }
    if (column * columns > LONG_RUN && usually <= BRIEFLY) {
        return {operations / column.count(), few.left_alone};
    }
    const size_t count = as_many(SHORT_RUN, column * columns, most);
    const best_time best = best_of(make(count, columns), usually, on.cores);
    return {
        operations * static_cast<double>(columns) * static_cast<double>(count) / best.wall.count(),
        best.left_alone};
}

rate multiply(const subject & on, const form & of, const matrices & made, seconds usually) {
    const auto make = [&](size_t count, int64_t columns) {
        return products(on.backend.get(), of, made, 0, count, columns);
    };
    return prompt_rate(on, make, std::min(MAX_PRODUCTS, made.size()), of.operations(), usually);
}

// None where attention is made of products, as it is without a kernel of its own.
std::optional<rate> attend(const subject & on, const heads & of, seconds usually) {
    if (!attention(on.backend.get(), of, 1, FEW)) {
        return std::nullopt;
    }
    const auto make = [&](size_t count, int64_t tokens) {
        return attention(on.backend.get(), of, count, tokens).value();
    };
    return prompt_rate(on, make, MAX_PRODUCTS, of.operations(), usually);
}

ggml_mesh_speed speed_of(const subject & on, const matrices & made) {
    const best_time reading = read_all(on, USUAL, made, READING);
    const rate multiplying = multiply(on, USUAL, made, COMPUTING);
    const rate attending = attend(on, heads(), COMPUTING).value_or(multiplying);
    return {
        static_cast<double>(USUAL.size() * made.size()) / reading.wall.count(),
        multiplying.per_s,
        attending.per_s,
        reading.left_alone && multiplying.left_alone && attending.left_alone ? 0 : 1,
    };
}

ggml_backend_dev_t device_named(const char * name) {
    ggml_backend_dev_t device = ggml_backend_dev_by_name(name);
    if (device == nullptr) {
        throw std::runtime_error(std::string("there is no device ") + name);
    }
    return device;
}

ggml_mesh_speed measure(const char * name, int threads, unsigned long long max_bytes) {
    ggml_backend_dev_t device = device_named(name);
    const subject whole(device, threads);
    matrices made;
    const size_t most = affordable(device, max_bytes, USUAL.size(), MAX_MATRICES);
    prepare(whole, USUAL, MIN_MATRICES, most, PREPARING, made);
    ggml_mesh_speed speed = speed_of(whole, made);
    if (speed.disturbed != 0 && threads > 1) {
        // Threads that wait for one that has lost its core can be much slower than one thread alone.
        const ggml_mesh_speed one = speed_of(subject(device, 1), made);
        speed.read_bytes_per_s = std::max(speed.read_bytes_per_s, one.read_bytes_per_s);
        speed.flops_per_s = std::max(speed.flops_per_s, one.flops_per_s);
        speed.attention_per_s = std::max(speed.attention_per_s, one.attention_per_s);
    }
    return speed;
}

// --- what one model is made of ---

ggml_type type_named(const std::string & name) {
    for (int i = 0; i < GGML_TYPE_COUNT; ++i) {
        const auto type = static_cast<ggml_type>(i);
        const char * called = ggml_type_name(type);
        if (called != nullptr && name == called && ggml_blck_size(type) > 0) {
            return type;
        }
    }
    throw std::runtime_error("there is no type " + name);
}

ggml_mesh_shape_speed weights_speed(const subject & on, const form & of, unsigned long long max_bytes) {
    if (of.width % ggml_blck_size(of.type) != 0 || of.used > of.experts) {
        throw std::runtime_error("no weight has such a shape");
    }
    const size_t wanted = std::max<size_t>(1, std::min(MAX_WEIGHTS, SOME_BYTES / of.size()));
    const size_t most = affordable(on.device, max_bytes, of.size(), wanted);
    matrices made;
    prepare(on, of, 1, most, BRIEFLY * LITTLE_PATIENCE, made);
    const best_time reading = read_all(on, of, made, BRIEFLY);
    const rate multiplying = multiply(on, of, made, BRIEFLY);
    return {
        of.active_bytes() * static_cast<double>(made.size()) / reading.wall.count(),
        multiplying.per_s,
        reading.left_alone && multiplying.left_alone ? 0 : 1,
    };
}

ggml_mesh_shape_speed attention_speed(const subject & on, const heads & of) {
    const std::optional<rate> prompt = attend(on, of, BRIEFLY);
    if (!prompt) {
        throw std::runtime_error("the device has no kernel for attention");
    }
    ggml_backend_t backend = on.backend.get();
    const seconds one = best_of(attention(backend, of, 1, 1).value(), seconds(0), 0).wall;
    // No fewer than a processor's cache cannot hold.
    const size_t least = std::max<size_t>(1, SOME_BYTES / 2 / static_cast<size_t>(of.cached_bytes()));
    const size_t count =
        std::clamp(as_many(SHORT_RUN, one, MAX_WEIGHTS), std::min(least, MAX_WEIGHTS), MAX_WEIGHTS);
    const best_time token = best_of(attention(backend, of, count, 1).value(), BRIEFLY, on.cores);
    return {
        of.cached_bytes() * static_cast<double>(count) / token.wall.count(),
        prompt->per_s,
        prompt->left_alone && token.left_alone ? 0 : 1,
    };
}

ggml_mesh_shape_speed operations_speed(const subject & on, int64_t width) {
    const best_time one = best_of(small_operations(on.backend.get(), width, 1), BRIEFLY, on.cores);
    const best_time many = best_of(small_operations(on.backend.get(), width, SMALL_COLUMNS), BRIEFLY, on.cores);
    const double elements = static_cast<double>(SMALL_OPERATIONS) * static_cast<double>(width);
    return {
        elements * sizeof(float) / one.wall.count(),
        elements * static_cast<double>(SMALL_COLUMNS) / many.wall.count(),
        one.left_alone && many.left_alone ? 0 : 1,
    };
}

ggml_mesh_shape_speed
measure_shape(const char * name, int threads, unsigned long long max_bytes, const ggml_mesh_shape & shape) {
    const auto is_size = [](int64_t number, int64_t most) { return number > 0 && number <= most; };
    if (!is_size(shape.width, MOST_WIDTH) || !is_size(shape.rows, MOST_WIDTH) ||
        !is_size(shape.experts, MOST_EXPERTS) || !is_size(shape.used, MOST_EXPERTS)) {
        throw std::runtime_error("no weight has such a shape");
    }
    const subject on(device_named(name), threads);
    const std::string kind(shape.kind);
    if (kind == "attention") {
        return attention_speed(on, {shape.width, shape.used, shape.rows});
    }
    if (kind == "op") {
        return operations_speed(on, shape.width);
    }
    const int64_t rows = std::min(shape.rows, std::max<int64_t>(64, MANY_ELEMENTS / shape.width / 64 * 64));
    return weights_speed(on, {type_named(kind), shape.width, rows, shape.experts, shape.used}, max_bytes);
}

}  // namespace

int ggml_mesh_measure_shape(
    const char * device_name, int threads, unsigned long long max_bytes, const struct ggml_mesh_shape * shape,
    struct ggml_mesh_shape_speed * speed, char * why, size_t why_size
) {
    try {
        *speed = measure_shape(device_name, threads, max_bytes, *shape);
        return 0;
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s", error.what());
        return 1;
    }
}

int ggml_mesh_measure(
    const char * device_name, int threads, unsigned long long max_bytes, struct ggml_mesh_speed * speed,
    char * why, size_t why_size
) {
    try {
        *speed = measure(device_name, threads, max_bytes);
        return 0;
    } catch (const std::exception & error) {
        std::snprintf(why, why_size, "%s", error.what());
        return 1;
    }
}
