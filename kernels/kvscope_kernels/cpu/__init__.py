"""CPU operations, compiled from C on the machine that runs them if it has a compiler. All of them are optional."""
