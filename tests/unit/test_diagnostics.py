"""Why an engine died, from lines that engines have left behind."""

from __future__ import annotations

import signal

import pytest

from mesh_llm.engine.diagnostics import Cause, buffer_bytes, explain, printable, redacted, sentence

UNKNOWN_ARCHITECTURE = """\
0.00.003.742 I print_info: file type   = all F32
0.00.003.828 E llama_model_load: error loading model: unknown model architecture: 'lxmax'
0.00.003.835 E llama_model_load_from_file_impl: failed to load model
0.00.003.848 E srv    load_model: failed to load model, '/models/unknown.gguf'
0.00.003.855 I srv    operator(): operator(): cleaning up before exit...
0.00.004.001 E srv          init: exiting due to model loading error
"""
MISSING_TENSOR = """\
0.00.008.615 E llama_model_load: error loading model: check_tensor_dims: tensor 'blk.1.attn_q' not found
0.00.008.617 E llama_model_load_from_file_impl: failed to load model
"""
NO_ROOM = """\
0.00.251.004 E ggml_backend_cpu_buffer_type_alloc_buffer: failed to allocate buffer of size 1099511627776
0.00.251.020 E llama_init_from_model: failed to initialize the context: failed to allocate buffer for kv cache
0.00.251.101 E cmn  common_init_: failed to create context with model '/models/large.gguf'
"""
NO_ROOM_ON_THE_GPU = """\
0.01.100.417 E ggml_backend_cuda: allocating 9216.00 MiB on device 0: cudaMalloc failed: out of memory
0.01.100.502 E llama_model_load: error loading model: unable to allocate CUDA0 buffer
"""
ASSERTION = """\
0.07.310.118 I slot launch_slot_: id  0 | task 12 | processing task
/src/ggml/src/ggml.c:3150: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed
[New LWP 4242]
"""
UNCAUGHT = """\
terminate called after throwing an instance of 'std::runtime_error'
  what():  Invalid diff
"""
PORT_TAKEN = """\
0.00.590.311 E srv         start: couldn't bind HTTP server socket, hostname: 127.0.0.1, port: 8080
0.00.590.402 E srv          init: exiting due to HTTP server error
"""


@pytest.mark.parametrize(
    ("status", "log", "cause", "sentence"),
    [
        (
            1,
            UNKNOWN_ARCHITECTURE,
            Cause.BAD_MODEL,
            "the engine cannot load this model (unknown model architecture: 'lxmax')",
        ),
        (
            1,
            MISSING_TENSOR,
            Cause.BAD_MODEL,
            "the engine cannot load this model (check_tensor_dims: tensor 'blk.1.attn_q' not found)",
        ),
        (
            1,
            NO_ROOM,
            Cause.OUT_OF_MEMORY,
            "the engine ran out of memory (llama_init_from_model: failed to initialize the context: "
            "failed to allocate buffer for kv cache)",
        ),
        (
            1,
            NO_ROOM_ON_THE_GPU,
            Cause.OUT_OF_MEMORY,
            "the engine ran out of memory (llama_model_load: error loading model: "
            "unable to allocate CUDA0 buffer)",
        ),
        (
            -signal.SIGABRT,
            ASSERTION,
            Cause.ABORT,
            "the engine aborted (/src/ggml/src/ggml.c:3150: GGML_ASSERT(ggml_can_mul_mat(a, b)) failed)",
        ),
        (-signal.SIGABRT, UNCAUGHT, Cause.ABORT, "the engine aborted (what():  Invalid diff)"),
        (-signal.SIGABRT, "", Cause.ABORT, "the engine aborted (it left no message)"),
        (1, PORT_TAKEN, Cause.PORT, "the engine could not open a port on 127.0.0.1"),
        (-signal.SIGKILL, "", Cause.SIGNAL, "the engine was killed (SIGKILL)"),
        (-signal.SIGSEGV, "", Cause.SIGNAL, "the engine crashed (SIGSEGV)"),
        (
            -signal.SIGILL,
            "",
            Cause.SIGNAL,
            "the engine met an instruction that this CPU lacks (SIGILL)",
        ),
        (-63, "", Cause.SIGNAL, "the engine crashed (signal 63)"),
        (3, "", Cause.EXIT, "the engine ended: exit status 3"),
        (3, "0.00.000.001 E something odd\n", Cause.EXIT, "the engine ended: something odd"),
    ],
)
def test_every_cause_has_its_sentence(status: int, log: str, cause: Cause, sentence: str) -> None:
    death = explain(status=status, failed=None, lines=log.splitlines(), oom_killed=False)

    assert (death.cause, death.sentence) == (cause, sentence)
    assert death.hopeless is (cause is Cause.BAD_MODEL)


def test_a_kill_for_want_of_memory_is_told_from_others() -> None:
    death = explain(status=-signal.SIGKILL, failed=None, lines=[], oom_killed=True)

    assert death.cause is Cause.OUT_OF_MEMORY
    assert death.sentence == "the engine was killed by the kernel: the machine ran out of memory"


def test_somebody_elses_end_for_want_of_memory_is_not_ours() -> None:
    assert explain(status=0, failed=None, lines=[], oom_killed=True).cause is Cause.EXIT


def test_the_childs_own_word_counts_where_the_log_has_no_better() -> None:
    death = explain(
        status=1, failed="cannot load libggml-cpu.so", lines=["0.00.000.001 I hello"], oom_killed=False
    )

    assert death.sentence == "the engine ended: cannot load libggml-cpu.so"


def test_evidence_is_the_last_lines_without_their_stamps() -> None:
    lines = [f"0.00.000.{index:03d} I line {index}" for index in range(20)]

    death = explain(status=1, failed=None, lines=lines, oom_killed=False)

    assert death.evidence == tuple(f"line {index}" for index in range(12, 20))


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("0.00.591.899 I llama_context:        CPU  output buffer size =     0.19 MiB", ("output", 199229)),
        ("0.00.592.048 I llama_kv_cache:        CPU KV buffer size =    11.25 MiB", ("KV", 11796480)),
        (
            "0.00.616.320 I sched_reserve:        CPU compute buffer size =    15.14 MiB",
            ("compute", 15875441),
        ),
        ("0.00.254.036 I load_tensors:   CPU_Mapped model buffer size =    92.10 MiB", ("model", 96573850)),
        ("0.00.254.036 I load_tensors: loading model tensors", None),
    ],
)
def test_buffer_sizes_are_read_from_the_log(line: str, found: tuple[str, int] | None) -> None:
    assert buffer_bytes(line) == found


def test_the_key_is_taken_out_of_the_log() -> None:
    line = "0.00.001.000 I srv          init: api_keys: ****fXw_"

    assert redacted(line) == "0.00.001.000 I srv          init: api_keys: …"
    assert redacted("0.00.001.000 I srv  init: listening") == "0.00.001.000 I srv  init: listening"


def test_lines_and_sentences_for_logs() -> None:
    assert printable("plain, and é") == "plain, and é"
    assert printable("a\tb\x1b[2J\x9b\r") == "a b?[2J??"
    assert sentence("MESH0: no\nroom\x00") == "MESH0: no?room?"
    assert len(sentence("x" * 100_000)) == 1000
    assert sentence(None) == "None"
