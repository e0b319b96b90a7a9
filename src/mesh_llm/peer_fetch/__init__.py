"""Model files from other nodes of the mesh.

model_fetch   fetches whole models: complete and verified, or not at all
layer_fetch   fetches only the layers that a worker reads
sources       asks one peer after the other for what is missing
manifest      sizes, and the hash of every piece, as a source tells them
piece_hashes  hashes of this node's own files, cached
part_files    files on their way: which pieces have arrived
sparse_files  some pieces in files of the full size; the rest are holes
channel       the byte stream that a file travels over, and its pace
serve         sends this node's files to peers
throttle      sends slowly while this node answers requests
"""
