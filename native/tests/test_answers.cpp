// What a worker answers may be anything: the device fails with a sentence, in time, and the process lives.
//
// Most of these are in processes of their own: a client that lost one worker gives up all.

#include "ggml-mesh.h"
#include "host/answers.h"
#include "host/device.h"
#include "host/layers.h"
#include "host/saved_states.h"
#include "tests/check.h"
#include "tests/lying_worker.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <chrono>
#include <limits>

using namespace session;
using namespace std::chrono_literals;

namespace {

using answer = lying_worker::answer;
using command = lying_worker::command;
using facts = mesh::wire::hello_answer;

using sizes = std::vector<uint64_t>;

constexpr uint64_t MOST = std::numeric_limits<uint64_t>::max();

lying_worker::lie about(command kind, const std::function<void(lying_worker &, const mesh::frame &)> & said) {
    return [=](lying_worker & self, const mesh::frame & message) {
        const bool mine = message.head.kind == static_cast<uint8_t>(kind);
        if (mine) {
            said(self, message);
        }
        return mine;
    };
}

template <typename T> lying_worker::lie answers(command to, answer kind, T value) {
    return about(to, [=](lying_worker & self, const mesh::frame & message) {
        self.say(kind, message.head.ticket, value);
    });
}

lying_worker::lie greets(const std::function<void(facts &)> & change) {
    return about(command::hello, [=](lying_worker & self, const mesh::frame & message) {
        facts said = lying_worker::facts_for(message);
        change(said);
        self.say(answer::hello, message.head.ticket, said);
    });
}

void is_one_line(const std::string & text) {
    CHECK(std::all_of(text.begin(), text.end(), [](char sign) { return sign >= ' ' && sign <= '~'; }));
    CHECK(text.size() < 500);
}

// Why the device at the other end of a lying_worker fails, if `deed` makes it; empty if it does not.
std::string failure_of(const lying_worker::lie & lie, const std::function<void(const device &)> & deed) {
    std::string said;
    lying_worker worker(lie);
    const std::string refused = check::thrown([&] {
        const device on(worker.client_fd());
        const std::string thrown = check::thrown([&] { deed(on); });
        said = on.failure();
        CHECK(!said.empty() || thrown.empty());
    });
    is_one_line(refused + said);
    return refused + said;
}

void in_its_own_process(const std::function<void()> & work) {
    check::isolated([&] {
        work();
        return 0;
    });
}

void fails(
    const lying_worker::lie & lie, const std::function<void(const device &)> & deed, const std::string & sentence
) {
    in_its_own_process([&] { CHECK_EQUAL(failure_of(lie, deed), "TEST0: " + sentence); });
}

std::function<void(const device &)> exercises(const char * name) {
    return [=](const device & on) { exercise(on, host::example_named(name)); };
}

void greeting_fails(const std::function<void(facts &)> & change, const std::string & sentence) {
    fails(greets(change), exercises("add"), sentence);
}

}  // namespace

TEST("answers: a worker that says what is true is believed") {
    for (const char * name : {"add", "flash_attn", "mixture", "get_rows q4_k"}) {
        in_its_own_process([&] { CHECK_EQUAL(failure_of(greets([](facts &) {}), exercises(name)), ""); });
    }
}

// --- HELLO ---

TEST("answers: an alignment has to be a power of two, and of a page at most") {
    for (const uint64_t said : sizes{0, 3, 63, 8192, 1ULL << 63, MOST}) {
        greeting_fails([=](facts & f) { f.alignment = said; }, "it sent an alignment of " + std::to_string(said));
    }
    for (const uint64_t said : {1U, 4U, 32U, 4096U}) {
        in_its_own_process([&] {
            CHECK_EQUAL(failure_of(greets([=](facts & f) { f.alignment = said; }), exercises("mixture")), "");
        });
    }
}

TEST("answers: memory has to be of a size that there is, and the grant a part of it") {
    for (const uint64_t said : sizes{(1ULL << 47) + 1, 1ULL << 63, MOST}) {
        greeting_fails(
            [=](facts & f) { f.total_bytes = said; }, "it sent a memory of " + std::to_string(said) + " bytes"
        );
    }
    for (const uint64_t said : sizes{lying_worker::MEMORY + 1, 1ULL << 63, MOST}) {
        greeting_fails(
            [=](facts & f) { f.grant_bytes = said; },
            "it sent a grant of " + std::to_string(said) + " of " + std::to_string(lying_worker::MEMORY) + " bytes"
        );
    }
}

