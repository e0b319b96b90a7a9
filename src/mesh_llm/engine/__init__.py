"""llama.cpp as a wheel: found, loaded, built for this machine, run as a child, explained.

Modules that run inside a child process, each fed one JSON line on stdin and
answering in JSON lines on stdout:

    gguf      reads model files (short-lived: a hostile file takes only it down)
    describe  lists devices and libraries (short-lived)
    serve     llama-server over the model (lives as long as the plan)
    external  the same with a llama-server that the user built
    worker    lends a device to engines elsewhere

Modules of the node that own them: `process` (the only place that spawns or
signals), `supervisor` (an engine child's life), `worker_process` (a worker child's),
`diagnostics` (why they died), `inspect` (asks the short-lived ones), `build`
and `library`.
"""
