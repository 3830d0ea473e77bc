"""Nothing here but test files has examples, and some of it needs the extra `mutation`."""

collect_ignore_glob = ["[!t]*.py"]
