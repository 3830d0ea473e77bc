"""Stands in for rules_python: hands back the rules built into Bazel 7 and older."""

py_binary = native.py_binary
py_library = native.py_library
py_test = native.py_test
