"""What a measurement found, as one document: tables and curves with what they depend on.

document   the document, and JSON from it and back
samples    medians, quartiles and paired comparisons
compare    which figures of two documents differ beyond noise
markdown   the document as Markdown
page       the document as one HTML page
plots      its curves as pictures, where matplotlib is installed
write      all of these as files
"""
