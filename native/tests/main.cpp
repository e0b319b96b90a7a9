// Runs all tests, or those whose names contain the argument, each in a process of its own: one that crashes is
// named, and the others still run.

#include "tests/check.h"

#include "ggml.h"

#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <sys/wait.h>
#include <unistd.h>

namespace check {

std::vector<test> & all_tests() {
    static std::vector<test> tests;
    return tests;
}

void fail(const char * file, int line, const std::string & what) {
    throw failure(std::string(file) + ":" + std::to_string(line) + ": " + what);
}

std::string thrown(const std::function<void()> & work) {
    try {
        work();
        return {};
    } catch (const failure &) {
        throw;
    } catch (const std::exception & error) {
        return error.what();
    }
}

}  // namespace check

namespace check {

namespace {

constexpr unsigned TEST_SECONDS = 300;  // one that takes longer hangs; sanitizers on a busy machine are slow
constexpr int FAILED = 251;

[[noreturn]] void run_child(const std::function<int()> & work, int pipe) {
    alarm(TEST_SECONDS);
    int value = FAILED;
    try {
        value = work();
    } catch (const std::exception & error) {
        const std::string what = error.what();
        if (write(pipe, what.data(), what.size()) < 0) {
            std::fprintf(stderr, "%s\n", what.c_str());
        }
    }
    std::fflush(stdout);
    std::exit(value);  // with destructors, and the sanitizers' last words
}

std::string read_all(int pipe) {
    std::string text;
    char piece[256];
    for (ssize_t count = 0; (count = read(pipe, piece, sizeof piece)) > 0;) {
        text.append(piece, static_cast<size_t>(count));
    }
    return text;
}

}  // namespace

int isolated(const std::function<int()> & work) {
    int pipes[2];
    std::fflush(stdout);
    if (pipe(pipes) != 0) {
        throw failure("no pipe");
    }
    const pid_t child = fork();
    if (child == 0) {
        close(pipes[0]);
        run_child(work, pipes[1]);
    }
    close(pipes[1]);
    const std::string what = read_all(pipes[0]);
    int status = 0;
    close(pipes[0]);
    if (child < 0 || waitpid(child, &status, 0) < 0) {
        throw failure("no process");
    }
    if (WIFSIGNALED(status)) {
        throw failure(
            WTERMSIG(status) == SIGALRM ? "it hangs" : "it died of signal " + std::to_string(WTERMSIG(status))
        );
    }
    if (WEXITSTATUS(status) >= FAILED || !what.empty()) {
        throw failure(what.empty() ? "it ended with " + std::to_string(WEXITSTATUS(status)) : what);
    }
    return WEXITSTATUS(status);
}

}  // namespace check

namespace {

bool run(const check::test & test) {
    const auto start = std::chrono::steady_clock::now();
    std::string what;
    try {
        const int value = check::isolated([&] {
            test.body();
            return 0;
        });
        what = value == 0 ? "" : "a sanitizer ended it with " + std::to_string(value);
    } catch (const std::exception & error) {
        what = error.what();
    }
    const std::chrono::duration<double> took = std::chrono::steady_clock::now() - start;
    std::printf(
        "%s %s (%.2f s)%s%s\n", what.empty() ? "ok    " : "FAILED", test.name, took.count(),
        what.empty() ? "" : "\n       ", what.c_str()
    );
    return what.empty();
}

}  // namespace

int main(int argc, char ** argv) {
    ggml_log_set([](ggml_log_level, const char *, void *) {}, nullptr);
    int failed = 0;
    int count = 0;
    for (const check::test & test : check::all_tests()) {
        if (argc < 2 || std::strstr(test.name, argv[1]) != nullptr) {
            ++count;
            failed += run(test) ? 0 : 1;
        }
    }
    std::printf("%d tests, %d failed\n", count, failed);
    return failed == 0 && count > 0 ? 0 : 1;
}
