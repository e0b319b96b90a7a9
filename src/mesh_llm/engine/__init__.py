"""llama.cpp as a wheel: found, loaded, built for this machine, run as a child, explained.

Modules that run inside a child process, each fed one JSON line on stdin and
answering in JSON lines on stdout:

    gguf      reads model files (short-lived: a hostile file takes only it down)
    describe  lists devices and libraries (short-lived)
    serve     llama-server over the model (lives as long as the plan)

Modules of the node that own them: `process` (the only place that spawns or
signals), `supervisor` (one child's life), `diagnostics` (why it died),
`inspect` (asks the short-lived ones), `build` and `library`.
"""
