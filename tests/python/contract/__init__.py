"""The contract harness: random inputs for every op, checked against float64 by the rules F1 to F7 of docs/numerics.md.

``numbers`` draws and fills tensors, ``case`` runs one call and prints it as Python, ``rules`` holds the checks, one
file an op says what it takes and what is exact, ``engine`` lets Hypothesis choose and shrink, ``__main__`` is
``make fuzz``.
"""
