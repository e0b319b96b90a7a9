"""Programs of child processes, which load the engine; whoever starts them never does."""