TEST("answers: flags, kinds and tables that do not exist are refused") {
    greeting_fails([](facts & f) { f.device_type = 4; }, "it sent a device of kind 4");
    greeting_fails([](facts & f) { f.device_type = ~0U; }, "it sent a device of kind 4294967295");
    greeting_fails([](facts & f) { f.has_model = 2; }, "it sent 2 for whether it has the model");
    greeting_fails([](facts & f) { f.self.op_count = 1; }, "it sent the tables of another engine");
    greeting_fails([](facts & f) { f.self.type_count = 1; }, "it sent the tables of another engine");
    greeting_fails([](facts & f) { f.self.tensor_size = 1; }, "it sent the tables of another engine");
}

TEST("answers: names reach logs as printable text that ends") {
    in_its_own_process([] {
        const std::string engine = failure_of(
            greets([](facts & f) { std::memset(f.self.engine, '\n', sizeof f.self.engine); }), exercises("add")
        );
        CHECK_CONTAINS(engine, "it runs engine ??????");
    });
    lying_worker worker(greets([](facts & f) {
        std::memset(f.name, 0x1b, sizeof f.name);
        std::memset(f.description, 'a', sizeof f.description);
        std::memcpy(f.description, "GPU\n\x1b[2J\x9b", 9);
    }));
    const device on(worker.client_fd());
    const std::string description = ggml_backend_dev_description(on.handle);
    is_one_line(description);
    CHECK_CONTAINS(description, "GPU??[2J?a");
    CHECK_EQUAL(description.size(), sizeof(facts::description) - 1);
}

TEST("answers: a greeting of another length or kind is refused") {
    const auto says = [](answer kind, size_t size) {
        return about(command::hello, [=](lying_worker & self, const mesh::frame & message) {
            const std::vector<uint8_t> bytes(size, 7);
            self.say(kind, message.head.ticket, bytes.data(), bytes.size());
        });
    };
    for (const size_t size :
         {size_t{0}, sizeof(facts) - 1, sizeof(facts) + 1, size_t{mesh::wire::MAX_FRAME_BYTES}}) {
        fails(says(answer::hello, size), exercises("add"), "it does not speak ggml-mesh");
    }
    for (const answer kind : {answer::data, answer::done, answer::supports, static_cast<answer>(3)}) {
        fails(says(kind, sizeof(facts)), exercises("add"), "it answered what was not asked");
    }
}

// --- SUPPORTS and SIZE ---

