"""What to type and paste so that other people's agents use a node: one source for terminal, page and files.

`snippets`     the commands and snippets, as people copy them
`config_files`   what an agent's own config file has to say, and what that makes of the file that is there
`json_edit`   changes to a JSON text that leave everything else in it as it was

All of it is pure: whoever calls reads and writes the files.
"""
