"""Read the logs of trainings that somebody else ran, with one module per format.

`formats` recognizes the format of a file. Each format turns a file into drafts of runs (`draft`), and `imported` turns
these into public runs. Files are read line by line, so that a log of any length needs little memory. Nothing in a log
is executed or unpickled.
"""