namespace {

// Asks about an op whose result may lie anywhere, or in the worker's memory.
void ask_about(const device & on, bool in_its_memory) {
    const ggml_context_ptr context(ggml_init({16 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * cache = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, 8, 6);
    const ggml_backend_buffer_ptr buffer(
        in_its_memory
            ? ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_dev_buffer_type(on.handle))
            : nullptr
    );
    ggml_tensor * rows = ggml_new_tensor_2d(context.get(), GGML_TYPE_F32, 8, 2);
    ggml_tensor * ids = ggml_new_tensor_1d(context.get(), GGML_TYPE_I64, 2);
    ggml_tensor * op = ggml_set_rows(context.get(), cache, rows, ids);
    const bool computes = ggml_backend_dev_supports_op(on.handle, op);
    // A no of a device that failed would end the process, where ggml cannot do without it.
    CHECK_EQUAL(computes, !on.failure().empty());
}

}  // namespace

TEST("answers: whether it computes an op is yes or no") {
    const auto asks = [](const device & on) { ask_about(on, false); };
    fails(
        answers(command::supports, answer::supports, uint32_t{2}), asks, "it sent 2 for whether it computes an op"
    );
    fails(answers(command::supports, answer::supports, uint64_t{1}), asks, "its answer has the wrong size");
    fails(answers(command::supports, answer::supports, uint8_t{1}), asks, "its answer has the wrong size");
    fails(answers(command::supports, answer::size, uint32_t{1}), asks, "it answered what was not asked");
    in_its_own_process([&] {
        CHECK_EQUAL(failure_of(answers(command::supports, answer::supports, uint32_t{0}), asks), "");
    });
}

TEST("answers: what the scheduler is going to ask is asked at once") {
    std::atomic<size_t> asked{0};
    std::vector<uint32_t> open;
    // It says nothing before it has heard all three questions.
    const auto patient = about(command::supports, [&](lying_worker & self, const mesh::frame & message) {
        open.push_back(message.head.ticket);
        if (++asked == 3) {
            for (const uint32_t ticket : open) {
                self.say(answer::supports, ticket, uint32_t{1});
            }
        }
    });
    const auto asks = [&](const device & on) {
        const ggml_context_ptr context(ggml_init({1 << 20, nullptr, true}));
        ggml_context * c = context.get();
        ggml_tensor * weight = ggml_set_name(ggml_new_tensor_1d(c, GGML_TYPE_F32, 8), "blk.0.weight");
        mesh::note_layers(mesh::devices().back().get(), &weight, 1);
        ggml_tensor * sum = ggml_add(c, ggml_new_tensor_1d(c, GGML_TYPE_F32, 8), weight);
        ggml_tensor * twice = ggml_add(c, sum, weight);
        ggml_tensor * product = ggml_mul(c, twice, weight);
        ggml_cgraph * graph = ggml_new_graph(c);
        ggml_build_forward_expand(graph, ggml_silu(c, product));
        mesh::ask_ahead(graph, mesh::graph_layers(graph));
        CHECK(ggml_backend_dev_supports_op(on.handle, sum) && ggml_backend_dev_supports_op(on.handle, product));
        CHECK_EQUAL(asked.load(), 3U);
    };
    in_its_own_process([&] { CHECK_EQUAL(failure_of(patient, asks), ""); });
}

TEST("answers: what was asked ahead is answered in turn") {
    const auto asks_ahead = [](const char * then) {
        return [=](const device & on) {
            const ggml_context_ptr context(ggml_init({1 << 20, nullptr, true}));
            ggml_tensor * row = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 8);
            mesh::ask_all(
                {mesh::question_about(ggml_sqr(context.get(), row)),
                 mesh::question_about(ggml_sqrt(context.get(), row))}
            );
            exercise(on, host::example_named(then));
        };
    };
    std::atomic<size_t> asked{0};
    const auto leaves_out_the_first =
        about(command::supports, [&](lying_worker & self, const mesh::frame & message) {
            if (++asked > 1) {
                self.say(answer::supports, message.head.ticket, uint32_t{1});
            }
        });
    const auto says_nothing = about(command::supports, [](lying_worker &, const mesh::frame &) {});
    in_its_own_process([&] { CHECK_EQUAL(failure_of(greets([](facts &) {}), asks_ahead("add")), ""); });
    fails(leaves_out_the_first, asks_ahead("add"), "it answered what was not asked");
    fails(says_nothing, asks_ahead("add"), "it answered what was not asked");
    fails(says_nothing, asks_ahead("flash_attn"), "it left out an answer");
}

TEST("answers: it cannot refuse to write to its own memory, which ggml counts on") {
    fails(
        answers(command::supports, answer::supports, uint32_t{0}), [](const device & on) { ask_about(on, true); },
        "it does not compute SET_ROWS ( (view)), whose result has to lie in its memory"
    );
}

TEST("answers: a tensor takes what it needs at least, and what there is at most") {
    const host::graph here(host::example_named("flash_attn"), ggml_backend_get_default_buffer_type(host::cpu()));
    const uint64_t needed = here.result().size();
    for (const uint64_t said : sizes{0, needed - 1, lying_worker::MEMORY + 1, 1ULL << 63, MOST - 62, MOST}) {
        fails(
            answers(command::size, answer::size, said), exercises("flash_attn"),
            "it sent a size of " + std::to_string(said) + " bytes for a tensor of " + std::to_string(needed)
        );
    }
    fails(
        answers(command::size, answer::size, uint32_t{1}), exercises("flash_attn"), "its answer has the wrong size"
    );
    in_its_own_process([&] {
        CHECK_EQUAL(failure_of(answers(command::size, answer::size, needed + 100), exercises("flash_attn")), "");
    });
    in_its_own_process([&] {
        CHECK_CONTAINS(
            failure_of(answers(command::size, answer::size, lying_worker::MEMORY), exercises("flash_attn")),
            "it has no room for"
        );
    });
}

