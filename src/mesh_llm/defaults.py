"""Every port, time and limit of mesh-llm, with its reason. Nothing else lives here."""

from __future__ import annotations

# -- the engine ---------------------------------------------------------------------------------

ENGINE_PACKAGE = "xllamacpp"
ENGINE_VERSION = "2026.10.11549"
"""Pinned exactly: native libraries are compiled against this build's private structs."""
ENGINE_SDIST_SHA256 = "c17ee1163006f70726abb9f72137830818f3d8cb60bfc34cb232d08428eaa22b"
ENGINE_SDIST_ROOT = f"{ENGINE_PACKAGE}-{ENGINE_VERSION}/thirdparty/llama.cpp/"

# -- model files --------------------------------------------------------------------------------

GGUF_ARRAY_LIMIT = 1024
"""Per-layer arrays have at most 512 entries; longer ones are vocabularies."""
GGUF_SHARD_LIMIT = 1024
FINGERPRINT_SAMPLE_BYTES = 4096
"""One page of each stride: what the disk reads anyway for a single byte."""
FINGERPRINT_STRIDE_BYTES = 64 << 20
"""A 50 GB model has some 800 strides and 1,000 tensors: 0.2 s of reads on an SSD."""
INSPECT_TIMEOUT_S = 60.0
"""A cold 50 GB model on a spinning disk needs seconds; a minute means it hangs."""
INSPECT_MEMORY_BYTES = 8 << 30
"""Address space of the child that parses model files: the engine's module, a large vocabulary, no more."""

# -- the gateway --------------------------------------------------------------------------------

API_PORT = 9337
"""Where OpenAI clients find a node; the number that the documents and the agents' settings name."""
API_LISTEN = "127.0.0.1"
"""Loopback: what is open to the network has to be asked for, and needs a key."""
GATEWAY_BODY_LIMIT_BYTES = 256 << 20
"""Dozens of photographs in base64, or a million tokens many times over; no more than a machine can hold."""
GATEWAY_REPLAY_BYTES = 1 << 20
"""Kept to be sent again: every ordinary chat, and 64 requests at once take 64 MB at the worst."""
GATEWAY_HEADER_LIMIT_BYTES = 16 << 10
"""Of a request line or one header: twice what browsers and proxies send at their worst."""
GATEWAY_ANSWER_HEAD_LIMIT_BYTES = 64 << 10
"""Of the engine's answers, all headers together; llama-server's take less than 1 KB."""
GATEWAY_CHUNK_HEAD_LIMIT_BYTES = 4 << 10
"""A chunk's length and extensions that nobody uses."""
GATEWAY_HELD_BYTES = 64 << 10
"""Of an answer's body, while its head is on its way to the client; as much as a transport buffers."""
GATEWAY_CONNECT_S = 5.0
"""To a socket on this machine: far more than a busy machine needs, less than a person waits."""
GATEWAY_SILENCE_S = 600.0
"""A long prompt on a slow mesh takes minutes without a byte; after ten nobody is working on it."""
GATEWAY_ENGINE_IDLE_S = 4.0
"""The engine closes a connection after five idle seconds; leaving it first avoids meeting it half closed."""
GATEWAY_CLIENT_IDLE_S = 75.0
"""For a client to send its next request: what web servers usually grant."""
GATEWAY_EXPLAIN_S = 3.0
"""For the node to say why the engine broke off; it promises two."""
GATEWAY_METRICS_S = 2.0
"""The engine answers between two batches; a scrape must not wait for a long one."""
GATEWAY_LINGER_S = 5.0
"""To read on after a refusal, so that a client which sends its whole body first gets to see the reason."""
GATEWAY_STOP_S = 2.0
"""For requests cut short to write their last words before their connections go."""
GATEWAY_RETRY_AFTER_S = 1
"""Engines come back in seconds: a client that asks once a second costs nothing and loses little."""

# -- child processes ----------------------------------------------------------------------------

