"""Commands and settings that let other people's agents use a node: one source for terminal, page and files.
All of it is pure: whoever calls it reads and writes the files.

    snippets      commands and snippets to copy
    config_files  what an agent's own config file has to say, and how the existing file changes
    json_edit     changes to a JSON text that keep everything else in it as it was
"""
