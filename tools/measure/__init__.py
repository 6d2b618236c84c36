"""What makes the figures of docs/results on a machine with GPUs that is there for a limited time: see README.md in this folder.

`queue`, `plan`, `jobs`, `state`, `checkout` and `pack` need nothing but Python; `collect` reads runs with samebits.
"""
