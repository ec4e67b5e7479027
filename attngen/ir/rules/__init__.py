"""The rules of the verifier, one idea a file. None of them calls a pass or knows how a pass decides: they walk."""
