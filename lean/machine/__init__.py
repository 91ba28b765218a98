"""The machine as this process may use it: CPUs, memory, waiting threads. Imports the standard library alone.

Every limit is read from files of the system. A file that is missing, unreadable or damaged sets no limit. ``root`` is
the folder that stands for ``/``.
"""
