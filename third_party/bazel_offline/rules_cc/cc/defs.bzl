"""Stands in for rules_cc: hands back the rules built into Bazel 7 and older."""

cc_binary = native.cc_binary
cc_library = native.cc_library
cc_test = native.cc_test
cc_toolchain = native.cc_toolchain
cc_toolchain_suite = native.cc_toolchain_suite

# Called by Bazel's own toolchain packages; nothing here depends on what they declare.
def cc_flags_supplier(**_):
    pass

def compiler_flag(**_):
    pass
