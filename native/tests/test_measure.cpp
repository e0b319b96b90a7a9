// The measurement of a device's speed: figures that can be, with little memory too, and refusals by name.

#include "ggml-mesh.h"
#include "tests/check.h"

#include <cmath>
#include <string>
#include <sys/resource.h>

namespace {

constexpr unsigned long long LITTLE = 20 << 20;  // two matrices

struct measured {
    int code;
    ggml_mesh_speed speed;
    std::string why;
};

measured measure(const char * device, int threads, unsigned long long max_bytes) {
    char why[256] = "";
    ggml_mesh_speed speed{};
    const int code = ggml_mesh_measure(device, threads, max_bytes, &speed, why, sizeof why);
    return {code, speed, why};
}

int measure_shape(
    const ggml_mesh_shape & shape, unsigned long long max_bytes, ggml_mesh_shape_speed & speed, std::string & why
) {
    char text[256] = "";
    const int code = ggml_mesh_measure_shape("CPU", 1, max_bytes, &shape, &speed, text, sizeof text);
    why = text;
    return code;
}

// A microcontroller is faster, and no machine reaches the other end.
bool is_plausible(double per_second) {
    return std::isfinite(per_second) && per_second > 1e5 && per_second < 1e17;
}

}  // namespace

TEST("measure: a CPU's speed, with one thread and with two") {
    for (const int threads : {1, 2}) {
        const measured found = measure("CPU", threads, LITTLE);
        CHECK_EQUAL(found.why, "");
        CHECK_EQUAL(found.code, 0);
        CHECK(is_plausible(found.speed.read_bytes_per_s));
        CHECK(is_plausible(found.speed.flops_per_s));
        CHECK(is_plausible(found.speed.attention_per_s));
    }
}

#if MESH_PLAIN
TEST("measure: columns share what is read for them") {
    // Each byte of weights is good for more than one column's worth. The two are measured one after the other:
    // a machine that stands still during the second makes it look slow, hardly five times in a row.
    measured found{};
    for (int tries = 5; tries > 0 && found.speed.flops_per_s <= found.speed.read_bytes_per_s; tries--) {
        found = measure("CPU", 1, LITTLE);
    }
    CHECK(found.speed.flops_per_s > found.speed.read_bytes_per_s);
}
#endif

TEST("measure: no more memory than granted, and none without") {
    rusage before{};
    rusage after{};
    getrusage(RUSAGE_SELF, &before);
    CHECK_EQUAL(measure("CPU", 1, LITTLE).code, 0);
    getrusage(RUSAGE_SELF, &after);
    const measured refused = measure("CPU", 1, 1000);
    CHECK_EQUAL(refused.code, 1);
    CHECK_EQUAL(refused.why, "there is no memory to measure its speed with");
#if MESH_PLAIN
    CHECK(after.ru_maxrss - before.ru_maxrss < 100 << 10);  // kilobytes: results and sources beside the weights
#endif
}

TEST("measure: a device that is not there is named") {
    const measured refused = measure("GPU7", 1, LITTLE);
    CHECK_EQUAL(refused.code, 1);
    CHECK_EQUAL(refused.why, "there is no device GPU7");
}

TEST("measure: weights of a model's own types and sizes, its attention, its small operations") {
    const ggml_mesh_shape shapes[] = {
        {"q4_1", 576, 192, 1, 1},   {"q8_0", 256, 64, 8, 2},    {"f16", 96, 40, 1, 1},
        {"iq2_xxs", 256, 64, 1, 1}, {"attention", 64, 3, 1, 9}, {"op", 576, 1, 1, 1},
    };
    for (const ggml_mesh_shape & shape : shapes) {
        ggml_mesh_shape_speed speed{};
        std::string why;
        CHECK_EQUAL(measure_shape(shape, LITTLE, speed, why), 0);
        CHECK_EQUAL(why, "");
        CHECK(is_plausible(speed.read_bytes_per_s));
        CHECK(is_plausible(speed.flops_per_s));
    }
}

TEST("measure: shapes that no model has are refused") {
    const ggml_mesh_shape shapes[] = {
        {"q9_9", 64, 64, 1, 1}, {"q4_0", 63, 64, 1, 1},       {"q4_0", 0, 64, 1, 1},
        {"f16", 64, 64, 2, 3},  {"f16", 1LL << 40, 64, 1, 1}, {"attention", 64, -1, 1, 9},
    };
    for (const ggml_mesh_shape & shape : shapes) {
        ggml_mesh_shape_speed speed{};
        std::string why;
        CHECK_EQUAL(measure_shape(shape, LITTLE, speed, why), 1);
        CHECK(!why.empty());
    }
}