TEST("answers: a size that was asked for lately is not asked for again, and cannot grow") {
    mesh::size_cache known;
    const auto question = [](uint32_t number) {
        std::vector<mesh::wire::tensor> table(1);
        table[0].op = number;
        return table;
    };
    known.add(question(0), 77);
    for (uint32_t i = 1; i < 20'000; ++i) {
        known.add(question(i), i);
        const uint64_t * first = known.find(question(0));
        CHECK(first != nullptr && *first == 77);
        const uint64_t * last = known.find(question(i));
        CHECK(last != nullptr && *last == i);
    }
    CHECK(known.find(question(1)) == nullptr);  // and not all are kept
}

// --- RESERVE ---

TEST("answers: a worker sets aside no more than it was asked for") {
    const auto asks = [](const device &) { mesh::devices().front()->reserve(10, 1000); };
    fails(
        answers(command::reserve, answer::reserve, uint64_t{1001}), asks, "it set aside more than it was asked for"
    );
    fails(answers(command::reserve, answer::reserve, uint32_t{1}), asks, "its answer has the wrong size");
    in_its_own_process([&] {
        CHECK_EQUAL(failure_of(answers(command::reserve, answer::reserve, uint64_t{1000}), asks), "");
    });
}

TEST("answers: a worker that knows nothing of states keeps none") {
    in_its_own_process([] {
        const auto asks = [](const device &) { CHECK(!mesh::states().keep(4)); };
        CHECK_EQUAL(failure_of(greets([](facts & f) { f.self.features = 0; }), asks), "");
    });
}

// --- RUN and GET ---

TEST("answers: data has the length that was asked for") {
    const auto gives = [](int64_t more) {
        return about(command::get, [=](lying_worker & self, const mesh::frame & message) {
            const auto asked = static_cast<int64_t>(lying_worker::payload<mesh::wire::span>(message).size);
            const std::vector<uint8_t> bytes(static_cast<size_t>(asked + more), 1);
            self.say(answer::data, message.head.ticket, bytes.data(), bytes.size());
        });
    };
    for (const int64_t more : {-1, 1, 60'000'000}) {
        fails(gives(more), exercises("add"), "its answer has the wrong size");
    }
    const auto twisted = about(command::get, [](lying_worker & self, const mesh::frame & message) {
        self.say(answer::data, message.head.ticket + 1, nullptr, 0);
    });
    fails(twisted, exercises("add"), "it answered what was not asked");
    const auto endless = about(command::get, [](lying_worker & self, const mesh::frame & message) {
        mesh::wire::header head{};
        head.kind = static_cast<uint8_t>(answer::data);
        head.ticket = message.head.ticket;
        head.size = MOST;
        self.wire().send(head.kind, head.ticket, {});  // the right kind, and the wrong size
    });
    fails(endless, exercises("add"), "its answer has the wrong size");
}

TEST("answers: a run is done once, in its turn, before what follows it") {
    const auto done = mesh::wire::telemetry{};
    const auto says_done = [=](const std::vector<int> & tickets) {
        return about(command::run, [=](lying_worker & self, const mesh::frame & message) {
            for (const int more : tickets) {
                self.say(answer::done, message.head.ticket + static_cast<uint32_t>(more), done);
            }
        });
    };
    fails(says_done({0, 0}), exercises("add"), "it answered what was not asked");
    fails(says_done({1}), exercises("add"), "it answered what was not asked");
    fails(says_done({-1}), exercises("add"), "it answered what was not asked");
    fails(says_done({}), exercises("add"), "it sent an answer before it was done with a run");
    fails(answers(command::run, answer::done, uint64_t{0}), exercises("add"), "its answer has the wrong size");
}

