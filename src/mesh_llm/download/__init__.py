"""Downloads of models: from the hub, a URL or a Python package, checked against their hashes.

model_download  whole models into the models folder: complete and verified, or not at all
hub             Hugging Face's hub: files, sizes, hashes, tokens, mirrors
http            a file on a web server: its size and version, and what can go wrong
range_transfer  one file's bytes by ranges; continues after a cut
remote_header   the headers of a model that is not here, by ranges of a few MB
versioned_part  a file on its way to the disk, of one version of the server's
checksum        the hash that lies beside each downloaded file
package_model   a model inside a Python package
"""
