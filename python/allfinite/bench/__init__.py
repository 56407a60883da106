"""Times every op beside torch's own, in one process; the command is ``python -m allfinite bench``.

Each module ``<family>.py`` lists the cases of a family of ops; ``measure`` times them, ``goals`` judges them and
``report`` writes them down.
"""