CHILD_STOP_GRACE_S = 3.0
"""Between asking a child to end and killing it. Ours end at once; a compiler needs a moment."""
CHILD_WRITE_TIMEOUT_S = 10.0
CHILD_LINE_LIMIT_BYTES = 64 << 10
"""Longer lines of a child's output are cut: nobody reads them, and memory is finite."""
CHILD_KEPT_LINES = 60
"""Lines of a child's last words: an assertion with its backtrace fits."""

# -- files and locks ----------------------------------------------------------------------------

UNIX_SOCKET_PATH_BYTES = 100
"""The kernel takes 107 on Linux and 103 on macOS."""
LOCK_POLL_S = 0.2
LOCK_TIMEOUT_S = 45 * 60.0
"""Longer than the slowest build, a GPU's on a laptop."""
PACKAGE_TIMEOUT_S = 30 * 60.0
"""100 MB over a very slow line."""

# -- building native libraries ------------------------------------------------------------------

BUILD_TIMEOUT_S = 40 * 60.0
"""The CPU library takes about a minute on two cores; a GPU's may take half an hour."""
BUILD_DISK_BYTES = 600_000_000
"""Sources, objects and libraries of the CPU build take half of it."""
BUILD_SHOWN_LINES = 12
"""Of the compiler's output when it fails: the error and its surroundings, on one screen."""

# -- memory -------------------------------------------------------------------------------------

MEMORY_RESERVE_BYTES = 512 << 20
MEMORY_RESERVE_SHARE = 0.03
"""Left to the system and the node itself when a model is fitted: the larger of the two."""
PROMPT_CACHE_LIMIT_BYTES = 8 << 30
"""What the engine keeps of finished prompts in main memory, when there is as much to spare."""

# -- the engine child ---------------------------------------------------------------------------

ENGINE_LOG_VERBOSITY = 4
"""llama.cpp's level that reports buffer sizes and timings; its debug level would log every token."""
ENGINE_LOG_BYTES = 4 << 20
ENGINE_LOG_COUNT = 2
"""Kept beside the current log: enough for the run that failed and the one before."""
ENGINE_BACKOFF_FIRST_S = 0.2
ENGINE_BACKOFF_LAST_S = 30.0
ENGINE_HEALTHY_S = 60.0
"""An engine that lived this long starts anew at the shortest pause."""
ENGINE_EXPLAIN_S = 2.0
"""Between a connection that breaks and the child's exit status lie milliseconds, a core dump at most."""

# -- models -------------------------------------------------------------------------------------

DEFAULT_MODEL = "smollm2"
"""Small enough for any machine and any line; on the package index, so that it needs no model hub."""
COPY_CHUNK_BYTES = 4 << 20

# -- a node -------------------------------------------------------------------------------------

DEFAULT_SLOTS = 4
"""Requests answered at once: one person, two agents and a spare."""
SLOTS_LIMIT = 256
"""llama.cpp's own limit on sequences."""
CONTEXT_LIMIT = 1 << 27
THREADS_LIMIT = 1024
DRAIN_S = 30.0
"""For answers under way when a node is told to stop; a second Ctrl-C does not wait for them."""
STATUS_ENGINE_S = 0.5
"""For the engine's own figures; `status` answers without them rather than late."""
CONTROL_TIMEOUT_S = 10.0
"""For a running node to answer its own command line."""
STOP_TIMEOUT_S = DRAIN_S + 15.0
"""For `mesh-llm stop` to see the node gone: its drain, then the end of its children."""
NODE_LOG_BYTES = 4 << 20
NODE_LOG_COUNT = 2
PROGRESS_LINE_S = 5.0
"""Between two lines about the same thing, where nobody draws a bar."""

# -- the demo -----------------------------------------------------------------------------------

DEMO_QUESTION = "Why is the sky blue?"
DEMO_ANSWER_TOKENS = 200
DEMO_READY_S = 45 * 60.0
"""The first time it downloads and builds; each of those has a bound of its own."""

