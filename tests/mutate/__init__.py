"""The mutation run: `python -m tests.mutate` changes the arithmetic of every backward, one token at a time.

No maintained tool does it: mutmut and cosmic-ray know Python alone and start the tests anew for each mutant, mull wants
clang and its IR. Here a Python mutant is a code object put into the running function, a C++ mutant one translation unit
compiled for one target and linked with the others; both are judged in a fork that has the cases of `tests/cases.py` and
their right results in memory, so the full set fits in 30 minutes on 2 cores.
"""