TEST("answers: what a run cost is believable, and sums do not start again from nothing") {
    const auto costs = [](const std::function<void(mesh::wire::telemetry &)> & change) {
        mesh::wire::telemetry cost{};
        change(cost);
        return answers(command::run, answer::done, cost);
    };
    const std::string year = "it sent a time of more than a year for one run";
    const std::string petabyte = "it sent a count of more than a petabyte for one run";
    for (const uint64_t said : sizes{1ULL << 55, 1ULL << 63, MOST}) {
        fails(costs([=](auto & cost) { cost.compute_ns = said; }), exercises("add"), year);
        fails(costs([=](auto & cost) { cost.wait_ns = said; }), exercises("add"), year);
        fails(costs([=](auto & cost) { cost.bytes_in = said; }), exercises("add"), petabyte);
        fails(costs([=](auto & cost) { cost.bytes_out = said; }), exercises("add"), petabyte);
    }
    fails(
        costs([](auto & cost) { cost.queued = ~0U; }), exercises("add"), "it sent a queue of 4294967295 commands"
    );

    lying_worker worker(costs([](auto & cost) { cost.compute_ns = 300ULL * 24 * 3600 * 1'000'000'000; }));
    const device on(worker.client_fd());
    const host::graph graph(host::example_named("add"), ggml_backend_dev_buffer_type(on.handle));
    const ggml_backend_ptr backend(ggml_backend_dev_init(on.handle, nullptr));
    ggml_mesh_stage before{};
    for (int i = 0; i < 1000; ++i) {
        CHECK(ggml_backend_graph_compute(backend.get(), graph.get()) == GGML_STATUS_SUCCESS);
        CHECK(!graph.result().empty());
        ggml_mesh_stage now{};
        CHECK_EQUAL(ggml_mesh_stage_counters(on.index, &now), 0);
        CHECK(now.compute_ns >= before.compute_ns);
        before = now;
    }
    CHECK_EQUAL(before.compute_ns, MOST);
}

// --- row numbers ---

namespace {

// Answers every GET with these numbers, again and again.
lying_worker::lie gives_numbers(const std::vector<int32_t> & numbers) {
    return about(command::get, [=](lying_worker & self, const mesh::frame & message) {
        std::vector<int32_t> all(lying_worker::payload<mesh::wire::span>(message).size / sizeof(int32_t));
        for (size_t i = 0; i < all.size(); ++i) {
            all[i] = numbers[i % numbers.size()];
        }
        self.say(answer::data, message.head.ticket, all.data(), all.size() * sizeof all[0]);
    });
}

std::vector<int32_t> counted(int32_t count) {
    std::vector<int32_t> numbers;
    for (int32_t i = 0; i < count; ++i) {
        numbers.push_back(i);
    }
    return numbers;
}

}  // namespace

TEST("answers: row numbers for this machine's kernels are within bounds, and different where they have to be") {
    const std::string wrong = "it sent wrong row numbers: ";
    for (const int32_t number :
         {-1, 40, std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()}) {
        for (const char * op : {"argsort", "top_k"}) {
            fails(
                gives_numbers({number}), exercises(op),
                wrong + "row " + std::to_string(number) + " is asked for where there are 40"
            );
        }
    }
    fails(gives_numbers({8}), exercises("argmax"), wrong + "row 8 is asked for where there are 8");
    fails(gives_numbers({3}), exercises("argsort"), wrong + "one expert is asked for twice by one token");
    fails(gives_numbers({0, 1, 2, 1}), exercises("top_k"), wrong + "one expert is asked for twice by one token");
    for (const auto & [op, numbers] :
         {std::pair("argsort", counted(40)), std::pair("top_k", counted(5)), std::pair("argmax", counted(1))}) {
        in_its_own_process([&, name = op, given = numbers] {
            CHECK_EQUAL(failure_of(gives_numbers(given), exercises(name)), "");
        });
    }
}

TEST("answers: row numbers that nobody can check are refused") {
    const host::example sum = {"repeat", [](ggml_context * c) {
                                   return ggml_repeat(
                                       c, ggml_new_tensor_1d(c, GGML_TYPE_I32, 4),
                                       ggml_new_tensor_2d(c, GGML_TYPE_I32, 4, 2)
                                   );
                               }};
    fails(
        gives_numbers({0}), [&](const device & on) { exercise(on, sum); },
        "it sent row numbers of REPEAT, which cannot be checked"
    );
}

TEST("answers: what stands for a result that could not be read does no harm, either") {
    const ggml_context_ptr context(ggml_init({4 * ggml_tensor_overhead(), nullptr, true}));
    ggml_tensor * sorted = ggml_new_tensor_2d(context.get(), GGML_TYPE_I32, 5, 3);
    std::array<int32_t, 15> numbers{};
    mesh::fill_harmless(*sorted, 0, numbers.data(), sizeof numbers);
    for (size_t i = 0; i < numbers.size(); ++i) {
        CHECK_EQUAL(numbers[i], static_cast<int32_t>(i % 5));
    }
    std::array<int32_t, 2> part{};
    mesh::fill_harmless(*sorted, 4 * sizeof(int32_t), part.data(), sizeof part);
    CHECK(part[0] == 4 && part[1] == 0);
}

// --- ERROR ---

TEST("answers: an error is one printable line of bounded length, however it is heard") {
    const std::string text = "no\nroom\r\x1b[31m\x80\xff left";
    const std::string clean = "no?room??[31m?? left";
    for (const command kind : {command::hello, command::alloc, command::graph, command::run, command::get}) {
        const auto complains =
            about(kind, [=](lying_worker & self, const mesh::frame &) { self.say_error(text); });
        fails(complains, exercises("add"), clean);
    }
    // Before the link ends, while nobody asks: found by a write that fails, or by who looks.
    const auto leaves = about(command::alloc, [=](lying_worker & self, const mesh::frame &) {
        self.say_error(text);
        self.wire().shut();
    });
    fails(leaves, exercises("add"), clean);
    const auto shouts = about(command::get, [](lying_worker & self, const mesh::frame &) {
        self.say_error(std::string(mesh::wire::MAX_FRAME_BYTES, '\n'));
    });
    fails(shouts, exercises("add"), std::string(mesh::MAX_ERROR_BYTES, '?'));
}

// --- silence ---

namespace {

void fails_in_time(const lying_worker::lie & lie, const char * part) {
    in_its_own_process([&] {
        mesh::host_patience() = {500ms, 500ms, 500ms};
        const auto start = std::chrono::steady_clock::now();
        CHECK_CONTAINS(failure_of(lie, exercises("add")), part);
        CHECK(std::chrono::steady_clock::now() - start < check::PATIENCE);
    });
}

}  // namespace

TEST("answers: a worker that falls silent is given up") {
    const auto silent = [](lying_worker &, const mesh::frame &) {};
    for (const command kind : {command::hello, command::get}) {
        fails_in_time(about(kind, silent), "it said nothing for 0 s");
    }
    // In the middle of a header, which somebody else finds readable; and of a payload.
    for (const command kind : {command::hello, command::get}) {
        for (const size_t count : {size_t{1}, size_t{15}, size_t{16}, size_t{20}}) {
            const auto stops = about(kind, [=](lying_worker & self, const mesh::frame & message) {
                mesh::wire::header head{};
                head.kind = static_cast<uint8_t>(kind == command::hello ? answer::hello : answer::data);
                head.ticket = message.head.ticket;
                head.size =
                    kind == command::hello ? sizeof(facts) : lying_worker::payload<mesh::wire::span>(message).size;
                std::vector<uint8_t> bytes(sizeof head + 16);
                std::memcpy(bytes.data(), &head, sizeof head);
                self.write_raw(bytes.data(), count);
            });
            fails_in_time(stops, "the other side stands still in the middle of a message");
        }
    }
}

TEST("answers: a worker that takes nothing is given up") {
    in_its_own_process([] {
        mesh::host_patience() = {500ms, 500ms, 500ms};
        std::atomic<bool> over{false};
        const auto deaf = about(command::alloc, [&](lying_worker &, const mesh::frame &) {
            while (!over) {
                std::this_thread::sleep_for(1ms);
            }
        });
        const std::string said = failure_of(deaf, [&](const device & on) {
            const ggml_context_ptr context(ggml_init({4 * ggml_tensor_overhead(), nullptr, true}));
            ggml_tensor * large = ggml_new_tensor_1d(context.get(), GGML_TYPE_F32, 4 << 20);
            const ggml_backend_buffer_ptr buffer(
                ggml_backend_alloc_ctx_tensors_from_buft(context.get(), ggml_backend_dev_buffer_type(on.handle))
            );
            const std::vector<float> zeros(4 << 20);
            ggml_backend_tensor_set(large, zeros.data(), 0, zeros.size() * sizeof zeros[0]);
            over = true;
        });
        CHECK_CONTAINS(said, "the other side stands still in the middle of a message");
    });
}
