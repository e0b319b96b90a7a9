"""llama.cpp as a wheel: found, built for this machine, run in child processes, supervised.

The node never loads the engine; programs in `children` do. These modules own them:

    process         child processes: the only module that spawns or signals
    supervisor      the life of an engine child: start, watch, restart, end
    worker_process  the life of a worker child
    health_check    whether a running engine still answers
    diagnostics     the engine's log: buffer sizes, and why it died
    log_file        the engine's log on disk
    telemetry       figures that a running engine reports
    spec            what an engine or worker child is told, as one JSON document
    inspect         asks the short-lived children about model files and devices
    speed           how fast this machine's devices are, measured once
    kernel_speed    how fast they are with what one model is made of
    machine         processor, memory, threads
    gpus            GPUs on Linux, and the libraries that were built for them
    cuda_mps        whether CUDA's multi-process service is there
    cuda_toolkit    CUDA's compiler and cuBLAS, fetched where there is no toolkit
    library         finds and loads the wheel and the native libraries
    build           builds native libraries, once per machine
    prebuilt        those that came with the package, and which of them to use
    page            llama.cpp's web page, taken out of the engine
    sources         the engine's sources, which libraries are built from
    packages        fetches packages with pip
    file_lock       a lock between processes
"""
