"""Programs that run in child processes and load the engine; their owners are in `engine`.

Each reads one JSON line from stdin and answers in JSON lines on stdout.

    serve        llama-server over the model; lives as long as its plan
    external     the same, with a llama-server that the user built
    worker       lends a device to engines elsewhere
    gguf         reads model files (a hostile file takes down only this child)
    describe     lists devices, CPU features and libraries
    cuda_driver  asks NVIDIA's driver what it runs
    measure      measures a device's speed
    page         takes llama.cpp's web page out of the engine
    vocabulary   compares the vocabularies of a model and its draft model
"""
