#pragma once

// As much of a test framework as we need: named tests, checks that say what failed and where, and an end to
// every test within bounded time.

#include <chrono>
#include <functional>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace check {

// For what takes moments, on a machine that others use, too, and that may stand still meanwhile.
constexpr std::chrono::seconds PATIENCE(60);

struct failure : std::runtime_error {
    using std::runtime_error::runtime_error;
};

struct test {
    const char * name;
    std::function<void()> body;
};

std::vector<test> & all_tests();

struct registered {
    registered(const char * name, std::function<void()> body) {
        all_tests().push_back({name, std::move(body)});
    }
};

[[noreturn]] void fail(const char * file, int line, const std::string & what);

template <typename A, typename B>
void equal(const A & found, const B & expected, const char * text, const char * file, int line) {
    if (!(found == expected)) {
        std::ostringstream what;
        what << text << " is " << found << ", not " << expected;
        fail(file, line, what.str());
    }
}

// Runs `work` in a process of its own and returns its value, 0 to 250. Throws where it failed, crashed or hung.
// Call it before there are threads.
int isolated(const std::function<int()> & work);

// The text of what `work` throws; empty if it does not.
std::string thrown(const std::function<void()> & work);

}  // namespace check

#define CHECK_NAME_(a, b) a##b
#define CHECK_NAME(a, b) CHECK_NAME_(a, b)

#define TEST(name)                                                                                                \
    static void CHECK_NAME(test_, __LINE__)();                                                                    \
    static const check::registered CHECK_NAME(registered_, __LINE__)(name, CHECK_NAME(test_, __LINE__));          \
    static void CHECK_NAME(test_, __LINE__)()

#define CHECK(condition)                                                                                          \
    do {                                                                                                          \
        if (!(condition)) {                                                                                       \
            check::fail(__FILE__, __LINE__, #condition);                                                          \
        }                                                                                                         \
    } while (false)

#define CHECK_EQUAL(found, expected) check::equal(found, expected, #found, __FILE__, __LINE__)

#define CHECK_CONTAINS(text, part)                                                                                \
    do {                                                                                                          \
        const std::string check_text = (text);                                                                    \
        if (check_text.find(part) == std::string::npos) {                                                         \
            check::fail(__FILE__, __LINE__, "\"" + check_text + "\" does not say \"" + (part) + "\"");            \
        }                                                                                                         \
    } while (false)
