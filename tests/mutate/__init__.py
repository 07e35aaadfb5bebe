"""The mutation run: `python -m tests.mutate` changes the arithmetic of every backward, one token at a time.

No maintained tool does it: mutmut and cosmic-ray know Python alone and start the tests anew for each mutant, mull wants
clang and its IR. Here a Python mutant is a code object put into the running function, and the core is compiled once,
for one target, with every C++ mutant behind a switch; both are judged in a fork that has the cases of `tests/cases.py`
and their right results in memory.
"""
