"""Model files: what they say about themselves, what they are called, where they lie.

facts             from a GGUF's metadata and tensor table to what planning needs
metadata          checked reading of a GGUF's metadata
cache_layout      what each layer keeps per sequence
layer_weights     what a token reads of a layer, by types and sizes of its tensors
layer_ranges      which bytes of the files belong to which layers
header_length     where the header of a file ends, from its first bytes
header_cache      headers of model files, kept for the next time
names             from any text that names a model to a file here or a download
catalog           models known by name: catalog.toml, and the user's own
catalog_facts     what planning needs of a model, from the catalog alone
adapters          LoRA adapters: whether a file is one, and goes with a model
draft_pairs       which draft model belongs to which model
eagle3            which EAGLE3 head drafts for which model
unsupported       sound files that the engine cannot run, and what to do instead
incoming_folders  folders for files that are not complete yet
part_file         a file on its way to the disk: hashed, and continued by the next run
stores            models of other programs: Hugging Face, LM Studio, Ollama
"""
