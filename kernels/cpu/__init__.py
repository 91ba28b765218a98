"""The two ops in C++ for CPUs: sources, their build, and the binding."""