# -- the worker child ---------------------------------------------------------------------------

WORKER_READY_S = 60.0
"""It loads libraries and maps files; a minute means that it hangs."""
WORKER_HAND_OVER_S = 5.0
"""For a worker on this machine to take a descriptor; it does nothing else in that thread."""
ENGINE_STAGES_S = 1
"""Between two reports of what the workers of a split engine have done."""

# -- nodes among themselves ---------------------------------------------------------------------

IROH_VERSION = "1.2.0"
"""Pinned exactly: a piece of its generated code is replaced."""
PROTOCOL_VERSION = 1
"""What nodes say to each other. Raised when an older node would misunderstand a newer one."""
ALPN = b"mesh-llm/1"
INVITE_LIFETIME_S = 7 * 24 * 3600
"""An invite that nobody used within a week was forgotten, not delayed."""
INVITES_LIMIT = 1000
"""Given out by one node; more means that something makes them in a loop."""
INVITE_ADDRESSES = 4
"""In a token: an interface or two, for both kinds of IP; each costs ten to twenty-six characters."""
INVITE_TEXT_LIMIT = 4096
CREDENTIAL_CHAIN_LIMIT = 8
"""Grants from the creator down to a member: people invite people, but not over that many corners."""
REVOKED_LIMIT = 10_000
"""Invites known to be revoked; each is 16 characters, and a message with all of them fits into a frame."""
FRAME_LIMIT_BYTES = 256 << 10
"""A view of a hundred nodes takes a quarter of it."""
HANDSHAKE_FRAME_LIMIT_BYTES = 16 << 10
"""Before admission: a full chain of grants takes 3 KB."""
STREAM_HEADER_LIMIT_BYTES = 64 << 10
"""What a stream says about itself first: a request's headers at their worst."""
HANDSHAKE_S = 5.0
"""For a stranger to prove itself: three round trips over the slowest line."""
HANDSHAKES_LIMIT = 32
"""Strangers at once: as many as a rack that starts together, and no more memory than they are worth."""
HANDSHAKE_EVICT_S = 0.5
"""A handshake this old makes room for a new one when all places are taken."""
CONNECT_S = 10.0
"""To a known member: direct paths answer in milliseconds, a relay in a second or two."""
JOIN_S = 20.0
"""Long enough for a relay and for a busy inviter, short enough for a person who waits."""
JOIN_ATTEMPT_S = 6.0
"""QUIC asks an inviter that does not answer after 1, 2, 4 … seconds; starting afresh asks more often."""
JOIN_RETRY_S = 0.5
PEERS_LIMIT = 1024
"""Ten times the mesh that this is meant for."""
PEER_QUEUE_FRAMES = 1024
PEER_QUEUE_BYTES = 4 << 20
"""Control messages that wait to be sent. A peer that far behind is not reading any more."""
PEER_STREAMS_LIMIT = 512
"""Opened by one peer at once: all its requests and links."""
STREAM_HEADER_S = 10.0
"""For a stream that was opened to say what it is for."""
STREAM_RESET_S = 2.0
NETWORK_CLOSE_S = 1.0
"""For last words to reach the peers: they leave at once, and one that is dead does not hold up the end."""
ADDRESS_POLL_S = 1.0
"""Between two looks at this node's own addresses, which change with its networks."""
FAILED_PER_NODE = 5.0
FAILED_PER_NODE_REFILL_S = 10.0
"""A person mistypes five times, then once in ten seconds."""
FAILED_OVERALL = 100.0
FAILED_OVERALL_REFILL_S = 0.02
"""Wrong tokens from ever new ids: fifty a second take a sixth of a core, and leave the rest to members."""
FAILED_PER_SOURCE = 20.0
FAILED_PER_SOURCE_REFILL_S = 1.0
"""From one IP address, which may be a whole office's, while wrong tokens pour in."""
FAILED_KEYS_LIMIT = 1024
"""Nodes and sources that are remembered for it."""
